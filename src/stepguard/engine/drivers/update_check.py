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
        self._at_risk = False
        """Every rank checks this update, so that all of them undo it or none does."""

    def prepare(self, reading: Reading, *, at_risk: bool = False) -> None:
        """Keep outliers out where that is asked for, and copy what a risky update may touch.

        `at_risk`: so it is on some rank, and all of them know.
        """
        self._at_risk = at_risk
        if not self._protect.armed:
            return
        context = self._context
        with self._protect.part("outliers"):
            self.give_back = self._keep_out_outliers()
        if self.undo is not None:
            return
        with self._protect.part("check of risky updates"):
            if at_risk or risky_update(context.optimizer, context.lr_ceiling, reading.least_norm):
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
        by_rank = {self._context.agreement.world_rank: born} if born else {}
        if self._at_risk:
            with self._protect.region:
                by_rank = self._of_all_ranks(born)
        if not by_rank:
            return None
        self.undo.restore()
        names = next(iter(by_rank.values()))
        ranks = tuple(by_rank) if self._at_risk else reading.bad_ranks
        return replace(reading, bad_state=tuple(names), state_born=True, bad_ranks=ranks)

    def _of_all_ranks(self, born: list[str]) -> dict[int, list[str]]:
        """What the update has made non-finite, by rank: all of them undo it or none does."""
        agreement = self._context.agreement
        told = agreement.in_step(lambda: {"born": born}, "the check of a risky update")
        found: dict[int, list[str]] = {}
        for rank, facts in zip(agreement.deciding, told, strict=True):
            if facts["born"]:
                found[rank] = facts["born"]
        return found
