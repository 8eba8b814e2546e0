"""`locate`: from a bad step and its reading to the operation that made the first harmful value."""

from __future__ import annotations

import math
from dataclasses import replace
from types import TracebackType
from typing import Any

from stepguard.diagnose.source_line import name_operands
from stepguard.locate import evidence, origins, replay, samples
from stepguard.locate import replay_state as batches
from stepguard.locate.blame import FirstBad, blame_gradients, blame_loss, first_reader, huge_operand
from stepguard.locate.evidence import HUGE, Invocation
from stepguard.locate.live_trace import huge_origin, origin_of
from stepguard.locate.operands import Call, plain
from stepguard.locate.origins import buffer_origin
from stepguard.locate.replay import ModelReplayer, Replayer, ReplayError, Traced, difference
from stepguard.locate.replay_state import LocateBudget
from stepguard.locate.samples import bad_micro_batch, compiled_only, repeats
from stepguard.locate.source import ModuleSpans, is_users
from stepguard.locate.tracer import Tracer
from stepguard.records.incident import Evidence, Origin, Reading, with_evidence
from stepguard.state.batch import Step
from stepguard.state.isolation import untouched

# --- `locate`: from a bad step and its reading to the operation that made the first harmful
# value.


MOST_REPAIRS = 3
"""Batch tensors that may turn out innocent before the search settles for what it has."""


def locate(step: Step, reading: Reading, budget: LocateBudget | None = None) -> Origin:
    """Locate the first harmful value of a bad step.

    Never raises for the user's code, and leaves model, optimizer, gradients and RNG as they are.
    `budget` bounds the time, and is the same for all incidents of a run: it remembers which
    searches were in vain.
    """
    if budget is None:
        budget = LocateBudget()
    budget.begin(on_host=all(p.device.type == "cpu" for p in step.model.parameters()))
    try:
        origin = _locate(step, reading, budget)
    except ReplayError as failure:
        error = str(failure)[:200]
        remark = f"the replay failed: {error}"
        return evidence.evidence_origin(step, reading, Evidence(replay_error=error), remark)
    return name_operands(replace(origin, remarks=(*origin.remarks, *budget.cut)))


def finite_step(reading: Reading) -> bool:
    """True if loss and gradients are finite: forward and backward pass are fine."""
    losses = [value for value in (reading.loss, *reading.micro_losses) if value is not None]
    return reading.grads_finite and all(map(math.isfinite, losses))


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
            return buffer_origin(step, reading, no_replay(step))
        return origins.update_origin(step, reading)
    if finite_step(reading):
        return _of_finite_step(step, reading, budget)
    reason = no_replay(step)
    if reason is not None:
        remark = f"the step could not be run again: {reason}"
        return evidence.evidence_origin(step, reading, Evidence(no_replay=reason), remark)
    with untouched(step) as keeper, replay.kept_loss_function_state(step) as own:
        if step.model_only:
            return _replay_model(ModelReplayer(step, keeper, budget), reading)
        replayer = Replayer(step, keeper, budget)
        replayer.loss_fn_state = own
        micro = bad_micro_batch(replayer, reading)
        if micro is None:
            origin = _clean_replay(replayer, reading)
        else:
            origin = _from_micro_batch(replayer, reading, micro)
        if origin.reproduced is False:
            moves = own.changed()[: replay.MOST_NAMED]
            return with_evidence(origin, Evidence(moves=moves))
        return origin


def _of_finite_step(step: Step, reading: Reading, budget: LocateBudget) -> Origin:
    if reading.bad_state:
        return _bad_state(step, reading)
    if not all(map(math.isfinite, reading.lr)):
        return origins.update_origin(step, reading)
    if reading.grad_norm is not None and math.isinf(reading.grad_norm):
        return _of_infinite_norm(step, origins.norm_origin(step, reading))
    found = None
    if step.replayable and no_replay(step) is None:
        with untouched(step) as keeper, replay.kept_loss_function_state(step) as own:
            replayer = Replayer(step, keeper, budget)
            replayer.loss_fn_state = own
            found = samples.costly_samples(replayer, reading)
    return found or origins.divergence_origin(step, reading)


