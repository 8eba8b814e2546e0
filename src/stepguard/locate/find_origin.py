"""`locate`: from a bad step and its reading to the place where the first harmful value was born."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from stepguard.locate import bad_state, impurity, model_replay, samples, update_origin
from stepguard.locate import batch as batches
from stepguard.locate.bad_micro_batch import bad_micro_batch, compiled_only, repeats
from stepguard.locate.blame import Found, Walk, first_reader
from stepguard.locate.calls import Call
from stepguard.locate.finite import numeric, plain
from stepguard.locate.locate_budget import MOST_FRUITLESS, Effort, OutOfTimeError
from stepguard.locate.model_replay import ModelReplayer
from stepguard.locate.origin_record import origin_of
from stepguard.locate.replay import Replayer, ReplayError, Traced
from stepguard.locate.same_fault import departure
from stepguard.locate.spoiled_buffer import written_origin
from stepguard.records.evidence import Evidence
from stepguard.records.origin import Origin, with_evidence
from stepguard.records.reading import Reading
from stepguard.state.isolation import untouched
from stepguard.state.step import Step

UNCUT = "no sample can be told: your code takes this batch whole or not at all"
MOST_REPAIRS = 3
"""Stored tensors that may turn out innocent before the search settles for what it has."""


def locate(step: Step, reading: Reading, effort: Effort | None = None) -> Origin:
    """Never raises for the user's code, and leaves model, optimizer, gradients and RNG as it found
    them.

    `effort` bounds the time, and is the same for all incidents of a run: it remembers what was in
    vain.
    """
    effort = effort if effort is not None else Effort()
    effort.begin(on_host=all(p.device.type == "cpu" for p in step.model.parameters()))
    try:
        origin = _locate(step, reading, effort)
    except ReplayError as failure:
        error = str(failure)[:200]
        remark = f"the replay failed: {error}"
        return bad_state.evidence_origin(step, reading, Evidence(replay_error=error), remark)
    return replace(origin, remarks=(*origin.remarks, *effort.cut))


def _locate(step: Step, reading: Reading, effort: Effort) -> Origin:
    if reading.state_born:
        in_forward = reading.bad_state[0].startswith("buffer:") and no_replay(step) is None
        return (
            written_origin(step, reading)
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
        remark = f"the step could not be run again: {reason}"
        return bad_state.evidence_origin(step, reading, Evidence(no_replay=reason), remark)
    with untouched(step) as keeper, impurity.own_state(step) as own:
        kind = ModelReplayer if step.model_only else Replayer
        replayer = kind(step, keeper, effort)
        replayer.own = own
        if isinstance(replayer, ModelReplayer):
            return _replay_model(replayer, reading)
        origin = _replay(replayer, reading)
        return impurity.told(origin, own) if origin.reproduced is False else origin


def finite_step(reading: Reading) -> bool:
    """Loss and gradients are finite, so whatever is wrong is not in the forward or backward pass."""
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
    seen = origin_of(Found(maker, reader), traced, Replayer(step, keeper))
    return replace(
        seen, tensor=origin.tensor, phase="state", inputs=origin.inputs, evidence=origin.evidence
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
            bad_state.evidence_origin(step, reading, Evidence(untraced=True)),
            micro_batch=micro,
            reproduced=True,
        )
    if found is None:
        return _clean_replay(replayer, reading)
    origin = origin_of(found, traced, replayer)
    if reading.bad_state and origin.tensor not in reading.bad_state:
        return bad_state.state_origin(step, reading)
    if reading.overflow:
        origin = with_evidence(origin, Evidence(scale_overflow=True))
    otherwise = departure(reading, micro, replayer)
    if otherwise is not None:
        return replace(with_evidence(origin, Evidence(departs=otherwise)), reproduced=False)
    return _name_samples(replayer, traced, found, origin)


def search(replayer: Replayer, micro: int, batch: Any) -> tuple[Traced, Found | None]:
    """Trace and walk; a bad batch tensor must prove itself: with its bad elements repaired the step
    is finite.

    Where it does not, the search goes on with the repaired batch. What it finds then must have been
    bad in the first trace too, or else it is the repair that broke the step.
    """
    accumulated = {n: p.grad.clone() for n, p in replayer.parameters.items() if p.grad is not None}
    innocent: frozenset[str] = frozenset()
    first = traced, found = _trace_and_walk(replayer, micro, batch, accumulated)
    for _ in range(MOST_REPAIRS):
        if found is None or not found.birth.op.startswith("batch"):
            break
        if not replayer.effort.affords(2.0 / len(replayer.step.micro_batches)):
            replayer.effort.leave_out(f"the proof that {found.birth.op} alone is to blame")
            return traced, found
        innocent |= {found.birth.op}
        mended = batches.repaired(batch, innocent)
        _accumulate(replayer, accumulated)
        if replayer.run(micro, mended).clean:
            return traced, found
        traced, found = _trace_and_walk(replayer, micro, mended, accumulated)
    seen_before = {(call.op, call.line) for call in first[0].tracer.calls if call.harmful}
    if found is None:
        return first
    known = found.birth.stage == "stored" or (found.birth.op, found.birth.line) in seen_before
    return (traced, found) if known else first


def _trace_and_walk(
    replayer: Replayer, micro: int, batch: Any, accumulated: dict[str, Any]
) -> tuple[Traced, Found | None]:
    _accumulate(replayer, accumulated)
    traced = replayer.trace(micro, batch)
    return traced, _walk(replayer, traced)


def _accumulate(replayer: Replayer, gradients: dict[str, Any]) -> None:
    """Gradients of the micro-batches before the bad one, in fresh tensors."""
    for name, parameter in replayer.parameters.items():
        parameter.grad = gradients[name].clone() if name in gradients else None


def _walk(replayer: Replayer, traced: Traced) -> Found | None:
    tracer = traced.tracer
    if not traced.ran.loss_finite:
        assert traced.ran.loss is not None
        target = tracer.maker_of(traced.ran.loss)
        return Walk(tracer, [target]).from_loss() if target is not None else None
    targets: list[Call] = []
    for name in replayer.bad_gradients():
        grad = replayer.parameters[name].grad
        maker = tracer.maker_of(plain(grad)) if grad is not None else None
        if maker is not None:
            targets.append(maker)
    return Walk(tracer, targets).from_gradients() if targets else None


def _clean_replay(replayer: Replayer, reading: Reading) -> Origin:
    origin = bad_state.evidence_origin(replayer.step, reading)
    if compiled_only(replayer):
        origin = with_evidence(origin, Evidence(compiled_only=True))
        return replace(origin, reproduced=True, method="replay")
    differ = impurity.different_losses(replayer)
    same_bits = differ is None and repeats(replayer)
    origin = with_evidence(origin, Evidence(same_bits=same_bits, different_losses=differ))
    return replace(origin, reproduced=False, method="replay")


def _name_samples(replayer: Replayer, traced: Traced, found: Found, origin: Origin) -> Origin:
    """Samples that made it, where samples can be guilty at all."""
    innocent = (
        origin.phase not in ("input", "forward", "loss", "backward") or origin.node == ACCUMULATE
    )
    if innocent or origin.evidence.scale_overflow:
        return origin
    batch = replayer.step.micro_batches[traced.micro_batch]
    trial = samples.Trial(replayer, traced.micro_batch, batch, backward=traced.ran.loss_finite)
    guilty = _search_samples(
        trial, _suspects(found, origin, batch, trial.count), origin, batch, replayer.effort
    )
    if not guilty:
        not_shown = trial.count < 2 or replayer.effort.cut
        return with_evidence(origin, Evidence(confounded_samples=not not_shown))
    return replace(with_evidence(origin, _contrast(batch, guilty, trial.count)), samples=guilty)


def _search_samples(
    trial: samples.Trial, suspects: list[int], origin: Origin, batch: Any, effort: Effort
) -> tuple[int, ...]:
    """The guilty samples, unless earlier incidents have shown that none can be told, or the time is
    up.
    """
    kind = tuple(
        (name, tensor.dim(), tensor.dtype) for name, tensor in batches.named_tensors(batch)
    )
    place = (origin.phase, origin.op, origin.node, origin.source, origin.tensor)
    if kind in effort.whole_only:
        effort.cut.append(UNCUT)
        return ()
    if effort.in_vain(place):
        effort.cut.append(
            f"no sample was searched for: none could be told at this place {MOST_FRUITLESS} times "
            f"before"
        )
        return ()
    guilty: tuple[int, ...] = ()
    try:
        guilty = samples.guilty_samples(trial, suspects)
    except OutOfTimeError:
        effort.leave_out("the search for the guilty samples")
    if trial.whole_only:
        effort.whole_only.add(kind)
        effort.cut.append(UNCUT)
    effort.searched(place, found=bool(guilty))
    return guilty


ACCUMULATE = "torch::autograd::AccumulateGrad"


def _suspects(found: Found, origin: Origin, batch: Any, count: int) -> list[int]:
    if origin.phase == "input" and origin.tensor is not None:
        tensor = dict(batches.named_tensors(batch))[origin.tensor]
        bad = ~plain(tensor).isfinite()
        rows = (
            bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten().tolist() if bad.dim() else []
        )
        return rows if rows and bad.shape[0] == count else []
    call = found.birth
    return samples.suspects_from_rows(call.rows, call.shape[0] if call.shape else 0, count)


def _contrast(batch: Any, guilty: tuple[int, ...], count: int) -> Evidence:
    """The largest magnitude in the guilty samples and in all others."""
    inside, outside = [0.0], [0.0]
    for _, tensor in batches.named_tensors(batch):
        if numeric(tensor) and tensor.dim() and tensor.shape[0] == count:
            values = plain(tensor).nan_to_num(0.0, 0.0, 0.0).abs().reshape(count, -1)
            for sample in range(count if values.shape[1] else 0):
                (inside if sample in guilty else outside).append(float(values[sample].max()))
    return Evidence(sample_max=max(inside), others_max=max(outside))
