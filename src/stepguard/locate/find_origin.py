"""`locate`: from a bad step and its reading to the place where the first harmful value was born."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from stepguard.locate import bad_state, impurity, model_replay, samples, update_origin
from stepguard.locate import batch as batches
from stepguard.locate.bad_micro_batch import bad_micro_batch, compiled_only, repeats
from stepguard.locate.blame import FirstBad, blame_gradients, blame_loss, first_reader
from stepguard.locate.calls import Call
from stepguard.locate.facts import fact
from stepguard.locate.finite import numeric, plain
from stepguard.locate.locate_budget import MOST_FRUITLESS, LocateBudget, OutOfTimeError
from stepguard.locate.model_replay import ModelReplayer
from stepguard.locate.origin_record import origin_of
from stepguard.locate.replay import Replayer, ReplayError, Traced
from stepguard.locate.same_fault import difference
from stepguard.locate.spoiled_buffer import buffer_origin
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state.isolation import untouched
from stepguard.state.step import Step

UNCUT = "no sample can be told: your code takes this batch whole or not at all"
MOST_REPAIRS = 3
"""Stored tensors that may turn out innocent before the search settles for what it has."""


def locate(step: Step, reading: Reading, budget: LocateBudget | None = None) -> Origin:
    """Never raises for the user's code, and leaves model, optimizer, gradients and RNG as it found
    them.

    `budget` bounds the time, and is the same for all incidents of a run: it remembers what was in
    vain.
    """
    budget = budget if budget is not None else LocateBudget()
    budget.begin(on_host=all(p.device.type == "cpu" for p in step.model.parameters()))
    try:
        origin = _locate(step, reading, budget)
    except ReplayError as failure:
        return bad_state.evidence_origin(step, reading, fact("replay-error", str(failure)[:200]))
    return replace(origin, notes=(*origin.notes, *budget.cut)) if budget.cut else origin


def locate_update(step: Step, reading: Reading) -> Origin:
    """Origin of a bad value that the optimizer's own update made."""
    return update_origin.update_origin(step, reading)


def finite_unscaled(step: Step) -> bool | None:
    """Is the step finite at loss scale 1? Then only the scale overflows. None where it cannot be
    replayed.
    """
    if no_replay(step) is not None:
        return None
    with untouched(step) as keeper:
        replayer = Replayer(replace(step, scale=1.0), keeper)
        try:
            return all(replayer.run(micro).clean for micro in range(len(step.micro_batches)))
        except ReplayError:
            return None


def _locate(step: Step, reading: Reading, budget: LocateBudget) -> Origin:
    if reading.state_born:
        in_forward = reading.bad_state[0].startswith("buffer:") and no_replay(step) is None
        return (
            buffer_origin(step, reading)
            if in_forward
            else update_origin.update_origin(step, reading)
        )
    if finite_step(reading):
        if reading.bad_state:
            return _bad_state(step, reading)
        if not all(map(math.isfinite, reading.lr)):
            return update_origin.update_origin(step, reading)
        if reading.grad_norm is not None and math.isinf(reading.grad_norm):
            return update_origin.norm_origin(step, reading)
        return update_origin.divergence_origin(step, reading)
    reason = no_replay(step)
    if reason is not None:
        return bad_state.evidence_origin(step, reading, fact("no-replay", reason))
    with untouched(step) as keeper, impurity.kept_loss_function_state(step) as own:
        kind = ModelReplayer if step.model_only else Replayer
        replayer = kind(step, keeper, budget)
        replayer.loss_fn_state = own
        if isinstance(replayer, ModelReplayer):
            return _replay_model(replayer, reading)
        origin = _replay(replayer, reading)
        return impurity.with_changed_state(origin, own) if origin.reproduced is False else origin


def finite_step(reading: Reading) -> bool:
    """True if loss and gradients are finite: forward and backward pass are fine."""
    losses = [value for value in (reading.loss, *reading.micro_losses) if value is not None]
    return reading.grads_finite and all(map(math.isfinite, losses))


def no_replay(step: Step) -> str | None:
    """Why the step cannot be run again on this rank alone; None when it can."""
    if not (step.replayable or step.model_only) or not step.micro_batches or not step.rng:
        return "the guard did not run the step"
    sharded = any(type(p.data).__name__ == "DTensor" for p in step.model.parameters())
    return "parameters are sharded over ranks" if sharded else None


