"""The public guard: `Guard.step` runs a training step under protection.

`stepguard.watch` (watching.py) makes the guard of a loop that runs its own steps.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from operator import attrgetter
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import ConfigError, TrainingHalted
from stepguard.engine.build import build_context
from stepguard.engine.context import Context, bare_step, guard_html, guard_line
from stepguard.engine.drivers.schedule import takes_closure
from stepguard.engine.drivers.step import ClosureDriver, StepDriver
from stepguard.engine.drivers.watch import WatchDriver
from stepguard.engine.incident.closer_look import agreed_trouble
from stepguard.engine.incident.exceptions import last_uncaught, tell_end
from stepguard.engine.incident.incident_record import comparison_of_ranks
from stepguard.engine.protect import Protection, in_words, offer
from stepguard.engine.recover.checkpoints import Checkpoints
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.recover.signals import Signals
from stepguard.engine.result import StepResult
from stepguard.engine.wiring import (
    Wiring,
    building_for,
    check_config,
    check_optimizer,
    owners,
    resumable,
)
from stepguard.probes.looks import Looks
from stepguard.probes.whatif import OwnFix, try_what_helps, what_helps
from stepguard.ranks.hung import HANGS_AFTER, AgreedStop, HungRank
from stepguard.records import GuardConfig, Incident
from stepguard.records.probes import WhatIf
from stepguard.state.batch import LossFn, total_loss
from stepguard.state.loader import ResumableLoader, observe_loaders, stop_observing

# --- What framework integrations ask of a guard, behind one door: `guard.port`.


class Port:
    """The framework's side of one guard."""

    def __init__(self, context: Context, rewinder: Rewinder, driver: StepDriver) -> None:
        self._context = context
        self._rewinder = rewinder
        self.driver: StepDriver | WatchDriver = driver
        """Runs the steps; another one once the guard watches a loop."""
        self.closed = False

    def micro(self, loss_fn: LossFn, batch: Any) -> None:
        """Call just before a framework runs forward and backward of one micro-batch by itself.

        `loss_fn(batch)` must give, without side effects, the very loss the framework is about to
        call backward on; the step can then be replayed, as one of `guard.step` can. Only for a
        guard made by `stepguard.watch`.
        """
        if not isinstance(self.driver, WatchDriver):
            raise ConfigError(
                "guard.port.micro is for a loop that runs its own steps; build the guard with "
                "stepguard.watch."
            )
        if not self.closed:
            offer(self._context, loss_fn)
            self.driver.begin_micro(loss_fn, batch)

    @property
    def dropped(self) -> bool:
        """Was the last update vetoed? A fused one is read later, its schedule taken back then."""
        return isinstance(self.driver, WatchDriver) and self.driver.dropped

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs in here is no step of the loop's: a watched model may be called."""
        if isinstance(self.driver, WatchDriver):
            with self.driver.not_listening():
                yield
        else:
            yield

    def follow(self, optimizer: Optimizer) -> bool:
        """Guard this optimizer from now on if it takes the place of the one that was watched."""
        return isinstance(self.driver, WatchDriver) and self.driver.wiring.follow(optimizer)

    def reads_text_with(self, tokenizer: Any) -> None:
        """What the user's program turns token ids into text with, if anything."""
        self._context.data.tokenizer = tokenizer

    def start_at(self, step: int) -> None:
        """Number the next step `step`, as a resumed run does. Call it before the first step."""
        self._context.step = step

    def settle(self) -> None:
        """Read a fused step whose verdict is still on the device; may raise TrainingHalted."""
        self.driver.settle()

    def finite(self) -> bool:
        """Are the parameters finite now? One pass, no names; waits for the device."""
        return self.driver.reader.last_update_finite()

    def trouble(self, *, together: bool = False) -> tuple[str, ...]:
        """Name stored tensors that are non-finite and should not be: do not save such a state.

        Reads everything once. `together`: all ranks ask now, and each gets the names of all.
        """
        return agreed_trouble(self._context, together=together)

    @property
    def good(self) -> bool:
        """Has the run not diverged, by its loss? See `trouble` for stored tensors."""
        suspicious = self._context.history.diverged_at is not None
        return not (suspicious and self._rewinder.probation.divergence())

    def say(self, kind: str, summary: str) -> None:
        """Send one line, such as a save that was refused, to every output."""
        self._context.outputs.note(kind, summary)


__all__ = ["Guard", "StepResult"]

