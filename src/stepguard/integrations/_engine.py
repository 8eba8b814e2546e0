"""What the guards of engines share that keep gradients and weights in buffers of their own.

No hook of torch can stop an update there. Each engine has a step that it passes over on all ranks,
the one whose fp16 gradients overflowed, and a bad step is sent down that path.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard._errors import SaveRefused, TrainingHalted
from stepguard.diagnose import diagnose as find_causes
from stepguard.engine.build import build_context
from stepguard.engine.context import bare_step
from stepguard.engine.drivers.step import add_to_history
from stepguard.engine.incident.exceptions import tell_end
from stepguard.engine.incident.incident_record import free_id, write_down
from stepguard.engine.incident.run_facts import run_facts
from stepguard.engine.incident.situation import exit_line, exit_with_code_three
from stepguard.engine.protect import Protection, in_words
from stepguard.judge import judge as judge_reading
from stepguard.judge.decide import RewindPlan, RewindTarget, Situation, decide
from stepguard.locate import locate
from stepguard.records import Decision, GuardConfig, Incident, Origin, Reading
from stepguard.state.batch import LossFn, Step, bad_batch_tensors
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import RngState, capture_rng
from stepguard.tensors.torch_private import foreach_norm
from stepguard.tensors.values import is_finite

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Closing:
    """A context manager over everything that was installed into a user's program."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def close(self) -> None:
        """Undo every hook and wrapper. Safe to call twice."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class EngineGuard(Closing):
    """Guards one engine: reads what it has reduced, and agrees before each of its updates.

    Every step costs one reduction of three numbers. A subclass says where the engine keeps its
    gradients and its state, how it passes over an update, and what it can go back to.
    """

    no_rewind = ""
    """Why there is nothing to go back to."""

    def __init__(
        self, inside: str, model: nn.Module, optimizer: Optimizer, config: GuardConfig
    ) -> None:
        super().__init__()
        # a capsule would hold the parts of one rank, which nothing could replay
        config = replace(config, capsule="off")
        self._context = build_context(
            *(model, optimizer, None, None, None, None), config=config, inside=inside
        )
        outputs = self._context.outputs
        self._undo.callback(self._context.resources.close)
        self._undo.callback(self._end)
        self._protect = Protection(self._disarmed, functools.partial(outputs.note, "fault"))
        self.port = EnginePort(self)
        """What a framework around the engine asks of this guard."""
        self._losses: list[Tensor] = []
        """One for each micro-batch of the step at hand, on its device, as their sum is the loss."""
        self._seen: list[tuple[LossFn, Any, RngState]] = []
        """The micro-batches that can be run again."""
        self._remembered = False
        self._reading: Reading | None = None
        """The numbers of the update that was just made or passed over."""
        self._incident: Incident | None = None
        """An incident that waits for the end of the engine's step."""
        hook = model.register_forward_pre_hook(self._forward_begins, prepend=True)
        self._undo.callback(hook.remove)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident so far, oldest first."""
        return tuple(self._context.incidents)

    @property
    def steps(self) -> int:
        """Steps of the engine that are done."""
        return self._context.step

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer inside the engine."""
        return self._context.optimizer

    def follow(self, name: str, value: Tensor | float) -> None:
        """Record a value of this step next to its loss, as `Guard.follow` does."""
        if self._protect.armed:
            self._context.follow(name, value)

    # --- what an engine gives ---

    @property
    def _device(self) -> torch.device:
        raise NotImplementedError

    @property
    def _scale(self) -> float | None:
        """The loss scale of an fp16 run."""
        raise NotImplementedError

    @property
    def _calibrates(self) -> bool:
        """Does the engine look for its loss scale by overflows, which it passes over itself?"""
        raise NotImplementedError

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the reduced gradients, by name."""
        raise NotImplementedError

    def _trouble(self) -> list[str]:
        """Parameters, buffers and optimizer slots of this rank's parts that are non-finite."""
        raise NotImplementedError

    def _passed_over(self, original: Callable[..., Any]) -> Any:
        """Let the engine drop gradients and update as after an overflow; the loss scale stays."""
        raise NotImplementedError

    @property
    def _whole(self) -> bool:
        """Can every micro-batch of the step be run again?"""
        return len(self._seen) == len(self._losses) and bool(self._seen)

    def _plain_model(self, *, hold: bool) -> Any:
        """A context with a copy of the model that can be run again where `hold`, or None."""
        raise NotImplementedError

    @contextmanager
    def _runs_on(self, plain: nn.Module) -> Iterator[None]:
        """The loss functions of micro-batches run the copy."""
        raise NotImplementedError

    def _target(self) -> tuple[int, str] | None:
        """The step of the newest good checkpoint, and where it is."""
        return None

    def _rewind(self, decision: Decision) -> Decision:
        """Load that checkpoint; what was really done."""
        return decision

    # --- one step ---

    def _end(self) -> None:
        with self._protect.part("end of the run"):
            tell_end(self._context, None, armed=self._protect.armed)
        self._protect.armed = False

    def _disarmed(self, fault: Exception) -> None:
        self._context.agreement.leave()
        fields = {"step": self._context.step, "error": in_words(fault)}
        self._context.outputs.line("fault", fields)

    def _remember(self, loss_fn: LossFn, batch: Any) -> None:
        """`loss_fn(batch)` is about to be called, and may be needed once more."""
        if self._protect.armed:
            with self._protect.part("replay of bad steps"):
                self._seen.append((loss_fn, batch, capture_rng()))

    def _forward_begins(self, *_: Any) -> None:
        if not self._remembered and torch.is_grad_enabled() and self._protect.armed:
            self._remembered = True
            with self._protect.part("buffers before the step"):
                self._context.remember()

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, once in each accumulation: read, agree, and update or veto."""
        own = Reading(step=self._context.step)
        if self._protect.armed:
            with self._protect.region:
                own = self._read()
        agreed = self._agreed(own)
        self._reading = agreed
        if not agreed.alarm:
            return original(*args, **kwargs)
        if self._protect.armed:
            with self._protect.part("explanation of a bad step"):
                self._incident = self._explained(agreed)
        return self._passed_over(original)

    def _concluded(self, *, overflow: str = "", norm: float | None = None) -> None:
        """The engine is through with its step: only now may a rewind load.

        `overflow` says how it passed over the update by itself, if it did.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return  # a micro-batch before the last one of its step
        incident, self._incident = self._incident, None
        self._losses, self._seen, self._remembered = [], [], False
        if not self._protect.armed:
            return
        with self._protect.region:
            if incident is not None:
                self._conclude(incident)
            else:
                self._went_through(reading, overflow, norm)

    # --- read, agree ---

    def _read(self) -> Reading:
        """The numbers of this rank; one wait for the device."""
        gradients = [gradient for _, gradient in self._gradients()]
        norms = foreach_norm(gradients, 2.0, dtype=torch.float32) if gradients else []
        recorded = self._context.memory.followed.items()
        followed = {name: value for name, (step, value) in recorded if step == self._context.step}
        numbers = [loss.reshape(()) for loss in self._losses]
        everything = (*numbers, *followed.values(), *norms, torch.zeros(()))
        packet = torch.stack([one.to(self._device).float() for one in everything]).tolist()
        losses = tuple(packet[: len(numbers)])
        rest = packet[len(numbers) :]
        finite = all(map(math.isfinite, rest[len(followed) :]))
        return Reading(
            step=self._context.step,
            loss=sum(losses) if losses else None,
            micro_losses=losses,
            # an infinite norm of finite elements is told apart
            grads_finite=finite or all(map(is_finite, gradients)),
            grad_norm=None if finite else math.inf,
            scale=self._scale,
            lr=self._context.lr,
            followed=dict(zip(followed, rest, strict=False)),
        )

    def _agreed(self, own: Reading) -> Reading:
        """Is the step bad on any rank? `shared_loss`: the mean over the ranks."""
        loss = own.loss if own.loss is not None else 0.0
        bad_loss = not math.isfinite(loss)
        bad_gradients = not self._calibrates and own.grad_norm == math.inf
        numbers = [float(bad_loss or bad_gradients), float(own.loss is not None)]
        numbers.append(0.0 if bad_loss else loss)
        packet = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if self._context.agreement.size > 1:
            dist.all_reduce(packet)
        bad, known, total = packet.tolist()
        shared = total / known if known and not bad else own.loss
        return replace(own, alarm=bool(bad), shared_loss=shared)

    def _went_through(self, reading: Reading, overflow: str, norm: float | None) -> None:
        """The engine made its update, or left it out because fp16 overflowed."""
        context = self._context
        if overflow:
            reading = replace(reading, overflow=True, grads_finite=False)
            verdict = judge_reading(reading, context.history, context.config)
            context.outputs.note(verdict.kind, f"{verdict.summary}. {overflow}", step=reading.step)
            context.outputs.step(reading, committed=False)
            return
        reading = replace(reading, grad_norm=norm)
        verdict = judge_reading(reading, context.history, context.config)
        if verdict.kind != "ok":
            context.outputs.note(verdict.kind, verdict.summary, step=reading.step)
        add_to_history(context, bare_step(context), reading)
        context.outputs.step(reading, committed=True)

    # --- a bad step: all ranks are here, and stay together ---

    def _explained(self, own: Reading) -> Incident:
        """Put buffers back, then two exchanges: what each rank has read, and what it located."""
        context = self._context
        context.put_back()

        def examine() -> dict[str, Any]:
            batches = tuple(batch for _, batch, _ in self._seen)
            bad = [name for name, gradient in self._gradients() if not is_finite(gradient)]
            reading = replace(
                own,
                bad_state=tuple(self._trouble()),
                bad_inputs=tuple(bad_batch_tensors(batches)),
                bad_grads=tuple(dict.fromkeys(filter(None, bad))),
            )
            return {"reading": reading}

        told = context.agreement.together(examine, "the reading")
        readings: list[Reading] = [facts["reading"] for facts in told]
        reading = agreed_reading(readings)
        origins = self._located(reading, readings)
        verdict = judge_reading(reading, context.history, context.config)
        run_dir = context.config.run_dir
        incident = Incident(
            id=free_id(context, f"{reading.step:08d}-{verdict.kind}"),
            step=reading.step,
            verdict=verdict,
            reading=reading,
            run=str(run_dir) if run_dir is not None else None,
            rank=context.agreement.world_rank,
            origin=origins[0] if origins else None,
        )
        return replace(incident, findings=find_causes(incident, run_facts(context, reading)))

    def _located(self, reading: Reading, readings: list[Reading]) -> list[Origin]:
        """What the ranks found whose loss was bad; all of them where only gradients were."""
        context = self._context
        finders = reading.bad_ranks or tuple(range(len(readings)))
        rank = context.agreement.world_rank
        with self._plain_model(hold=rank in finders) as plain:

            def find() -> dict[str, Any]:
                if plain is None or not context.config.locates:
                    return {"origin": None}
                return {"origin": self._find(plain, readings[rank])}

            told = context.agreement.together(find, "the origin")
        found = []
        for place, facts in enumerate(told):
            if facts["origin"] is not None:
                found.append(replace(facts["origin"], rank=place))
        # of gradients that were exchanged, the rank that shows them again by itself made them
        found.sort(key=lambda origin: origin.reproduced is not True)
        return found

    def _find(self, plain: nn.Module, reading: Reading) -> Origin:
        buffers = BufferKeeper([plain])
        buffers.remember()
        whole = self._whole
        step = Step(
            *(reading.step, plain, self._context.optimizer, {}, buffers),
            loss_fn=self._seen[0][0] if whole else None,
            micro_batches=tuple(batch for _, batch, _ in self._seen) if whole else (),
            rng=[state for _, _, state in self._seen] if whole else [],
            sharded=True,
            gathered=True,
        )
        with self._runs_on(plain):
            return locate(step, reading, self._context.memory.effort)

    # --- decide, apply, record ---

    def _conclude(self, incident: Incident) -> None:
        """Decide alike on every rank, by what all ranks know; then apply and record."""
        context = self._context
        saved = self._target()
        plan = None
        if saved is not None:
            target = RewindTarget(step=saved[0], kind="checkpoint")
            plan = RewindPlan(target=target, data="skip")
        situation = Situation(
            step=incident.step,
            fault="state" if incident.reading.bad_state else "data",
            rewind=plan,
            no_rewind=self.no_rewind,
        )
        decision, context.budget = decide(situation, context.config.policy, context.budget)
        if decision.action == "rewind":
            decision = self._rewind(decision)
        incident = write_down(context, replace(incident, decision=decision), bare_step(context))
        if not incident.stopped:
            context.outputs.step(incident.reading, committed=False)
            return
        cause = incident.findings[0].code if incident.findings else incident.verdict.kind
        state = saved[1] if saved is not None else None
        restart: Any = "same-fault" if state else "change-code"
        line = exit_line(step=incident.step, cause=cause, restart=restart, state=state)
        context.outputs.halted(incident, line)
        exit_with_code_three()
        raise TrainingHalted(incident, state=state, restart=restart)

    def _refuse_bad_state(self, what: str) -> None:
        """Raise on all ranks before anything is written; every rank calls it."""
        names = self.port.trouble(together=True)
        if names:
            refused = SaveRefused(what, names)
            self._context.outputs.note("save-refused", str(refused))
            raise refused


