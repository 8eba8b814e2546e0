"""An update that could make NaN of finite gradients is copied before and checked after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import born_in_update
from stepguard.engine.protect import Protection
from stepguard.records import Reading
from stepguard.sentinel.risky_update import risky_update
from stepguard.state.undo import UndoCopy


class UpdateCheck:
    """Goes with one update, from just before `optimizer.step()` to just after it."""

    def __init__(self, context: Context, protect: Protection) -> None:
        self._context = context
        self._protect = protect
        self.undo: UndoCopy | None = None
        """Everything the update may touch, from before it."""
        self.give_back: Callable[[], None] | None = None
        """Gives back the gradients that were kept out of this update as outliers."""

    def prepare(self, reading: Reading) -> None:
        """Keep outliers out where that is asked for, and copy what a risky update may touch."""
        if not self._protect.armed:
            return
        context = self._context
        with self._protect.part("outliers"):
            self.give_back = self._keep_out_outliers()
        if self.undo is not None:
            return
        with self._protect.part("check of risky updates"):
            if risky_update(context.optimizer, context.lr_ceiling, reading.least_norm):
                self.undo = UndoCopy(context.optimizer)

    def _keep_out_outliers(self) -> Callable[[], None] | None:
        """Tell of outliers; the call that gives skipped gradients back, None if none changed."""
        outliers = self._context.outliers
        if outliers is None:
            return None
        words = outliers.words()
        if words:
            self._context.outputs.note("outlier", words)
        return outliers.act()

    def copy_everything(self) -> None:
        """For an optimizer that moves weights before the gradients can be judged."""
        if self.undo is None and self._protect.armed:
            with self._protect.part("copy before the update"):
                self.undo = UndoCopy(self._context.optimizer)

    def undone(self, reading: Reading) -> Reading | None:
        """Undo an update that made something non-finite and name it; None for a good update."""
        if self.undo is None or not self._protect.armed:
            return None
        born: list[str] = []
        with self._protect.part("check of risky updates"):
            born = born_in_update(self._context)
        if not born:
            return None
        self.undo.restore()
        return replace(reading, bad_state=tuple(born), state_born=True)