GRACE_SHARE = 12
"""Share of `Ranks.timeout` in which, after a signal, all ranks must reach the step they stop at."""
SAVING = "guard.save() after a bad step"
"""What ranks meet for, as a message about a missing one says."""


class Guard:
    """Protects one model and its optimizer. A context manager; `close` removes every hook.

        with stepguard.Guard(model, optimizer, scheduler=scheduler) as guard:
            for batch in loader:
                result = guard.step(loss_fn, batch)

    `stepguard.watch` takes the same arguments and protects a loop that runs its own steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        modules: dict[str, nn.Module] | None = None,
        loader: Any = None,
        state: dict[str, Any] | None = None,
        config: GuardConfig | None = None,
    ) -> None:
        settings = check_config(config)
        check_optimizer(model, optimizer, modules)
        self._context = build_context(model, optimizer, scheduler, scaler, modules, state, settings)
        try:
            self._wiring = Wiring(self._context)
            self._protect = Protection(self._fault, partial(self._context.outputs.note, "fault"))
            self._rewinder = Rewinder(self._context)
            self._context.hooks.probe = Looks(self._context, self._protect)
            if self._context.config.policy.on_incident == "whatif":
                self._context.hooks.what_helps = partial(
                    what_helps, self._context, self._rewinder.snapshots
                )
            kind = ClosureDriver if takes_closure(self._context.optimizer) else StepDriver
            self._driver: StepDriver | WatchDriver = kind(
                self._context, self._protect, self._rewinder
            )
            self.port = Port(self._context, self._rewinder, self._driver)
            """What framework integrations ask of this guard."""
            self._saving = Checkpoints(self._context, self._rewinder)
            if loader is None:
                self._context.data.recent = observe_loaders(
                    partial(attrgetter("step"), self._context)
                )
                self._context.resources.callback(stop_observing, self._context.data.recent)
            else:
                self._context.data.feed = resumable(self._context, loader, self._between)
                self._context.data.recent = self._context.data.feed.recent
            self._context.hooks.probe.observe_loaders(self._context.data.recent)
            say = partial(self._context.outputs.note, "signal")
            several = self._context.agreement.size > 1
            stop = AgreedStop(self._context) if several else None
            self._signals = Signals(self._leave, self.close, say, stop)
            duties = self._rewinder.snapshots.duties
            duties += comparison_of_ranks(self._context, self._rewinder.healing)
            if self._context.config.checkpoint_every is not None:
                duties.append(self._saving)
            self._closed = False
            self._entered = False
            self._framework = building_for.get()
            self._error: BaseException | None = None
            self._signal = ""
            """Name of the signal that is ending the process."""
            self._make_known()
            if several:
                hung = HungRank(self._context, HANGS_AFTER * self._context.config.ranks.timeout)
                self._context.resources.callback(hung.close)
            if self._saving.has_store and self._context.config.on_signal == "save":
                grace = self._context.config.ranks.timeout / GRACE_SHARE
                self._signals.listen(grace, self._rewinder.snapshots.duties)
                self._context.resources.callback(self._signals.stop_listening)
        except BaseException:
            self._context.resources.close()
            raise

    def _make_known(self) -> None:
        """To a later guard for the same optimizer, and to the end of the process."""
        owners[self._context.optimizer] = weakref.ref(self)
        if self._context.outputs.journal is None:
            return
        at_exit = atexit.register(partial(_exiting, weakref.ref(self), os.getpid()))
        # the bound method keeps the guard for as long as the optimizer has its hooks, also where
        # the user has not kept it
        self._context.resources.callback(self._forget, at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False
        if parent_process() is not None:
            # a forked process ends without the functions of atexit; this one checks the pid itself
            Finalize(None, at_exit, exitpriority=0)

    def _forget(self, at_exit: Callable[[], None]) -> None:
        atexit.unregister(at_exit)

    def step(self, loss_fn: LossFn, *micro_batches: Any) -> StepResult:
        """Run one optimizer step: zero_grad, forward and backward per micro-batch, read, decide,
        clip, update.

        `loss_fn(micro_batch)` returns a scalar, or a dict of named scalars, which are added. Losses
        of micro-batches are added, not averaged. Raises TrainingHalted when the policy stops the
        run.
        """
        if self._closed:
            raise ConfigError("this guard is closed; build a new one to continue.")
        if isinstance(self._driver, WatchDriver):
            raise ConfigError(
                "this guard watches a loop that runs its own steps; build stepguard.Guard to call "
                "step()."
            )
        if not micro_batches:
            raise ConfigError(
                "guard.step got no batch; call guard.step(loss_fn, batch), or several "
                "micro-batches."
            )
        offer(self._context, loss_fn)
        self._wiring.begin_step()
        reader = self._driver.reader
        reader.missing = None
        missing: int | None = None
        try:
            result = self._driver.run(loss_fn, micro_batches)
            missing = reader.missing
            return result
        finally:
            self._wiring.end_step(missing)

    def loss(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """Return `loss_fn(batch)` and remember it, so that a bad step of a watched loop can be
        replayed.

            loss = guard.loss(loss_fn, batch)
            loss.backward()

        The first incident then has operation, line, sample and a capsule, as with `guard.step`.
        Call backward on the result; you may scale or divide it. If the loop adds another term to
        it, the replay covers the model's calls only.
        """
        if self._closed:
            return total_loss(loss_fn(batch))
        if not isinstance(self._driver, WatchDriver):
            raise ConfigError(
                "guard.loss is for a loop that runs its own steps; build the guard with "
                "stepguard.watch, or call guard.step(loss_fn, batch)."
            )
        offer(self._context, loss_fn)
        return self._driver.loss_of(loss_fn, batch)

    def save(self) -> Path | None:
        """Save and seal the current state. Returns None if the state is not good: then nothing is
        saved and `last-good` stays.

        With several ranks, all of them call it. Under DistributedDataParallel rank 0 may call it
        alone and does not wait; the seal then says which parts are missing. If the ranks hold
        different weights, a call by one rank is refused after a few seconds.
        """
        if self._driver.waits_for_ranks() and not self._context.agreement.all_here(SAVING, 1.0):
            told = "NOT saved: the last step was bad; all ranks handle it in the next step"
            self._context.outputs.note("checkpoint", told, refused=self._context.step)
            return None
        self._driver.settle()
        if not self.armed:
            self._context.outputs.note(
                "checkpoint", "NOT saved: a disarmed guard cannot tell whether the state is good"
            )
            return None
        return self._saving.save()

    def restore(self, path: str | PathLike[str] = "last-good") -> int:
        """Load a sealed checkpoint, with random states and loader position. Damaged checkpoints are
        skipped and named.

        Returns the number of completed optimizer steps. `last-good` is the newest good checkpoint.
        Raises StoreError if none can be used.
        """
        self._driver.settle()
        return self._saving.restore(path if path == "last-good" else Path(path))

    def whatif(self, own: OwnFix | None = None) -> WhatIf:
        """Repeat the steps before the last incident once for each remedy that may help.

        Returns the candidates, best first, and prints a table unless the guard is quiet. Pass your
        own fix as `own(model, optimizer)` to compare it. The run itself is not changed.
        """
        if not self._closed:
            self._driver.settle()
        with self.port.aside():
            return try_what_helps(self._context, self._rewinder.snapshots, own)

    @property
    def loader(self) -> ResumableLoader:
        """The loader to iterate over: `for batch in guard.loader`. Its position is saved."""
        if self._context.data.feed is None:
            raise ConfigError(
                "this guard has no loader; build it with stepguard.Guard(..., loader=loader)."
            )
        return self._context.data.feed

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident so far, oldest first."""
        if self._context.agreement.size == 1:
            # ranks settle together: the others may not be asking
            self._driver.settle()
        return tuple(self._context.incidents)

    @property
    def steps(self) -> int:
        """Optimizer steps seen so far, vetoed ones included."""
        return self._context.step

    @property
    def name(self) -> str:
        """Name of the guarded model and optimizer, for a process with several guards."""
        return self._context.run.name

    @property
    def rank(self) -> int:
        """Rank of this process; 0 in a single process."""
        return self._context.agreement.world_rank

    @property
    def model(self) -> nn.Module:
        """The model that was passed in."""
        return self._context.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, unwrapped from a framework's own class."""
        return self._context.optimizer

    @property
    def scheduler(self) -> Any:
        """The learning-rate schedule, or None."""
        return self._context.scheduler

    @property
    def scaler(self) -> GradScaler | None:
        """The GradScaler, or None."""
        return self._context.scaler

    @property
    def config(self) -> GuardConfig:
        """The settings of this guard."""
        return self._context.config

    @property
    def armed(self) -> bool:
        """False if an internal fault has disarmed the guard."""
        return self._protect.armed

    def follow(self, name: str, value: Tensor | float) -> None:
        """Record a value of this step next to its loss: a gate, a weight, the norm of a latent.
        This never waits for the device.

        Call it in the loss function, or anywhere before the update. The journal, the log and
        incidents show it; for a tensor with several elements, its largest magnitude. The value
        never causes an incident; `stepguard live --stage` can check a limit.
        """
        if not isinstance(value, Tensor | int | float):
            raise ConfigError(
                f"follow({name!r}) got a {type(value).__name__}; give a tensor or a number."
            )
        if self.armed and not self._closed:
            self._context.follow(name, value)

    def on_commit(self, hook: Callable[[], None]) -> None:
        """Call `hook` after every committed update, for instance to update an EMA."""
        self._context.hooks.updated.append(hook)

    def close(self) -> None:
        """Read what is pending, record the run's end, remove every hook. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.port.closed = True
        try:
            if isinstance(self._driver, WatchDriver):
                self._driver.finish()
            else:
                self._driver.settle()
            if self.armed:
                with self._protect.region:
                    self._last_look()
            with self._protect.part("incident at the end of the run"):
                self._driver.transaction.record_open_incident()
            if self._signals.waiting is not None:
                self._signals.do()  # no further step will come
            if self.armed:
                with self._protect.part("check of the wiring"):
                    self._wiring.close()
                self._driver.run_ended(self._error)
            with self._protect.part("end of the run"):
                self._tell_end()
        finally:
            self._error = None
            self._context.resources.close()

    def _tell_end(self) -> None:
        tell_end(self._context, self._error, armed=self.armed, by_signal=self._signal)

    def _between(self) -> None:
        """The loop asks for its next batch."""
        if not self._closed and self.armed:
            with self._protect.region:
                self._driver.between()

    def _leave(self, number: int, together: bool) -> None:
        """A signal is about to end the process. `together`: all ranks are at the same step."""
        saved: Path | None = None
        self._signal = signal.Signals(number).name
        if self.armed:
            with self._protect.region:
                saved = self._saving.leave(together=together)
        where = f"saved {saved}" if saved else "no new checkpoint; the last good one stays"
        self._context.outputs.note("signal", f"ending after {self._signal}: {where}")

    def _last_look(self) -> None:
        """Were the parameters still finite after the last update, which no step will read?"""
        if any(incident.stopped for incident in self._context.incidents[-1:]):
            return  # already reported
        if not self._context.step or self.port.finite():
            return
        transaction = self._driver.transaction
        incident = transaction.last_look(bare_step(self._context))
        if incident is not None and not incident.stopped:
            transaction.conclude(incident)  # what is left behind is at least good

    def _fault(self, fault: Exception) -> None:
        context = self._context
        context.agreement.leave()
        context.outputs.line("fault", {"step": context.step, "error": in_words(fault)})

    def in_use(self, framework: str) -> str:
        """Why another guard cannot take this one's place, in words; empty where it can."""
        if self._closed:
            return ""
        if self._wiring.stepping:
            return "which is in the middle of a step"
        if self._entered:
            return "in a `with` block that is still open"
        return f"made by {self._framework}" if self._framework != framework else ""

    def replaced(self) -> None:
        """Another guard was made for the same optimizer: this one ends, unless it has."""
        if self._closed:
            return
        self.port.say("wiring", "this guard is closed: a new one was built for the same optimizer")
        self.close()

    def _repr_html_(self) -> str:
        return guard_html(self._context, closed=self._closed, armed=self.armed)

    def __repr__(self) -> str:
        return f"<{guard_line(self._context, closed=self._closed, armed=self.armed)}>"

    def __enter__(self) -> Guard:
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended_by(value)
        self.close()

    def ended_by(self, error: BaseException | None) -> None:
        """The run is ending by this exception: it goes on record, as an incident where it came in
        mid-step.
        """
        self._error = error
        driver = self._driver
        if isinstance(driver, WatchDriver) and driver.model_calls.calls and not self._closed:
            driver.raised(error)


def _exiting(reference: weakref.ref[Guard], pid: int) -> None:
    """The process ends, and nobody has closed the guard: put the end of the run on record."""
    guard = reference()
    if guard is None or guard._closed or os.getpid() != pid:
        return
    error = last_uncaught()
    if error is None and guard._context.agreement.size == 1:
        # the last step is still to be read; a stop has nothing left to stop
        with suppress(TrainingHalted, SystemExit, KeyboardInterrupt):
            guard.close()
        return
    # other ranks may be gone, and the device with the exception: nothing that could wait for them
    guard.ended_by(error)
    with guard._protect.part("end of the run"):
        guard._tell_end()