class EnginePort:
    """The side of an engine's guard for a framework around it, as `Guard.port` is that of another.

    No step of an engine is ever pending, and it keeps its schedule by itself.
    """

    dropped = False

    def __init__(self, guard: EngineGuard) -> None:
        self._guard = guard
        self._context = guard._context

    def micro(self, loss_fn: LossFn, batch: Any) -> None:
        """Call just before a micro-batch is run, whose part of the step's loss this computes."""
        self._guard._remember(loss_fn, batch)

    def reads_text_with(self, tokenizer: Any) -> None:
        self._context.data.tokenizer = tokenizer

    def start_at(self, step: int) -> None:
        self._context.step = step

    def settle(self) -> None:
        pass

    def finite(self) -> bool:
        """Are parameters, buffers and optimizer state of this rank finite now?"""
        return not self._guard._trouble()

    def trouble(self, *, together: bool = False) -> tuple[str, ...]:
        """Name stored tensors that are non-finite, of all ranks if all of them ask now."""
        if not together:
            return tuple(self._guard._trouble())
        told = self._context.agreement.together(
            lambda: {"bad": self._guard._trouble()}, "an inspection of the weights"
        )
        return tuple(dict.fromkeys(name for facts in told for name in facts["bad"]))

    @property
    def good(self) -> bool:
        """Has the run not diverged, by its loss?"""
        return self._context.history.diverged_at is None

    def say(self, kind: str, summary: str) -> None:
        self._context.outputs.note(kind, summary)