def _of_infinite_norm(step: Step, origin: Origin) -> Origin:
    """Follow huge gradients back to the stored tensor that made them, where there is one."""
    if no_replay(step) is not None:
        return origin
    with untouched(step) as keeper:
        kind = ModelReplayer if step.model_only else Replayer
        replayer = kind(step, keeper)
        for micro in range(len(step.micro_batches)):
            replayer.clear_gradients()
            try:
                traced = replayer.trace(micro, reach=True)
            except ReplayError:
                return origin
            makers: list[Call] = []
            for parameter in replayer.parameters.values():
                if parameter.grad is not None:
                    maker = traced.tracer.maker_of(plain(parameter.grad))
                    if maker is not None:
                        makers.append(maker)
            largest = max(makers, key=lambda maker: maker.reach, default=None)
            found = None
            if largest is not None:
                found = huge_operand(largest)
            if found is not None:
                return huge_origin(origin, found, traced, replayer)
    return origin


def _bad_state(step: Step, reading: Reading) -> Origin:
    """Name who reads state that is bad under a finite loss, such as a running variance."""
    origin = evidence.state_origin(step, reading)
    if no_replay(step) is not None or origin.tensor is None or origin.tensor.startswith("opt:"):
        return origin
    tensor = evidence.stored_tensor(step, origin.tensor)
    if tensor is None:
        return origin
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        try:
            traced = replayer.trace(0, backward=False)
        except ReplayError:
            return origin
    maker = traced.tracer.maker_of(tensor)
    reader = None
    if maker is not None:
        reader = first_reader(traced.tracer, maker)
    if maker is None or reader is None:
        return origin
    read = origin_of(FirstBad(maker, reader), traced, replayer)
    return replace(
        read, tensor=origin.tensor, phase="state", inputs=origin.inputs, evidence=origin.evidence
    )


def _replay_model(replayer: ModelReplayer, reading: Reading) -> Origin:
    """Replay the model's part of a watched step; a clean one does not mean a transient fault."""
    call = replayer.bad_call()
    if call is None:
        origin = _clean_replay(replayer, reading)
    else:
        origin = _from_micro_batch(replayer, reading, call)
    if not origin.reproduced and origin.phase != "state":
        return replay.outside_model(replayer, reading)
    return replayer.with_caller(origin, call)


def _from_micro_batch(replayer: Replayer, reading: Reading, micro: int) -> Origin:
    step = replayer.step
    traced, found = search(replayer, micro, step.micro_batches[micro])
    if found is None and traced.ran.clean:
        return _clean_replay(replayer, reading)
    if found is None:
        origin = evidence.evidence_origin(step, reading, Evidence(untraced=True))
        return replace(origin, micro_batch=micro, reproduced=True)
    origin = origin_of(found, traced, replayer)
    if reading.bad_state and origin.tensor not in reading.bad_state:
        return evidence.state_origin(step, reading)
    origin = _with_huge_buffer(origin, found, replayer, micro)
    if reading.overflow:
        origin = with_evidence(origin, Evidence(scale_overflow=True))
    differs = difference(reading, micro, replayer)
    if differs is not None:
        return replace(with_evidence(origin, Evidence(departs=differs)), reproduced=False)
    return samples.with_samples(origin, found, traced, replayer)


def _with_huge_buffer(origin: Origin, found: FirstBad, replayer: Replayer, micro: int) -> Origin:
    """Add the finite but absurd buffer that an overflow comes from, where there is one."""
    operands = [max(abs(one.min or 0.0), abs(one.max or 0.0)) for one in origin.inputs]
    if origin.evidence.finite_in is None or max(operands, default=0.0) < HUGE:
        return origin
    if not replayer.budget.affords(1.0 / len(replayer.step.micro_batches)):
        return origin
    tracer = replayer.trace(micro, reach=True).tracer
    same = [call for call in tracer.calls if call.index == found.call.index]
    huge = huge_operand(same[0]) if same and same[0].op == found.call.op else None
    if huge is None or not huge.call.op.startswith("buffer:"):
        return origin
    return with_evidence(origin, Evidence(huge_buffer=huge.call.op))


