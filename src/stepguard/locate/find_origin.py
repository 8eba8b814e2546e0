"""`locate`: from a bad step and its reading to the operation that made the first harmful value."""

from __future__ import annotations

import math
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from stepguard.diagnose.source_line import name_operands
from stepguard.locate import evidence, origins, samples
from stepguard.locate.blame import FirstBad, blame_gradients, blame_loss, first_reader, huge_operand
from stepguard.locate.evidence import HUGE
from stepguard.locate.operands import Call, plain
from stepguard.locate.origins import huge_origin, origin_of
from stepguard.locate.replay import (
    LocateBudget,
    ModelReplayer,
    Replayer,
    ReplayError,
    difference,
    replaying,
)
from stepguard.locate.source import is_users
from stepguard.locate.tracer import ReachedError, Tracer
from stepguard.locate.witness import locate_region, with_witnesses
from stepguard.records.incident import Evidence, Origin, Reading, with_evidence
from stepguard.state.batch import Step, rebuild


def locate(step: Step, reading: Reading, budget: LocateBudget | None = None) -> Origin:
    """Locate the first harmful value of a bad step.

    Never raises for the user's code, and leaves model, optimizer, gradients and RNG as they are.
    `budget` bounds the time, and is the same for all incidents of a run: it remembers which
    searches were in vain.
    """
    if budget is None:
        budget = LocateBudget()
    budget.begin(step)
    try:
        origin = _locate(step, reading, budget)
    except ReplayError as failure:
        error = str(failure)[:200]
        remark = f"the replay failed: {error}"
        return evidence.evidence_origin(step, reading, Evidence(replay_error=error), remark)
    return name_operands(replace(origin, remarks=(*origin.remarks, *budget.cut)))


def finite_step(reading: Reading) -> bool:
    """True if loss and gradients are finite: forward and backward pass are fine."""
    return reading.grads_finite and not evidence.loss_is_bad(reading)


def no_replay(step: Step) -> str | None:
    """Say why the step cannot be run again on this rank alone; None if it can."""
    if step.sharded and not step.gathered:
        return step.not_gathered or "parameters are sharded over ranks"
    runnable = step.replayable or step.model_only
    if not runnable or not step.micro_batches or not step.rng:
        return "the guard did not run the step"
    return None


def _locate(step: Step, reading: Reading, budget: LocateBudget) -> Origin:
    if reading.state_born:
        # State that was fine before the step and is bad after it.
        if reading.bad_state[0].startswith("buffer:"):
            return origins.buffer_origin(step, reading, no_replay(step))
        return origins.update_origin(step, reading)
    if finite_step(reading):
        if reading.bad_state:
            return _bad_state(step, reading)
        if not all(map(math.isfinite, reading.lr)):
            return origins.update_origin(step, reading)
        if reading.grad_norm is not None and math.isinf(reading.grad_norm):
            return _of_infinite_norm(step, origins.norm_origin(step, reading))
        return origins.divergence_origin(reading)
    reason = no_replay(step)
    if reason is not None:
        remark = f"the step could not be replayed: {reason}"
        return evidence.evidence_origin(step, reading, Evidence(no_replay=reason), remark)
    with replaying(step, budget) as replayer:
        if isinstance(replayer, ModelReplayer):
            # The model's part of a watched step; a clean one does not mean a transient fault.
            call = replayer.bad_call()
            origin = _from_micro_batch(replayer, reading, call)
            if not origin.reproduced and origin.phase != "state":
                return replayer.outside_model(reading)
            return replayer.with_caller(origin, call)
        origin = _from_micro_batch(replayer, reading, samples.bad_micro_batch(replayer, reading))
        if origin.reproduced is False and replayer.loss_fn_state is not None:
            # Parts of the loss function's own state that are named
            moves = replayer.loss_fn_state.changed()[:3]
            return with_evidence(origin, Evidence(moves=moves))
        return origin


