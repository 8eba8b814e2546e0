"""Find the guilty samples of a micro-batch.

Of a non-finite step they are confirmed by experiment: a sample is named when the step is finite
without the guilty ones (necessity) and bad with it beside an innocent one (sufficiency). Where
batch statistics or empty reductions blur that, none is named.

Of a finite step whose loss jumped, the batch itself is read first: a few rows far larger than all
others. That runs none of the user's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate import replay_state as batches
from stepguard.locate.blame import FirstBad
from stepguard.locate.operands import numeric, plain
from stepguard.locate.replay import Ran, Replayer, ReplayError, Traced
from stepguard.locate.replay_state import MOST_FRUITLESS, LocateBudget, OutOfTimeError
from stepguard.locate.tracer import bad_rows
from stepguard.records.incident import Evidence, Origin, Reading, with_evidence
from stepguard.state.batch import Step, samples_in
from stepguard.tensors.torch_private import compiled_call

# --- Find the bad micro-batch; say whether only compiled code is bad and whether a step repeats.


REPETITIONS = 3


def bad_micro_batch(replayer: Replayer, reading: Reading) -> int | None:
    """Return the index of the first bad one, None if all are clean.

    Gradients of the micro-batches before it are left in place. A bad loss was seen when the step
    ran, so it needs no search; a bad gradient of several micro-batches does.
    """
    replayer.clear_gradients()
    if reading.bad_micro_batches:
        return reading.bad_micro_batches[0]
    count = len(replayer.step.micro_batches)
    if count == 1:
        return 0
    for micro in range(count):
        before = replayer.copied_gradients()
        if not replayer.run(micro).clean:
            for name, parameter in replayer.parameters.items():
                parameter.grad = before.get(name)
            return micro
    return None


def compiled_only(replayer: Replayer) -> bool:
    """True if a step that is clean when run eagerly is bad when it runs compiled, as it did."""
    if not _compiled(replayer.step):
        return False
    for micro in range(len(replayer.step.micro_batches)):
        replayer.clear_gradients()
        if not replayer.run(micro, eager=False).clean:
            return True
    return False


def repeats(replayer: Replayer) -> bool:
    """Run the step a few times more: True if it gives the same bits each time.

    A clean step that repeats exactly was hit by something from outside. One that does not is itself
    unsteady: a race, an unordered reduction, random numbers that are not restored.
    """
    runs: list[list[Tensor]] = []
    while len(runs) < 2 or (len(runs) < REPETITIONS and replayer.budget.affords(1.0)):
        replayer.clear_gradients()
        results: list[Tensor | None] = []
        for micro in range(len(replayer.step.micro_batches)):
            results.append(replayer.run(micro).loss)
        for parameter in replayer.parameters.values():
            results.append(parameter.grad)
        runs.append([tensor.detach().clone() for tensor in results if tensor is not None])
    for run in runs[1:]:
        # NaN differs from itself: a repetition that turns bad is not the same either.
        pairs = zip(run, runs[0], strict=False)
        same = all(torch.equal(plain(one), plain(other)) for one, other in pairs)
        if len(run) != len(runs[0]) or not same:
            return False
    return True


def _compiled(step: Step) -> bool:
    """True if torch.compile made anything of the step."""
    if hasattr(step.loss_fn, "_torchdynamo_orig_callable"):
        return True
    roots = (step.model, *step.modules.values())
    for part in (step.loss_fn, *(module for root in roots for module in root.modules())):
        # The result of `torch.compile(module)`.
        if hasattr(part, "_orig_mod"):
            return True
        # After `module.compile()`. A guard that records the model's calls stands in the same place,
        # around what was there.
        present = None
        if isinstance(part, nn.Module):
            present = compiled_call(part)
        if getattr(present, "below", present) is not None:
            return True
    return hasattr(step.model, "_torchdynamo_orig_callable")


# --- Find the guilty samples of a micro-batch.


MOST_GUILTY = 8
"""More bad samples than this say something about the batch, not about samples."""
STANDS_OUT = 30.0
"""Times the largest value of all other rows: rows of healthy, heavy-tailed data differ by less."""
NUMBER_STANDS_OUT = 1000.0
"""The same for whole numbers, which are mostly labels, tokens and identifiers."""
ABOVE_ZEROS = 1000.0
"""What stands out among single numbers of which all others are exactly 0, as sparse rewards are. Of
longer rows nothing is said then: it may be the additive mask of the only row with padding.
"""
FEW = 0.05
"""Share of the rows that can be outliers; a single one always can."""
COSTLY = 0.1
"""Of a loss: what must not be left of it without the guilty samples, and is with them."""
FEWEST_ROWS = 3
FEWEST_FOR_COLUMNS = 8
"""Rows from which on single columns of a table are compared as well."""
MOST_COLUMNS = 256
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
    count = batches.sample_count(batch)

    def bad_with(keep: Sequence[int]) -> bool | None:
        ran = run_samples(replayer, traced.micro_batch, keep, backward=traced.ran.loss_finite)
        return None if ran is None else not ran.clean

    # The positions of the bad elements point to samples.
    suspects: list[int] = []
    call = found.call
    if origin.phase == "input" and origin.tensor is not None:
        bad = ~plain(dict(batches.named_tensors(batch))[origin.tensor]).isfinite()
        if bad.dim() and bad.shape[0] == count:
            suspects = bad_rows(bad)
    elif call.shape:
        suspects = suspects_from_rows(call.rows, call.shape[0], count)
    search = partial(guilty_samples, count, bad_with, suspects)
    guilty = _within_budget(search, origin, batch, replayer.budget)
    if guilty:
        origin = with_evidence(origin, _contrast(batch, guilty, count))
        return replace(origin, samples=guilty)
    if count < 2 or replayer.budget.cut:
        return origin
    return with_evidence(origin, Evidence(confounded_samples=True))


def _within_budget(
    search: Callable[[], tuple[int, ...] | None], origin: Origin, batch: Any, budget: LocateBudget
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
    guilty: tuple[int, ...] | None = ()
    try:
        guilty = search()
    except OutOfTimeError:
        budget.leave_out("the search for the guilty samples")
    if guilty is None:
        budget.whole_only.add(kind)
        budget.cut.append(UNCUT)
    budget.searched(place, found=bool(guilty))
    return guilty or ()


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


def outlying_rows(step: int, micro_batches: Sequence[Any]) -> Origin | None:
    """Find a few rows whose magnitude is far above that of all others in the step's batches.

    None where nothing stands out. The origin names samples only where the parts of the micro-batch
    agree on what a sample is.
    """
    rows: dict[tuple[str, bool, bool], list[tuple[int, Tensor]]] = {}
    for micro, batch in enumerate(micro_batches):
        count = samples_in(batch)
        for name, tensor in batches.named_tensors(batch):
            if _comparable(tensor) and count in (None, tensor.shape[0]):
                kind = (name, not numeric(tensor), tensor.numel() == tensor.shape[0])
                rows.setdefault(kind, []).append((micro, _magnitudes(tensor)))
    best: Origin | None = None
    highest = 0.0
    for (name, whole_numbers, one_a_row), parts in rows.items():
        times = NUMBER_STANDS_OUT if whole_numbers else STANDS_OUT
        above_zeros = ABOVE_ZEROS if one_a_row else math.inf
        found = _standing_out([values for _, values in parts], times, above_zeros)
        if found is None or found[1] / max(found[2], 1.0) <= highest:
            continue
        chosen, largest, others = found
        highest = largest / max(others, 1.0)
        # samples are counted within a micro-batch: that of the largest
        position = chosen[0][0]
        micro = parts[position][0]
        inside = sorted(row for part, row in chosen if part == position)
        best = Origin(
            step=step,
            phase="input",
            tensor=name,
            samples=tuple(inside) if samples_in(micro_batches[micro]) is not None else (),
            micro_batch=micro if len(micro_batches) > 1 else None,
            method="batch",
            evidence=Evidence(sample_max=largest, others_max=others),
        )
    return best


def _comparable(tensor: Tensor) -> bool:
    """Numbers in rows; flags and images as bytes have no outliers."""
    if not tensor.dim() or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if tensor.is_meta or not tensor.numel():
        return False
    return numeric(tensor) or tensor.dtype in (torch.int64, torch.int32)


def _magnitudes(tensor: Tensor) -> Tensor:
    """The largest of each row; for a table, those of its single columns beside it."""
    sizes = plain(tensor).reshape(tensor.shape[0], -1).abs()
    if sizes.element_size() < 4 or not sizes.is_floating_point():
        sizes = sizes.double()  # 8-bit floats know no reductions, whole numbers no infinity
    sizes = torch.where(sizes.isfinite(), sizes, 0.0)
    largest = sizes.amax(1, keepdim=True)
    if tensor.dim() == 2 and 1 < sizes.shape[1] <= MOST_COLUMNS and numeric(tensor):
        largest = torch.cat([largest, sizes], dim=1)
    return largest.cpu().double()


def _standing_out(
    parts: list[Tensor], times: float, above_zeros: float
) -> tuple[list[tuple[int, int]], float, float] | None:
    """The few rows (part, row; the largest first), their largest value and that of all others."""
    if len({part.shape[1] for part in parts}) != 1:
        return None
    owners = [(part, row) for part, values in enumerate(parts) for row in range(len(values))]
    if len(owners) < FEWEST_ROWS:
        return None
    ordered, places = torch.cat(parts).sort(dim=0, descending=True)
    # the row as a whole first: a column of large numbers (a time stamp) hides the other columns
    columns = ordered.shape[1] if len(owners) >= FEWEST_FOR_COLUMNS else 1
    for column in range(columns):
        values = ordered[: max(1, int(FEW * len(owners))) + 1, column].tolist()
        for few, (low, others) in enumerate(pairwise(values), start=1):
            if low >= (times * others or above_zeros):
                chosen = [owners[place] for place in places[:few, column].tolist()]
                return chosen, values[0], others
    return None


def run_samples(
    replayer: Replayer, micro: int, keep: Sequence[int], *, backward: bool
) -> Ran | None:
    """Run a micro-batch with these samples only; None if the user's code cannot.

    Raises OutOfTimeError.
    """
    if not keep:
        return None
    batch = replayer.step.micro_batches[micro]
    count = batches.sample_count(batch)
    replayer.budget.require(len(keep) / count / len(replayer.step.micro_batches))
    replayer.clear_gradients()
    chosen = batches.subset(batch, list(keep), count)
    try:
        return replayer.run(micro, chosen, backward=backward)
    except ReplayError:
        return None
    finally:
        replayer.clear_gradients()


def costly_samples(replayer: Replayer, reading: Reading) -> Origin | None:
    """Find the samples without which a finite loss would be a small part of what it is.

    Runs parts of the batch of the micro-batch with the highest loss, without a backward pass.
    """
    step = replayer.step
    losses = reading.micro_losses
    micro = losses.index(max(losses)) if len(losses) == len(step.micro_batches) else 0
    count = batches.sample_count(step.micro_batches[micro])

    def loss_of(keep: Sequence[int]) -> float | None:
        ran = run_samples(replayer, micro, keep, backward=False)
        if ran is None or ran.loss is None or not ran.loss_finite:
            return None
        return abs(float(ran.loss))

    def bad_with(keep: Sequence[int]) -> bool | None:
        loss = loss_of(keep)
        if loss is None:
            return None
        return loss >= COSTLY * whole

    guilty: tuple[int, ...] = ()
    without = None
    try:
        whole = loss_of(range(count)) or 0.0
        # a replay that does not show the loss again says nothing of its samples
        if whole >= COSTLY * abs(reading.loss or 0.0) > 0:
            guilty = guilty_samples(count, bad_with) or ()
        if guilty:
            without = loss_of(_without(count, guilty))
    except OutOfTimeError:
        replayer.budget.leave_out("the search for the samples that made the loss")
        return None
    if without is None:
        return None
    return Origin(
        step=reading.step,
        phase="input",
        samples=guilty,
        micro_batch=micro if len(step.micro_batches) > 1 else None,
        method="replay",
        reproduced=True,
        evidence=Evidence(loss_with=whole, loss_without=without),
    )


BadWith = Callable[[Sequence[int]], bool | None]
"""Runs these samples only: are they bad? None if the user's code cannot run them."""