def search(replayer: Replayer, micro: int, batch: Any) -> tuple[Traced, FirstBad | None]:
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

    accumulate()
    first = replayer.trace(micro, batch)
    first_found = _blame(replayer, first)
    traced, found = first, first_found
    innocent: frozenset[str] = frozenset()
    for _ in range(MOST_REPAIRS):
        if found is None or not found.call.op.startswith("batch"):
            break
        if not replayer.budget.affords(2.0 / len(replayer.step.micro_batches)):
            replayer.budget.leave_out(f"the proof that {found.call.op} alone is to blame")
            return traced, found
        innocent |= {found.call.op}
        mended = batches.repaired(batch, innocent)
        accumulate()
        if replayer.run(micro, mended).clean:
            return traced, found
        accumulate()
        traced = replayer.trace(micro, mended)
        found = _blame(replayer, traced)
    # A stored tensor, or an operation that gave a bad value in the first trace too.
    if found is not None and found.call.stage != "stored":
        harmful = {(call.op, call.line) for call in first.tracer.calls if call.harmful}
        if (found.call.op, found.call.line) not in harmful:
            found = None
    if found is None:
        return (first, first_found)
    return (traced, found)


def _blame(replayer: Replayer, traced: Traced) -> FirstBad | None:
    tracer = traced.tracer
    if not traced.ran.loss_finite:
        assert traced.ran.loss is not None
        target = tracer.maker_of(traced.ran.loss)
        return blame_loss(tracer, [target]) if target is not None else None
    bad = []
    for name in replayer.bad_gradients():
        gradient = replayer.parameters[name].grad
        assert gradient is not None
        bad.append(plain(gradient))
    tracer.settle_gradients(bad)
    targets: list[Call] = []
    for gradient in bad:
        maker = tracer.maker_of(gradient)
        if maker is not None:
            targets.append(maker)
    return blame_gradients(tracer, targets) if targets else None


def _clean_replay(replayer: Replayer, reading: Reading) -> Origin:
    """Say why a bad step may be clean when it is run again."""
    origin = evidence.evidence_origin(replayer.step, reading)
    if compiled_only(replayer):
        origin = with_evidence(origin, Evidence(compiled_only=True))
        return replace(origin, reproduced=True, method="replay")
    differ = replay.different_losses(replayer)
    same_bits = differ is None and repeats(replayer)
    origin = with_evidence(origin, Evidence(same_bits=same_bits, different_losses=differ))
    return replace(origin, reproduced=False, method="replay")


# --- Replay a step and stop where its first bad value is made, with the user's frames alive.


class ReachedError(BaseException):
    """Raised in the operation to stop at. A BaseException: the user's handlers do not catch it."""


class StoppingTracer(Tracer):  # type: ignore[no-untyped-call]
    """Records calls, and raises ReachedError once the operation of this number has run."""

    def __init__(self, modules: ModuleSpans, last: int) -> None:
        super().__init__(modules)
        self._last = last

    def _record(self, invocation: Invocation, result: Any) -> None:
        super()._record(invocation, result)
        if len(self.calls) > self._last:
            raise ReachedError


class StoppingReplayer(Replayer):
    """Traces with a StoppingTracer."""

    last = 0
    """Number of the operation to stop after."""

    def new_tracer(self, spans: ModuleSpans) -> Tracer:
        return StoppingTracer(spans, self.last)


def frames_at_origin(step: Step, reading: Reading) -> TracebackType | None:
    """Return the user's frames at the origin, innermost last; of a backward origin, its forward's.

    None where no frame of the user's is involved: the optimizer made it, or the replay is clean.
    """
    if finite_step(reading) or reading.state_born:
        return None
    if not step.replayable or no_replay(step) is not None:
        return None
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        try:
            micro = bad_micro_batch(replayer, reading)
            if micro is None:
                return None
            traced, found = search(replayer, micro, step.micro_batches[micro])
            call = None
            if found is not None:
                call = found.call
            if found is not None and (found.call.stage == "stored" or found.call.uninitialised):
                call = found.consumer
            if call is not None and call.stage == "backward":
                # No frame of the user's is alive in the backward: stop where the node was created.
                call = traced.tracer.owners.get(call.sequence)
            if call is None:
                return None
            stopping = StoppingReplayer(step, keeper)
            stopping.last = call.index
            stopping.clear_gradients()
            stopping.trace(micro)
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