def _of_infinite_norm(step: Step, origin: Origin) -> Origin:
    """Follow huge gradients back to the stored tensor that made them, where there is one."""
    if no_replay(step) is not None:
        return origin
    with replaying(step) as replayer:
        for micro in range(len(step.micro_batches)):
            replayer.clear_gradients()
            try:
                traced = replayer.trace(micro, reach=True)
            except ReplayError:
                return origin
            makers = _makers(traced, [p.grad for p in replayer.parameters.values()])
            largest = max(makers, key=lambda maker: maker.reach, default=None)
            found = huge_operand(largest)
            if found is not None:
                return huge_origin(origin, found, traced, step)
    return origin


def _bad_state(step: Step, reading: Reading) -> Origin:
    """Name who reads state that is bad under a finite loss, such as a running variance."""
    origin = evidence.state_origin(step, reading)
    if no_replay(step) is not None or origin.tensor is None or origin.tensor.startswith("opt:"):
        return origin
    tensor = evidence.stored_tensor(step, origin.tensor)
    if tensor is None:
        return origin
    with replaying(step) as replayer:
        try:
            traced = replayer.trace(0, backward=False)
        except ReplayError:
            return origin
    maker = traced.maker_of(tensor)
    reader = first_reader(traced, maker)
    if maker is None or reader is None:
        return origin
    read = origin_of(FirstBad(maker, reader), traced, step)
    return replace(
        read, tensor=origin.tensor, phase="state", inputs=origin.inputs, evidence=origin.evidence
    )


def _from_micro_batch(replayer: Replayer, reading: Reading, micro: int | None) -> Origin:
    """`micro`: the bad micro-batch; None where all are clean."""
    step = replayer.step
    if micro is None:
        return _clean_replay(replayer, reading)
    traced, found = search(replayer, micro, step.micro_batches[micro])
    if found is None and traced.ran.clean:
        return _clean_replay(replayer, reading)
    if found is None:
        origin = evidence.evidence_origin(step, reading, Evidence(untraced=True))
        return replace(origin, micro_batch=micro, reproduced=True)
    origin = origin_of(found, traced, step)
    if reading.bad_state and origin.tensor not in reading.bad_state:
        return evidence.state_origin(step, reading)
    origin = _with_huge_buffer(origin, found, replayer, micro)
    if reading.overflow:
        origin = with_evidence(origin, Evidence(scale_overflow=True))
    differs = difference(reading, micro, replayer)
    if differs is not None:
        return replace(with_evidence(origin, Evidence(departs=differs)), reproduced=False)
    origin = with_witnesses(origin, found.call, replayer)
    return samples.with_samples(origin, found, traced, replayer)


def _with_huge_buffer(origin: Origin, found: FirstBad, replayer: Replayer, micro: int) -> Origin:
    """Add the finite but absurd buffer that an overflow comes from, where there is one."""
    operands = [max(abs(one.min or 0.0), abs(one.max or 0.0)) for one in origin.inputs]
    if origin.evidence.finite_in is None or max(operands, default=0.0) < HUGE:
        return origin
    if not replayer.budget.affords(1.0 / len(replayer.step.micro_batches)):
        return origin
    for call in replayer.trace(micro, reach=True).calls:
        if call.index == found.call.index and call.op == found.call.op:
            huge = huge_operand(call)
            if huge is not None and huge.call.op.startswith("buffer:"):
                return with_evidence(origin, Evidence(huge_buffer=huge.call.op))
    return origin