def guilty_samples(
    count: int, bad_with: BadWith, suspects: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Return confirmed samples; `suspects` (from the position of bad elements) saves the search.

    None for a batch that the user's code takes whole or not at all.
    """
    if count < 2:
        return ()
    likely = sorted({sample for sample in suspects if 0 <= sample < count})
    few = 0 < len(likely) <= MOST_GUILTY and len(likely) < count
    if few and _confirmed(count, bad_with, likely):
        return tuple(likely)
    found = _bisect(count, bad_with)
    if found and not _confirmed(count, bad_with, found):
        return ()
    return found


def _bisect(count: int, bad_with: BadWith) -> tuple[int, ...] | None:
    """Find one guilty sample by halving. A half that cannot run is judged by the other one."""
    group = list(range(count))
    while len(group) > 1:
        middle = len(group) // 2
        verdict = bad_with(group[:middle])
        if verdict is None:
            other = bad_with(group[middle:])
            if other is None:
                break
            verdict = not other
        group = group[:middle] if verdict else group[middle:]
    else:
        return tuple(group)
    # Neither half of the batch runs: leave out single samples.
    for sample in group[:MOST_GUILTY]:
        verdict = bad_with(_without(count, [sample]))
        if verdict is None:
            # It does not run without one sample either, as a graph: it cannot be cut at all.
            return None
        if verdict is False:
            return (sample,)
    return ()


def _without(count: int, guilty: Sequence[int]) -> list[int]:
    return [sample for sample in range(count) if sample not in guilty]


def suspects_from_rows(rows: Sequence[int], length: int, count: int) -> list[int]:
    """Return the samples behind rows of a tensor whose first axis is a multiple of the batch.

    A model may fold heads, tokens or views into the first axis.
    """
    if not count or not length or length % count:
        return []
    each = length // count
    return sorted({row // each for row in rows})


def _confirmed(count: int, bad_with: BadWith, guilty: Sequence[int]) -> bool:
    innocent = _without(count, guilty)
    if bad_with(innocent) is not False:
        return False
    for sample in guilty:
        # A smaller batch with this sample must be bad too. Where a sum overflows by its length,
        # leaving out any sample helps: none is guilty. With a second sample batch statistics can
        # be computed.
        pair = [sample]
        if count > 2:
            pair = sorted([sample, innocent[0]])
        if bad_with(pair) is True:
            continue
        nearly_all = sorted([sample, *innocent[1:]])
        if len(nearly_all) <= len(pair) or bad_with(nearly_all) is not True:
            return False
    return True
