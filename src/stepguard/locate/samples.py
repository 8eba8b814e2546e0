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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.blame import FirstBad
from stepguard.locate.operands import Call, batch_tensors, numeric, plain
from stepguard.locate.replay import OutOfTimeError, Replayer, ReplayError
from stepguard.locate.tracer import Ran, Tracer, bad_rows
from stepguard.records.incident import Evidence, Origin, Reading, with_evidence
from stepguard.state.batch import sample_count, samples_in, subset
from stepguard.tensors.torch_private import compiled_call

# --- Find the bad micro-batch; say whether only compiled code is bad and whether a step repeats.


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


def compiled_only(replayer: Replayer) -> int | None:
    """The micro-batch that is clean when run eagerly and bad when it runs compiled, as it did."""
    step = replayer.step
    parts: list[Any] = [step.loss_fn, step.model]
    compiled = any(hasattr(part, "_torchdynamo_orig_callable") for part in parts)
    for root in (step.model, *step.modules.values()):
        parts += root.modules()
    # The result of `torch.compile(module)` has the module inside.
    compiled = compiled or any(hasattr(one, "_orig_mod") for one in parts)
    if not compiled and not any(map(compiled_in_place, parts)):
        return None
    for micro in range(len(step.micro_batches)):
        replayer.clear_gradients()
        if not replayer.run(micro, eager=False).clean:
            return micro
    return None


def steadiness(replayer: Replayer) -> Evidence:
    """Run a clean step a few times more, its loss function's state moving on as in the loop.

    A clean step that repeats exactly was hit by something from outside. One that does not is itself
    unsteady: a race, an unordered reduction, random numbers that are not restored. Finite losses
    that are far apart show a loss function that depends on more than its batch.
    """
    own = replayer.loss_fn_state
    replayer.loss_fn_state = None
    losses: list[list[float]] = []
    runs: list[list[Tensor]] = []
    try:
        # at most three repetitions
        while len(runs) < 2 or (len(runs) < 3 and replayer.budget.affords(1.0)):
            replayer.clear_gradients()
            given = [replayer.run(micro).loss for micro in range(len(replayer.step.micro_batches))]
            losses.append([float(loss) for loss in _copies(given) if not loss.dim()])
            given += [parameter.grad for parameter in replayer.parameters.values()]
            runs.append(_copies(given))
    finally:
        replayer.loss_fn_state = own
    for one, other in zip(*losses[:2], strict=False):
        both_finite = math.isfinite(one) and math.isfinite(other)
        # Relative difference of two losses that an unordered sum may explain
        if both_finite and not math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-9):
            return Evidence(same_bits=False, different_losses=(one, other))
    for run in runs[1:]:
        # NaN differs from itself: a repetition that turns bad is not the same either.
        if len(run) != len(runs[0]) or not all(map(torch.equal, run, runs[0])):
            return Evidence(same_bits=False)
    return Evidence(same_bits=True)


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [plain(tensor).clone() for tensor in tensors if tensor is not None]


def compiled_in_place(part: Any) -> bool:
    """True after `module.compile()`; a guard that records calls stands in the same place."""
    present = compiled_call(part) if isinstance(part, nn.Module) else None
    return getattr(present, "below", present) is not None


# --- Find the guilty samples of a micro-batch.


