"""What framework integrations ask of a guard, behind one door: `guard.port`.

Users call `guard.step`, or leave their loop as it is under `stepguard.watch`. A framework that runs
the loop itself tells the guard what it is about to run (`micro`), asks what became of the last
update (`dropped`, `settle`), and whether a state may be saved (`finite`, `trouble`, `good`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.engine.context import Context
from stepguard.engine.drivers.step import StepDriver
from stepguard.engine.drivers.watch import WatchDriver
from stepguard.engine.incident.closer_look import agreed_trouble
from stepguard.engine.protect import offer
from stepguard.engine.recover.rewind import Rewinder
from stepguard.state.batch import LossFn


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
        """Tell one line, such as a save that was refused, to every output."""
        self._context.outputs.note(kind, summary)