def bad_slots(optimizer: Optimizer) -> list[str]:
    """Slots of an optimizer that are non-finite for any parameter."""
    found = []
    for slots in optimizer.state.values():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and not is_finite(value):
                found.append(f"opt:{slot}")
    return list(dict.fromkeys(found))


def agreed_reading(readings: list[Reading]) -> Reading:
    """The reading of the first bad rank, with whatever is stored and bad on any rank."""
    bad = []
    state: dict[str, None] = {}
    gradients: dict[str, None] = {}
    for rank, reading in enumerate(readings):
        state.update(dict.fromkeys(reading.bad_state))
        gradients.update(dict.fromkeys(reading.bad_grads))
        if reading.loss is not None and not math.isfinite(reading.loss):
            bad.append(rank)
    if state:
        # bad weights make every loss bad
        bad = [rank for rank, reading in enumerate(readings) if reading.bad_state]
    chosen = readings[bad[0] if bad else 0]
    return replace(
        chosen,
        grads_finite=all(reading.grads_finite for reading in readings),
        bad_state=tuple(state),
        bad_grads=tuple(gradients),
        bad_ranks=tuple(bad),
    )


def plain_copy(module: nn.Module, known: dict[int, Any]) -> nn.Module:
    """A copy without hooks, whose parameters are whole; tied ones stay tied."""
    if id(module) in known:
        twin: nn.Module = known[id(module)]
        return twin
    twin = known[id(module)] = copy.copy(module)
    fields = vars(twin)
    # copied by hand: ZeRO puts a dictionary of its own here, which gathers what is read from it
    parameters: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in known:
            whole = parameter.detach().clone()
            known[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        parameters[name] = None if parameter is None else known[id(parameter)]
    fields["_parameters"] = parameters
    fields["_buffers"] = {
        name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()
    }
    children = {
        name: None if child is None else plain_copy(child, known)
        for name, child in module._modules.items()
    }
    fields["_modules"] = children
    for name in HOOKS:
        fields[name] = type(fields[name])()
    return twin