def search(replayer: Replayer, micro: int, batch: Any) -> tuple[Tracer, FirstBad | None]:
    """Trace the micro-batch and find its first harmful value.

    A bad batch tensor must prove itself: with its bad elements repaired the step is finite. Where
    it does not, the search continues with the repaired batch. What it finds then must have been bad
    in the first trace too, or else it is the repair that broke the step.
    """
    accumulated = replayer.copied_gradients()

    def accumulate() -> None:
        """Put the gradients of the micro-batches before the bad one in place, as fresh tensors."""
        for name, parameter in replayer.parameters.items():
            parameter.grad = accumulated[name].clone() if name in accumulated else None

    innocent: set[str] = set()

    def mend(name: str, tensor: Tensor) -> Tensor:
        """Put the mean in the place of every NaN and Inf."""
        if name not in innocent:
            return tensor
        finite = torch.isfinite(tensor)
        # Not 0, which could break a division by itself.
        usual = tensor[finite].mean() if bool(finite.any()) else torch.ones((), dtype=tensor.dtype)
        return torch.where(finite, tensor, usual.to(tensor.dtype)).detach()

    accumulate()
    first = traced = replayer.trace(micro, batch)
    first_found = found = _blame(replayer, first)
    # Batch tensors that may turn out innocent before the search settles for what it has
    for _ in range(3):
        if found is None or not found.call.op.startswith("batch"):
            break
        if not replayer.budget.affords(2.0 / len(replayer.step.micro_batches)):
            replayer.budget.leave_out(f"the proof that only {found.call.op} is to blame")
            return traced, found
        innocent.add(found.call.op)
        mended = rebuild(batch, mend)
        accumulate()
        if replayer.run(micro, mended).clean:
            return traced, found
        accumulate()
        traced = replayer.trace(micro, mended)
        found = _blame(replayer, traced)
    # A stored tensor, or an operation that gave a bad value in the first trace too.
    if found is not None and found.call.stage != "stored":
        harmful = {(call.op, call.line) for call in first.calls if call.harmful}
        if (found.call.op, found.call.line) not in harmful:
            found = None
    if found is None:
        return first, first_found
    return traced, found


def _blame(replayer: Replayer, traced: Tracer) -> FirstBad | None:
    if not traced.ran.loss_finite:
        return blame_loss(traced, _makers(traced, [traced.ran.loss]))
    bad = [replayer.parameters[name].grad for name in replayer.bad_gradients()]
    traced.settle_gradients([plain(gradient) for gradient in bad if gradient is not None])
    return blame_gradients(traced, _makers(traced, bad))


def _makers(traced: Tracer, tensors: list[Tensor | None]) -> list[Call]:
    """The operations that wrote these tensors, as far as they are known."""
    makers = []
    for tensor in tensors:
        maker = None if tensor is None else traced.maker_of(plain(tensor))
        if maker is not None:
            makers.append(maker)
    return makers


def _clean_replay(replayer: Replayer, reading: Reading) -> Origin:
    """Say why a bad step may be clean when it is run again."""
    origin = replace(evidence.evidence_origin(replayer.step, reading), method="replay")
    micro = samples.compiled_only(replayer)
    if micro is not None:
        origin = replace(with_evidence(origin, Evidence(compiled_only=True)), reproduced=True)
        return locate_region(replayer, micro, origin)
    return replace(with_evidence(origin, samples.steadiness(replayer)), reproduced=False)


# --- Replay a step and stop where its first bad value is made, with the user's frames alive.


def frames_at_origin(step: Step, reading: Reading) -> TracebackType | None:
    """Return the user's frames at the origin, innermost last; of a backward origin, its forward's.

    None where no frame of the user's is involved: the optimizer made it, or the replay is clean.
    """
    if finite_step(reading) or reading.state_born:
        return None
    if not step.replayable or no_replay(step) is not None:
        return None
    with replaying(step) as replayer:
        try:
            micro = samples.bad_micro_batch(replayer, reading)
            if micro is None:
                return None
            traced, found = search(replayer, micro, step.micro_batches[micro])
            if found is None:
                return None
            call: Call | None = found.call
            if found.call.stage == "stored" or found.call.uninitialised:
                call = found.consumer
            if call is not None and call.stage == "backward":
                # No frame of the user's is alive in the backward: stop where the node was created.
                call = traced.owners.get(call.sequence)
            if call is not None:
                replayer.clear_gradients()
                replayer.trace(micro, last=call.index)
        except ReplayError:
            return None
        except ReachedError as reached:
            return _users_only(reached.__traceback__)
    return None


def _users_only(trace: TracebackType | None) -> TracebackType | None:
    """Take the frames of torch and stepguard out of a traceback."""
    kept = []
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    inner = None
    for entry in reversed(kept):
        entry.tb_next = inner
        inner = entry
    return inner
