"""Which samples of a micro-batch are guilty, confirmed by experiment.

A sample is named when the step is finite without the guilty ones (necessity) and bad with it beside
an innocent one (sufficiency). Where batch statistics or empty reductions blur that, none is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepguard.locate import batch as batches
from stepguard.locate.replay import Replayer, ReplayError

MOST_GUILTY = 8
"""More bad samples than this say something about the batch, not about samples."""


class Trial:
    """Replays of one micro-batch with some of its samples only."""

    def __init__(self, replayer: Replayer, micro: int, batch: Any, backward: bool) -> None:
        self._replayer = replayer
        self._micro = micro
        self._batch = batch
        self._backward = backward
        self.count = batches.sample_count(batch)
        self.whole_only = False
        """The user's code cannot take this batch with any part left out."""

    def bad(self, keep: Sequence[int]) -> bool | None:
        """True or False; None when the user's code cannot take such a batch. Raises OutOfTimeError."""
        if not keep:
            return None
        self._replayer.effort.require(
            len(keep) / self.count / len(self._replayer.step.micro_batches)
        )
        self._replayer.clear_gradients()
        chosen = batches.subset(self._batch, list(keep), self.count)
        try:
            return not self._replayer.run(self._micro, chosen, backward=self._backward).clean
        except ReplayError:
            return None
        finally:
            self._replayer.clear_gradients()

    def without(self, guilty: Sequence[int]) -> list[int]:
        return [i for i in range(self.count) if i not in set(guilty)]


def guilty_samples(trial: Trial, suspects: Sequence[int]) -> tuple[int, ...]:
    """Confirmed samples; `suspects` (from the position of the bad elements) saves the search."""
    if trial.count < 2:
        return ()
    likely = sorted({s for s in suspects if 0 <= s < trial.count})
    if 0 < len(likely) <= MOST_GUILTY and len(likely) < trial.count and _confirmed(trial, likely):
        return tuple(likely)
    found = _bisect(trial)
    return tuple(found) if found and _confirmed(trial, found) else ()


def suspects_from_rows(rows: Sequence[int], length: int, count: int) -> list[int]:
    """Samples behind rows of a tensor whose first axis is the batch, or the batch times heads,
    tokens, views.
    """
    if not count or not length or length % count:
        return []
    each = length // count
    return sorted({row // each for row in rows})


def _confirmed(trial: Trial, guilty: Sequence[int]) -> bool:
    innocent = trial.without(guilty)
    if trial.bad(innocent) is not False:
        return False
    return all(_suffices(trial, sample, innocent) for sample in guilty)


def _suffices(trial: Trial, sample: int, innocent: Sequence[int]) -> bool:
    """Bad with this sample in a smaller batch. A sum that overflows by its length fails here: any
    sample less helps.
    """
    pair = sorted([sample, innocent[0]]) if trial.count > 2 else [sample]
    if trial.bad(pair) is True:
        return True
    nearly_all = sorted([sample, *innocent[1:]])
    return len(nearly_all) > len(pair) and trial.bad(nearly_all) is True


def _bisect(trial: Trial) -> list[int]:
    """One guilty sample by halving. A half that cannot run is judged by the other one."""
    group = list(range(trial.count))
    while len(group) > 1:
        left, right = group[: len(group) // 2], group[len(group) // 2 :]
        verdict = trial.bad(left)
        if verdict is None:
            other = trial.bad(right)
            if other is None:
                return _one_by_one(trial, group)
            verdict = not other
        group = left if verdict else right
    return group


def _one_by_one(trial: Trial, group: Sequence[int]) -> list[int]:
    """Neither half runs. A batch that does not run without a single sample either, as a graph,
    cannot be cut at all.
    """
    for sample in group[:MOST_GUILTY]:
        verdict = trial.bad(trial.without([sample]))
        if verdict is None:
            trial.whole_only = True
            return []
        if verdict is False:
            return [sample]
    return []
