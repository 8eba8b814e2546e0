"""Find the guilty samples of a micro-batch, confirmed by experiment.

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
        """Run these samples only; None if the user's code cannot. Raises OutOfTimeError."""
        if not keep:
            return None
        share_of_step = len(keep) / self.count / len(self._replayer.step.micro_batches)
        self._replayer.budget.require(share_of_step)
        self._replayer.clear_gradients()
        chosen = batches.subset(self._batch, list(keep), self.count)
        try:
            return not self._replayer.run(self._micro, chosen, backward=self._backward).clean
        except ReplayError:
            return None
        finally:
            self._replayer.clear_gradients()

    def without(self, guilty: Sequence[int]) -> list[int]:
        """List the other samples."""
        left_out = set(guilty)
        return [i for i in range(self.count) if i not in left_out]


def guilty_samples(trial: Trial, suspects: Sequence[int]) -> tuple[int, ...]:
    """Return confirmed samples; `suspects` (from the position of bad elements) saves the search."""
    if trial.count < 2:
        return ()
    likely = sorted({sample for sample in suspects if 0 <= sample < trial.count})
    few = 0 < len(likely) <= MOST_GUILTY and len(likely) < trial.count
    if few and _confirmed(trial, likely):
        return tuple(likely)
    found = _bisect(trial)
    if found and _confirmed(trial, found):
        return tuple(found)
    return ()


def suspects_from_rows(rows: Sequence[int], length: int, count: int) -> list[int]:
    """Return the samples behind rows of a tensor whose first axis is a multiple of the batch.

    A model may fold heads, tokens or views into the first axis.
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
    """True if a smaller batch with this sample is bad too.

    Where a sum overflows by its length, leaving out any sample helps: none is guilty.
    """
    pair = [sample]
    if trial.count > 2:
        # With a second sample batch statistics can be computed.
        pair = sorted([sample, innocent[0]])
    if trial.bad(pair) is True:
        return True
    nearly_all = sorted([sample, *innocent[1:]])
    return len(nearly_all) > len(pair) and trial.bad(nearly_all) is True


def _bisect(trial: Trial) -> list[int]:
    """Find one guilty sample by halving. A half that cannot run is judged by the other one."""
    group = list(range(trial.count))
    while len(group) > 1:
        middle = len(group) // 2
        left = group[:middle]
        right = group[middle:]
        verdict = trial.bad(left)
        if verdict is None:
            other = trial.bad(right)
            if other is None:
                return _one_by_one(trial, group)
            verdict = not other
        group = left if verdict else right
    return group


def _one_by_one(trial: Trial, group: Sequence[int]) -> list[int]:
    """Leave out single samples, where neither half of the batch runs.

    A batch that does not run without one sample either, as a graph, cannot be cut at all.
    """
    for sample in group[:MOST_GUILTY]:
        verdict = trial.bad(trial.without([sample]))
        if verdict is None:
            trial.whole_only = True
            return []
        if verdict is False:
            return [sample]
    return []