MOST_GUILTY = 8
"""More bad samples than this say something about the batch, not about samples."""
MOST_COLUMNS = 256
ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The autograd node that adds a gradient to `.grad`: what overflows there is a sum of """
MOST_FRUITLESS = 3
"""Searches that may end without a sample before one place is no longer searched for samples."""
UNCUT = "no sample can be singled out: your code accepts this batch only as a whole"
FRUITLESS = (
    f"no sample was searched for: {MOST_FRUITLESS} earlier searches at this place found none"
)


def with_samples(origin: Origin, found: FirstBad, traced: Tracer, replayer: Replayer) -> Origin:
    """Name the samples that made the bad value, where samples can be guilty at all.

    Not searched where earlier incidents have shown that none can be named.
    """
    if origin.phase not in ("input", "forward", "loss", "backward"):
        return origin
    if origin.node == ACCUMULATE or origin.evidence.scale_overflow:
        return origin
    budget = replayer.budget
    batch = replayer.step.micro_batches[traced.micro_batch]
    tensors = dict(batch_tensors(batch))
    count = sample_count(batch)
    kind = tuple((name, tensor.dim(), tensor.dtype) for name, tensor in tensors.items())
    place = (origin.phase, origin.op, origin.node, origin.source, origin.tensor)
    guilty: tuple[int, ...] | None = ()

    def bad_with(keep: Sequence[int]) -> bool | None:
        try:
            backward = traced.ran.loss_finite
            return not run_samples(replayer, traced.micro_batch, keep, backward=backward).clean
        except ReplayError:
            return None

    if kind in budget.whole_only:
        budget.cut.append(UNCUT)
    elif budget.fruitless[place] >= MOST_FRUITLESS:
        budget.cut.append(FRUITLESS)
    else:
        try:
            suspects = _suspects(origin, found.call, tensors, count)
            guilty = guilty_samples(count, bad_with, suspects)
        except OutOfTimeError:
            budget.leave_out("the search for the guilty samples")
        if guilty is None:
            budget.whole_only.add(kind)
            budget.cut.append(UNCUT)
        budget.fruitless[place] = 0 if guilty else budget.fruitless[place] + 1
    if guilty:
        return replace(with_evidence(origin, _contrast(batch, guilty, count)), samples=guilty)
    if count < 2 or budget.cut:
        return origin
    return with_evidence(origin, Evidence(confounded_samples=True))


def _suspects(origin: Origin, call: Call, tensors: dict[str, Tensor], count: int) -> Sequence[int]:
    """The positions of the bad elements point to samples."""
    if origin.phase == "input" and origin.tensor is not None:
        bad = ~plain(tensors[origin.tensor]).isfinite()
        return bad_rows(bad) if bad.dim() and bad.shape[0] == count else ()
    return suspects_from_rows(call.rows, call.shape[0], count) if call.shape else ()


def _contrast(batch: Any, guilty: tuple[int, ...], count: int) -> Evidence:
    """Compare the largest magnitude in the guilty samples with that in all others."""
    inside = [0.0]
    outside = [0.0]
    for _, tensor in batch_tensors(batch):
        if numeric(tensor) and _comparable(tensor) and tensor.shape[0] == count:
            for sample, largest in enumerate(_magnitudes(tensor)[:, 0].tolist()):
                side = inside if sample in guilty else outside
                side.append(largest)
    return Evidence(sample_max=max(inside), others_max=max(outside))


def outlying_rows(step: int, micro_batches: Sequence[Any]) -> Origin | None:
    """Find a few rows whose magnitude is far above that of all others in the step's batches.

    None where nothing stands out. The origin names samples only where the parts of the micro-batch
    agree on what a sample is.
    """
    rows: dict[tuple[str, bool, bool], list[tuple[int, Tensor]]] = {}
    for micro, batch in enumerate(micro_batches):
        count = samples_in(batch)
        for name, tensor in batch_tensors(batch):
            if _comparable(tensor) and count in (None, tensor.shape[0]):
                kind = (name, not numeric(tensor), tensor.numel() == tensor.shape[0])
                rows.setdefault(kind, []).append((micro, _magnitudes(tensor)))
    best: Origin | None = None
    highest = 0.0
    for (name, whole_numbers, one_a_row), parts in rows.items():
        # Times the largest value of all other rows: rows of healthy, heavy-tailed data differ by
        # less. Whole numbers are mostly labels, tokens and identifiers.
        times = 1000.0 if whole_numbers else 30.0
        # Of numbers that are all 0 but for a few, as sparse rewards are, 1000 stands out. Of longer
        # rows nothing is said then: it may be the additive mask of the only row with padding.
        above_zeros = 1000.0 if one_a_row else math.inf
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
    # with fewer rows nothing stands out
    if len(owners) < 3:
        return None
    ordered, places = torch.cat(parts).sort(dim=0, descending=True)
    # the row as a whole first: a column of large numbers (a time stamp) hides the other columns
    # Number of rows above which single columns of a table are compared as well
    columns = ordered.shape[1] if len(owners) >= 8 else 1
    for column in range(columns):
        # Share of the rows that can be outliers; a single one always can
        values = ordered[: max(1, int(0.05 * len(owners))) + 1, column].tolist()
        for few, (low, others) in enumerate(pairwise(values), start=1):
            if low >= (times * others or above_zeros):
                chosen = [owners[place] for place in places[:few, column].tolist()]
                return chosen, values[0], others
    return None


def run_samples(replayer: Replayer, micro: int, keep: Sequence[int], *, backward: bool) -> Ran:
    """Run a micro-batch with these samples only.

    Raises ReplayError if the user's code cannot take them, and OutOfTimeError.
    """
    if not keep:
        raise ReplayError("no samples")
    batch = replayer.step.micro_batches[micro]
    count = sample_count(batch)
    if not replayer.budget.affords(len(keep) / count / len(replayer.step.micro_batches)):
        raise OutOfTimeError
    replayer.clear_gradients()
    try:
        return replayer.run(micro, subset(batch, list(keep), count), backward=backward)
    finally:
        replayer.clear_gradients()


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
