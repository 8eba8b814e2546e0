"""Find the guilty samples of a micro-batch, confirmed by experiment.

A sample is named when the step is finite without the guilty ones (necessity) and bad with it beside
an innocent one (sufficiency). Where batch statistics or empty reductions blur that, none is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepguard.locate import batch as batches
from stepguard.locate.blame import FirstBad
from stepguard.locate.finite import numeric, plain
from stepguard.locate.locate_budget import MOST_FRUITLESS, LocateBudget, OutOfTimeError
from stepguard.locate.replay import Replayer, ReplayError, Traced
from stepguard.locate.tracer import bad_rows
from stepguard.records.evidence import Evidence
from stepguard.records.origin import Origin, with_evidence

MOST_GUILTY = 8
"""More bad samples than this say something about the batch, not about samples."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The autograd node that adds a gradient to `.grad`: what overflows there is a sum of batches."""
UNCUT = "no sample can be told: your code takes this batch whole or not at all"
FRUITLESS = (
    f"no sample was searched for: none could be told at this place {MOST_FRUITLESS} times before"
)


def with_samples(origin: Origin, found: FirstBad, traced: Traced, replayer: Replayer) -> Origin:
    """Name the samples that made the bad value, where samples can be guilty at all."""
    if origin.phase not in ("input", "forward", "loss", "backward"):
        return origin
    if origin.node == ACCUMULATE or origin.evidence.scale_overflow:
        return origin
    batch = replayer.step.micro_batches[traced.micro_batch]
    trial = Trial(replayer, traced.micro_batch, batch, backward=traced.ran.loss_finite)
    suspects = _suspects(found, origin, batch, trial.count)
    guilty = _search(trial, suspects, origin, batch, replayer.budget)
    if guilty:
        origin = with_evidence(origin, _contrast(batch, guilty, trial.count))
        return replace(origin, samples=guilty)
    if trial.count < 2 or replayer.budget.cut:
        return origin
    return with_evidence(origin, Evidence(confounded_samples=True))


def _search(
    trial: Trial, suspects: list[int], origin: Origin, batch: Any, budget: LocateBudget
) -> tuple[int, ...]:
    """Search the guilty samples, unless earlier incidents have shown that none can be told."""
    kind = tuple(
        (name, tensor.dim(), tensor.dtype) for name, tensor in batches.named_tensors(batch)
    )
    place = (origin.phase, origin.op, origin.node, origin.source, origin.tensor)
    if kind in budget.whole_only:
        budget.cut.append(UNCUT)
        return ()
    if budget.in_vain(place):
        budget.cut.append(FRUITLESS)
        return ()
    guilty: tuple[int, ...] = ()
    try:
        guilty = guilty_samples(trial, suspects)
    except OutOfTimeError:
        budget.leave_out("the search for the guilty samples")
    if trial.whole_only:
        budget.whole_only.add(kind)
        budget.cut.append(UNCUT)
    budget.searched(place, found=bool(guilty))
    return guilty


def _suspects(found: FirstBad, origin: Origin, batch: Any, count: int) -> list[int]:
    """List the samples that the positions of the bad elements point to."""
    if origin.phase == "input" and origin.tensor is not None:
        tensor = dict(batches.named_tensors(batch))[origin.tensor]
        bad = ~plain(tensor).isfinite()
        if not bad.dim() or bad.shape[0] != count:
            return []
        return bad_rows(bad)
    call = found.call
    if not call.shape:
        return []
    return suspects_from_rows(call.rows, call.shape[0], count)


def _contrast(batch: Any, guilty: tuple[int, ...], count: int) -> Evidence:
    """Compare the largest magnitude in the guilty samples with that in all others."""
    inside = [0.0]
    outside = [0.0]
    for _, tensor in batches.named_tensors(batch):
        if not numeric(tensor) or not tensor.dim() or tensor.shape[0] != count:
            continue
        values = plain(tensor).nan_to_num(0.0, 0.0, 0.0).abs().reshape(count, -1)
        if not values.numel():
            continue
        for sample, largest in enumerate(values.amax(1).tolist()):
            if sample in guilty:
                inside.append(largest)
            else:
                outside.append(largest)
    return Evidence(sample_max=max(inside), others_max=max(outside))


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