def _bad_state(step: Step, reading: Reading) -> Origin:
    """State that is bad while loss and gradients are fine, such as a running variance: who reads
    it?
    """
    origin = bad_state.state_origin(step, reading)
    if no_replay(step) is not None or origin.tensor is None or origin.tensor.startswith("opt:"):
        return origin
    with untouched(step) as keeper:
        try:
            traced = Replayer(step, keeper).trace(0, backward=False)
        except ReplayError:
            return origin
    tensor = bad_state.stored_tensor(step, origin.tensor)
    maker = traced.tracer.maker_of(tensor) if tensor is not None else None
    reader = first_reader(traced.tracer, maker) if maker is not None else None
    if maker is None or reader is None:
        return origin
    seen = origin_of(FirstBad(maker, reader), traced, Replayer(step, keeper))
    return replace(
        seen, tensor=origin.tensor, phase="state", inputs=origin.inputs, notes=origin.notes
    )


def _replay(replayer: Replayer, reading: Reading) -> Origin:
    micro = bad_micro_batch(replayer, reading)
    return (
        _clean_replay(replayer, reading)
        if micro is None
        else _from_micro_batch(replayer, reading, micro)
    )


def _replay_model(replayer: ModelReplayer, reading: Reading) -> Origin:
    """A watched step: only the model's part can be run again, so a clean replay does not mean a
    transient fault.
    """
    call = replayer.bad_call()
    origin = (
        _clean_replay(replayer, reading)
        if call is None
        else _from_micro_batch(replayer, reading, call)
    )
    if not origin.reproduced and origin.phase != "state":
        return model_replay.outside(replayer, reading)
    return replayer.placed(origin, call)


def _from_micro_batch(replayer: Replayer, reading: Reading, micro: int) -> Origin:
    step = replayer.step
    traced, found = search(replayer, micro, step.micro_batches[micro])
    if found is None and not traced.ran.clean:
        return replace(
            bad_state.evidence_origin(step, reading, "untraced"), micro_batch=micro, reproduced=True
        )
    if found is None:
        return _clean_replay(replayer, reading)
    origin = origin_of(found, traced, replayer)
    if reading.bad_state and origin.tensor not in reading.bad_state:
        return bad_state.state_origin(step, reading)
    if reading.overflow:
        origin = replace(origin, notes=(*origin.notes, fact("overflow", "scale")))
    otherwise = difference(reading, micro, replayer)
    if otherwise is not None:
        return replace(
            origin,
            reproduced=False,
            notes=(*origin.notes, "not-reproduced", fact("departs", otherwise)),
        )
    return _name_samples(replayer, traced, found, origin)


def search(replayer: Replayer, micro: int, batch: Any) -> tuple[Traced, FirstBad | None]:
    """Trace and walk; a bad batch tensor must prove itself: with its bad elements repaired the step
    is finite.

    Where it does not, the search goes on with the repaired batch. What it finds then must have been
    bad in the first trace too, or else it is the repair that broke the step.
    """
    accumulated = {n: p.grad.clone() for n, p in replayer.parameters.items() if p.grad is not None}
    innocent: frozenset[str] = frozenset()
    first = traced, found = _trace_and_walk(replayer, micro, batch, accumulated)
    for _ in range(MOST_REPAIRS):
        if found is None or not found.call.op.startswith("batch"):
            break
        if not replayer.budget.affords(2.0 / len(replayer.step.micro_batches)):
            replayer.budget.leave_out(f"the proof that {found.call.op} alone is to blame")
            return traced, found
        innocent |= {found.call.op}
        mended = batches.repaired(batch, innocent)
        _accumulate(replayer, accumulated)
        if replayer.run(micro, mended).clean:
            return traced, found
        traced, found = _trace_and_walk(replayer, micro, mended, accumulated)
    seen_before = {(call.op, call.line) for call in first[0].tracer.calls if call.harmful}
    if found is None:
        return first
    known = found.call.stage == "stored" or (found.call.op, found.call.line) in seen_before
    return (traced, found) if known else first


def _trace_and_walk(
    replayer: Replayer, micro: int, batch: Any, accumulated: dict[str, Any]
) -> tuple[Traced, FirstBad | None]:
    _accumulate(replayer, accumulated)
    traced = replayer.trace(micro, batch)
    return traced, _walk(replayer, traced)


def _accumulate(replayer: Replayer, gradients: dict[str, Any]) -> None:
    """Gradients of the micro-batches before the bad one, in fresh tensors."""
    for name, parameter in replayer.parameters.items():
        parameter.grad = gradients[name].clone() if name in gradients else None


