"""What `guard.step` returns. Numbers are read from the device on first access."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepguard.ranks.agreement import world
from stepguard.records import Incident, Reading
from stepguard.records.incident import Row, box, number

# --- What `guard.step` returns. Numbers are read from the device on first access.


class StepResult:
    """The outcome of one step. Unread, it costs no host sync.

    For instance:

        result = guard.step(loss_fn, batch)
        if not result.committed:
            print(result.incident.summary)
    """

    __slots__ = ("_committed", "_incident", "_reading", "_settle")

    def __init__(self, settle: Callable[[], object] | None = None) -> None:
        self._settle = settle
        self._reading: Reading | None = None
        self._committed = False
        self._incident: Incident | None = None

    def resolve(
        self, reading: Reading | None, *, committed: bool, incident: Incident | None = None
    ) -> StepResult:
        """Filled in by the guard, once."""
        self._reading, self._committed, self._incident, self._settle = (
            reading,
            committed,
            incident,
            None,
        )
        return self

    def answering(self, incident: Incident) -> StepResult:
        """Carry the incident that the step was run again for, unless the second run has one."""
        self._incident = self.incident or incident
        return self

    def take_over(self, other: StepResult) -> None:
        """Become the result of the second run."""
        self.resolve(other._reading, committed=other._committed, incident=other._incident)

    def read(self) -> None:
        """Wait for the numbers, if they are still on the device."""
        self._read()

    @property
    def loss(self) -> float | None:
        """Sum of the micro-batch losses, exact and unscaled; None where the guard is disarmed."""
        reading = self._read()
        return reading.loss if reading is not None else None

    @property
    def grad_norm(self) -> float | None:
        """fp32 norm of the gradients before clipping."""
        reading = self._read()
        return reading.grad_norm if reading is not None else None

    @property
    def committed(self) -> bool:
        """Did the optimizer really step?"""
        self._read()
        return self._committed

    @property
    def incident(self) -> Incident | None:
        """What was wrong with this step; None when it was healthy.

        With several ranks and a fused optimizer it is there once the next step has begun.
        """
        self._read()
        return self._incident

    def _read(self) -> Reading | None:
        if self._settle is not None:
            self._settle()
        return self._reading

    def _repr_html_(self) -> str:
        if self._settle is not None:
            return box("StepResult, not read yet", [], bad=False)
        title = "step committed" if self._committed else "step not committed"
        rows: list[Row] = [("loss", number(self.loss)), ("gradient norm", number(self.grad_norm))]
        if self._incident is not None:
            rows += self._incident.html_rows()
        return box(title, rows, bad=self._incident is not None)

    def __repr__(self) -> str:
        if self._settle is not None:
            return "StepResult(not read yet)"
        return (
            f"StepResult(loss={self.loss}, grad_norm={self.grad_norm}, committed={self.committed})"
        )


# --- Find the DistributedDataParallel around a model: the loss goes through it in any case.


def data_parallel_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper of this process that holds `model`; None if it is or has none.

    Its parameters are reduced in the backward pass, and only a replay that knows the wrapper can
    keep it from waiting for the other ranks.
    """
    if world()[1] == 1 or isinstance(model, DistributedDataParallel):
        return None
    # type() and not isinstance: proxies answer isinstance with side effects
    found: list[DistributedDataParallel] = [
        o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)
    ]
    for wrapper in found:
        if wrapper.__dict__.get("_modules", {}).get("module") is model:
            return wrapper
    return None
