"""stepguard inside DeepSpeed: call `guard(engine)` after `deepspeed.initialize`, on every rank.

    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    guard = stepguard.integrations.deepspeed.guard(engine)

Writing `loss = guard.loss(loss_fn, batch)` in place of `loss = loss_fn(batch)` lets a bad step be
located: `loss_fn` calls the engine.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepguard._errors import ConfigError, SaveRefused, StepguardError, TrainingHalted
from stepguard.diagnose import diagnose as find_causes
from stepguard.engine.build import build_context
from stepguard.engine.context import bare_step
from stepguard.engine.drivers.step import add_to_history
from stepguard.engine.incident.exceptions import tell_end
from stepguard.engine.incident.incident_record import free_id, write_down
from stepguard.engine.incident.run_facts import run_facts
from stepguard.engine.incident.situation import exit_line, exit_with_code_three
from stepguard.engine.protect import Protection, in_words
from stepguard.engine.wiring import check_config
from stepguard.integrations._parts import Framework, around, refuse_settings_of_step
from stepguard.judge import judge as judge_reading
from stepguard.judge.decide import RewindPlan, RewindTarget, Situation, decide
from stepguard.locate import locate
from stepguard.records import GuardConfig, Incident, Origin, Reading
from stepguard.sentinel.gradients import bad_buffers
from stepguard.state.batch import LossFn, Step, bad_batch_tensors, total_loss
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import RngState, capture_rng
from stepguard.state.sharded import has_room
from stepguard.tensors.names import swapped
from stepguard.tensors.torch_private import foreach_norm
from stepguard.tensors.values import is_finite

DEEPSPEED = Framework("deepspeed", first="0.19", before="0.20", tested="0.19.8")
DEEPSPEED.require()

from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402 (first the version)
from deepspeed.runtime.zero.partition_parameters import GatheredParameters  # noqa: E402
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

__all__ = ["EngineGuard", "SaveRefused", "guard"]

OF_ENGINE = ("backward", "step", "save_checkpoint", "load_checkpoint", "global_steps", "module")
OF_ZERO_1_2 = ("averaged_gradients", "check_grad_overflow", "has_overflow", "_update_scale")
OF_ZERO_3 = ("averaged_gradients", "_overflow_check_and_loss_scale_update", "_update_scale")
NOT_SAVED = "this run has saved no checkpoint through engine.save_checkpoint yet"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def guard(engine: DeepSpeedEngine, config: GuardConfig | None = None) -> EngineGuard:
    """Guard the steps and the checkpoints of this engine. `close()` undoes everything."""
    if type(engine) is not DeepSpeedEngine:
        raise ConfigError(
            f"guard() got a {type(engine).__name__}; give the DeepSpeedEngine that "
            "deepspeed.initialize returned (a PipelineEngine is not supported)."
        )
    DEEPSPEED.need(engine, *OF_ENGINE)
    zero = engine.optimizer
    if type(zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        raise ConfigError(
            f"the engine updates with {type(zero).__name__}; this guard works with ZeRO stages 1, "
            '2 and 3: set {"zero_optimization": {"stage": 1}}.'
        )
    third = type(zero) is DeepSpeedZeroOptimizer_Stage3
    DEEPSPEED.need(zero, *(OF_ZERO_3 if third else OF_ZERO_1_2))
    offloads = zero.offload_optimizer if third else zero.cpu_offload
    if offloads or engine.mpu is not None:
        what = "offloads the optimizer" if offloads else "is split over ranks (mpu)"
        raise ConfigError(f"the engine {what}, which this guard has not been tested with.")
    settings = check_config(config)
    refuse_settings_of_step(settings, 'use "gradient_clipping" and "fp16" of the engine')
    return EngineGuard(engine, settings)


class EngineGuard:
    """Guards one engine. A context manager; built by `guard`.

    Every step costs one reduction of four numbers. A bad update is passed over on all ranks by the
    path that DeepSpeed takes when fp16 overflows, without a change of the loss scale.
    """

    def __init__(self, engine: Any, config: GuardConfig) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._undo = ExitStack()
        # a capsule would hold the parts of one rank, which nothing could replay
        config = replace(config, capsule="off")
        self._context = build_context(
            *(engine.module, self._zero.optimizer, None, None, None, None),
            config=config,
            inside="deepspeed",
        )
        outputs = self._context.outputs
        self._undo.callback(self._context.resources.close)
        self._protect = Protection(self._disarmed, functools.partial(outputs.note, "fault"))
        self._losses: list[Tensor] = []
        """One for each micro-batch of the step at hand, on its device."""
        self._seen: list[tuple[LossFn, Any, RngState]] = []
        """The micro-batches that came through `loss`."""
        self._remembered = False
        self._reading: Reading | None = None
        """The numbers of the update that was just made or passed over."""
        self._incident: Incident | None = None
        """An incident that waits for the end of `engine.step`."""
        self._saved: tuple[int, Path, str] | None = None
        """Step, folder and tag of the newest checkpoint, which was good when it was written."""
        self._closed = False
        hook = engine.module.register_forward_pre_hook(self._forward_begins, prepend=True)
        self._undo.callback(hook.remove)
        around(self._undo, engine, "backward", self._backward)
        around(self._undo, engine, "step", self._step)
        around(self._undo, engine, "save_checkpoint", self._save)
        around(self._undo, self._zero, "step", self._update)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident so far, oldest first."""
        return tuple(self._context.incidents)

    def loss(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """Return `loss_fn(batch)` and remember it, so that a bad step can be located.

        Give the result to `engine.backward`. Call the engine in `loss_fn`, not the model inside it:
        a bad micro-batch is run again on a copy of the model that DeepSpeed knows nothing of.
        """
        if not self._closed and self._protect.armed:
            with self._protect.part("replay of bad steps"):
                self._seen.append((loss_fn, batch, capture_rng()))
        return total_loss(loss_fn(batch))

    def close(self) -> None:
        """Say how the run ended and undo every hook and wrapper. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._protect.part("end of the run"):
                tell_end(self._context, None, armed=self._protect.armed, by_signal="")
        finally:
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _disarmed(self, fault: Exception) -> None:
        self._context.agreement.leave()
        fields = {"step": self._context.step, "error": in_words(fault)}
        self._context.outputs.line("fault", fields)

    # --- what the engine does: each gets the original first ---

    def _forward_begins(self, *_: Any) -> None:
        if not self._remembered and torch.is_grad_enabled() and self._protect.armed:
            self._remembered = True
            with self._protect.part("buffers before the step"):
                self._context.remember()

    def _backward(
        self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._losses.append(loss.detach())
        return original(loss, *args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Conclude a step once the engine is through with it: only then may a rewind load."""
        result = original(*args, **kwargs)
        reading, self._reading = self._reading, None
        if reading is None:
            return result  # a micro-batch before the last one of its step
        incident, self._incident = self._incident, None
        self._losses, self._seen, self._remembered = [], [], False
        if self._protect.armed:
            with self._protect.region:
                if incident is not None:
                    self._conclude(incident)
                else:
                    self._went_through(reading)
        self._context.step = int(self._engine.global_steps)
        return result

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, once in each accumulation: read, agree, and update or veto."""
        context = self._context
        context.step = int(self._engine.global_steps)
        own = Reading(step=context.step)
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

    def _passed_over(self, original: Callable[..., Any]) -> Any:
        """Let ZeRO drop gradients and update as after an overflow; the loss scale stays."""
        zero = self._zero

        def overflowed(update_scale: bool = True) -> bool:
            zero.overflow = True
            return True

        with ExitStack() as undo:
            undo.enter_context(swapped(zero, "_update_scale", lambda *_: None))
            if type(zero) is DeepSpeedZeroOptimizer_Stage3:
                name = "_overflow_check_and_loss_scale_update"
                undo.enter_context(swapped(zero, name, overflowed))
            else:
                undo.enter_context(swapped(zero, "check_grad_overflow", other=True))
                undo.enter_context(swapped(zero, "has_overflow", lambda *_, **__: True))
            return original()

    def _save(self, original: Callable[..., Any], save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise on all ranks before anything is written; every rank calls it."""
        told = self._context.agreement.together(
            lambda: {"bad": stored_trouble(self._engine)}, "an inspection of the weights"
        )
        names = tuple(dict.fromkeys(name for facts in told for name in facts["bad"]))
        tag = kwargs.get("tag") or (args[0] if args else None)
        tag = tag or f"global_step{self._engine.global_steps}"
        if names:
            refused = SaveRefused(f"{save_dir}/{tag}", names)
            self._context.outputs.note("save-refused", str(refused))
            raise refused
        result = original(save_dir, *args, **kwargs)
        self._saved = int(self._engine.global_steps), Path(save_dir), str(tag)
        return result

    # --- read, agree ---

    def _read(self) -> Reading:
        """The numbers of this rank; one wait for the device."""
        zero = self._zero
        divisor = self._engine.gradient_accumulation_steps()
        gradients = [gradient for _, gradient in self._gradients()]
        norms = foreach_norm(gradients, 2.0, dtype=torch.float32) if gradients else []
        numbers = [loss.float().reshape(()) / divisor for loss in self._losses]
        device = self._engine.device
        packet = torch.stack(
            [one.to(device).float() for one in (*numbers, *norms)]
            or [torch.zeros((), device=device)]
        ).tolist()
        losses = tuple(packet[: len(numbers)])
        finite = all(map(math.isfinite, packet[len(numbers) :]))
        return Reading(
            step=self._context.step,
            loss=sum(losses) if losses else None,
            micro_losses=losses,
            # an infinite norm of finite elements is told apart
            grads_finite=finite or all(map(is_finite, gradients)),
            grad_norm=None if finite else math.inf,
            scale=float(zero.loss_scale) if self._engine.fp16_enabled() else None,
            lr=self._context.lr,
        )

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the reduced gradients, by name."""
        zero = self._zero
        third = type(zero) is DeepSpeedZeroOptimizer_Stage3
        groups = zero.fp16_groups if third else zero.params_in_partition
        for number, gradients in zero.averaged_gradients.items():
            # padding of the last partition has no parameter
            for place, gradient in enumerate(gradients or ()):
                names = self._engine.param_names
                known = place < len(groups[number])
                name = names.get(groups[number][place], "") if known else ""
                if gradient is not None:
                    yield name, gradient

    def _agreed(self, own: Reading) -> Reading:
        """Is the step bad on any rank? `shared_loss`: the mean over the ranks."""
        loss = own.loss if own.loss is not None else 0.0
        bad_loss = not math.isfinite(loss)
        # An fp16 run looks for its scale by overflows of gradients, and passes over them itself.
        calibrates = own.scale is not None and self._zero.dynamic_loss_scale
        bad_gradients = not calibrates and own.grad_norm == math.inf
        numbers = [float(bad_loss or bad_gradients), float(own.loss is not None)]
        numbers.append(0.0 if bad_loss else loss)
        packet = torch.tensor(numbers, dtype=torch.float64, device=self._engine.device)
        if self._context.agreement.size > 1:
            dist.all_reduce(packet)
        bad, known, total = packet.tolist()
        shared = total / known if known and not bad else own.loss
        return replace(own, alarm=bool(bad), shared_loss=shared)

    def _went_through(self, reading: Reading) -> None:
        """The engine made its update, or left it out because fp16 overflowed."""
        context = self._context
        if self._zero.overflow:
            reading = replace(reading, overflow=True, grads_finite=False)
            verdict = judge_reading(reading, context.history, context.config)
            count = self._engine.skipped_steps
            facts = f"DeepSpeed skipped the update (skipped_steps: {count})"
            context.outputs.note(verdict.kind, f"{verdict.summary}. {facts}", step=reading.step)
            context.outputs.step(reading, committed=False)
            return
        norm = self._zero._global_grad_norm
        reading = replace(reading, grad_norm=None if norm is None else float(norm))
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
                bad_state=tuple(stored_trouble(self._engine)),
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
        whole = len(self._seen) == len(self._losses) and bool(self._seen)
        functions = dict.fromkeys(loss_fn for loss_fn, _, _ in self._seen)
        step = Step(
            *(reading.step, plain, self._context.optimizer, {}, buffers),
            loss_fn=self._divided(next(iter(functions))) if whole else None,
            micro_batches=tuple(batch for _, batch, _ in self._seen) if whole else (),
            rng=[state for _, _, state in self._seen] if whole else [],
            sharded=True,
            gathered=True,
        )
        with self._runs_on(plain):
            return locate(step, reading, self._context.memory.effort)

    def _divided(self, loss_fn: LossFn) -> LossFn:
        """The loss as the engine divides it for accumulation."""
        divisor = self._engine.gradient_accumulation_steps()

        def divided(batch: Any) -> Tensor:
            return total_loss(loss_fn(batch)).div(divisor)

        return loss_fn if divisor == 1 else divided

    @contextmanager
    def _plain_model(self, *, hold: bool) -> Iterator[nn.Module | None]:
        """A copy of the model without hooks and with whole parameters. All ranks enter at once."""
        module = self._engine.module
        third = type(self._zero) is DeepSpeedZeroOptimizer_Stage3
        room = has_room([module])
        # all of them or none: gathering is a collective
        if third and self._context.agreement.any_rank(not room, self._engine.device):
            yield None
            return
        plain = None
        with GatheredParameters(list(module.parameters()), enabled=third):
            if hold and room:
                plain = plain_copy(module, {})
        yield plain

    @contextmanager
    def _runs_on(self, plain: nn.Module) -> Iterator[None]:
        """Calls of the engine run the copy; those of its model are refused."""
        engine = self._engine
        original = engine.module

        def refuse(*_: Any) -> None:
            raise StepguardError("the loss function calls the model itself; call the engine")

        with ExitStack() as undo:
            for module in original.modules():
                undo.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
            undo.enter_context(swapped(engine, "forward", functools.partial(plain.__call__)))
            undo.callback(engine._modules.__setitem__, "module", original)
            engine._modules["module"] = plain
            yield

    # --- decide, apply, record ---

    def _conclude(self, incident: Incident) -> None:
        """Decide alike on every rank, by what all ranks know; then apply and record."""
        context = self._context
        plan = None
        if self._saved is not None:
            target = RewindTarget(step=self._saved[0], kind="checkpoint")
            plan = RewindPlan(target=target, data="skip")
        situation = Situation(
            step=incident.step,
            fault="state" if incident.reading.bad_state else "data",
            rewind=plan,
            no_rewind=NOT_SAVED,
        )
        decision, context.budget = decide(situation, context.config.policy, context.budget)
        if decision.action == "rewind" and self._saved is not None:
            step, folder, tag = self._saved
            loaded, _ = self._engine.load_checkpoint(str(folder), tag=tag)
            decision = replace(decision, rewound_to=step)
            if loaded is None:
                why = f"{folder}/{tag} could not be loaded"
                decision = replace(decision, action="stop", reason=why, rewound_to=None)
        incident = write_down(context, replace(incident, decision=decision), bare_step(context))
        if not incident.stopped:
            context.outputs.step(incident.reading, committed=False)
            return
        cause = incident.findings[0].code if incident.findings else incident.verdict.kind
        state = None
        if self._saved is not None:
            state = str(self._saved[1] / self._saved[2])
        restart: Any = "same-fault" if state else "change-code"
        line = exit_line(step=incident.step, cause=cause, restart=restart, state=state)
        context.outputs.halted(incident, line)
        exit_with_code_three()
        raise TrainingHalted(incident, state=state, restart=restart)


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


def stored_trouble(engine: Any) -> list[str]:
    """Parameters, buffers and optimizer slots of this rank's parts that are non-finite."""
    module, zero = engine.module, engine.optimizer
    found = [f"param:{name}" for name, part in parts_held(engine) if not is_finite(part)]
    found += bad_buffers({"": module})
    for slots in zero.optimizer.state.values():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and not is_finite(value):
                found.append(f"opt:{slot}")
    return list(dict.fromkeys(found))


def parts_held(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of each parameter, and of its float32 master."""
    zero = engine.optimizer
    if type(zero) is not DeepSpeedZeroOptimizer_Stage3:
        yield from engine.module.named_parameters()
        for number, part in enumerate(zero.single_partition_of_fp32_groups):
            yield f"float32 part of group {number}", part
        return
    for name, parameter in engine.module.named_parameters():
        yield name, parameter.ds_tensor[: _real(parameter)]
    for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in group:
            yield engine.param_names[parameter], flat[start : start + _real(parameter)]
            start += parameter.partition_numel()


def _real(parameter: Any) -> int:
    """Elements of a part that belong to the parameter; padding after them is not initialised."""
    size = int(parameter.partition_numel())
    before = size * dist.get_rank(parameter.ds_process_group)
    return max(0, min(size, int(parameter.ds_numel) - before))


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