def _walk(replayer: Replayer, traced: Traced) -> FirstBad | None:
    tracer = traced.tracer
    if not traced.ran.loss_finite:
        assert traced.ran.loss is not None
        target = tracer.maker_of(traced.ran.loss)
        return blame_loss(tracer, [target]) if target is not None else None
    targets: list[Call] = []
    for name in replayer.bad_gradients():
        grad = replayer.parameters[name].grad
        maker = tracer.maker_of(plain(grad)) if grad is not None else None
        if maker is not None:
            targets.append(maker)
    return blame_gradients(tracer, targets) if targets else None


def _clean_replay(replayer: Replayer, reading: Reading) -> Origin:
    origin = bad_state.evidence_origin(replayer.step, reading)
    if compiled_only(replayer):
        return replace(
            origin, reproduced=True, method="replay", notes=(*origin.notes, "compiled-only")
        )
    differ = impurity.different_losses(replayer)
    steady = "transient" if not differ and repeats(replayer) else "nondeterministic"
    notes = (*origin.notes, "not-reproduced", steady, *differ)
    return replace(origin, reproduced=False, method="replay", notes=notes)


def _name_samples(replayer: Replayer, traced: Traced, found: FirstBad, origin: Origin) -> Origin:
    """Samples that made it, where samples can be guilty at all."""
    innocent = (
        origin.phase not in ("input", "forward", "loss", "backward") or origin.node == ACCUMULATE
    )
    if innocent or "overflow=scale" in origin.notes:
        return origin
    batch = replayer.step.micro_batches[traced.micro_batch]
    trial = samples.Trial(replayer, traced.micro_batch, batch, backward=traced.ran.loss_finite)
    guilty = _search_samples(
        trial, _suspects(found, origin, batch, trial.count), origin, batch, replayer.budget
    )
    if not guilty:
        not_shown = trial.count < 2 or replayer.budget.cut
        return (
            origin
            if not_shown
            else replace(origin, notes=(*origin.notes, fact("samples", "confounded")))
        )
    return replace(
        origin, samples=guilty, notes=(*origin.notes, *_contrast(batch, guilty, trial.count))
    )


def _search_samples(
    trial: samples.Trial, suspects: list[int], origin: Origin, batch: Any, budget: LocateBudget
) -> tuple[int, ...]:
    """The guilty samples, unless earlier incidents have shown that none can be told, or the time is
    up.
    """
    kind = tuple(
        (name, tensor.dim(), tensor.dtype) for name, tensor in batches.named_tensors(batch)
    )
    place = (origin.phase, origin.op, origin.node, origin.source, origin.tensor)
    if kind in budget.whole_only:
        budget.cut.append(UNCUT)
        return ()
    if budget.in_vain(place):
        budget.cut.append(
            f"no sample was searched for: none could be told at this place {MOST_FRUITLESS} times "
            f"before"
        )
        return ()
    guilty: tuple[int, ...] = ()
    try:
        guilty = samples.guilty_samples(trial, suspects)
    except OutOfTimeError:
        budget.leave_out("the search for the guilty samples")
    if trial.whole_only:
        budget.whole_only.add(kind)
        budget.cut.append(UNCUT)
    budget.searched(place, found=bool(guilty))
    return guilty


ACCUMULATE = "torch::autograd::AccumulateGrad"


def _suspects(found: FirstBad, origin: Origin, batch: Any, count: int) -> list[int]:
    if origin.phase == "input" and origin.tensor is not None:
        tensor = dict(batches.named_tensors(batch))[origin.tensor]
        bad = ~plain(tensor).isfinite()
        rows = (
            bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten().tolist() if bad.dim() else []
        )
        return rows if rows and bad.shape[0] == count else []
    call = found.call
    return samples.suspects_from_rows(call.rows, call.shape[0] if call.shape else 0, count)


def _contrast(batch: Any, guilty: tuple[int, ...], count: int) -> list[str]:
    """The largest magnitude in the guilty samples and in all others."""
    inside, outside = [0.0], [0.0]
    for _, tensor in batches.named_tensors(batch):
        if numeric(tensor) and tensor.dim() and tensor.shape[0] == count:
            values = plain(tensor).nan_to_num(0.0, 0.0, 0.0).abs().reshape(count, -1)
            for sample in range(count if values.shape[1] else 0):
                (inside if sample in guilty else outside).append(float(values[sample].max()))
    return [fact("sample_max", max(inside)), fact("others_max", max(outside))]
