"""Write Origin records: of a traced step, an update, a norm that overflows, a buffer, an exception.

The update is called from this file: its frames mark where the user's optimizer begins, see
`source`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from stepguard.locate import evidence, samples
from stepguard.locate.blame import FirstBad, blame_loss
from stepguard.locate.operands import (
    Call,
    ancestors,
    batch_tensors,
    numeric,
    plain,
    summarise,
    unravel,
)
from stepguard.locate.replay import (
    LocateBudget,
    OutOfTimeError,
    ReplayError,
    replaying,
)
from stepguard.locate.source import Line, ModuleSpans, in_library, is_users, with_source
from stepguard.locate.tracer import Tracer
from stepguard.locate.witness import compared
from stepguard.records.incident import (
    NO_EVIDENCE,
    Evidence,
    Origin,
    Phase,
    Reading,
    with_evidence,
)
from stepguard.sentinel.gradients import scale_gradients
from stepguard.state.batch import Step, sample_count
from stepguard.tensors.names import (
    is_distributed,
    named_modules,
    named_parameters,
    names_by_id,
    optimizer_parameters,
)
from stepguard.tensors.values import is_finite, local_part

# --- Write down as an Origin record what the walk over a trace found.


PHASES: dict[str, Phase] = {
    "batch": "input",
    "param": "state",
    "buffer": "state",
    "opt": "state",
    "attr": "state",
}
"""Phase of a stored tensor, by the kind that its name begins with."""


def origin_of(found: FirstBad, traced: Tracer, step: Step) -> Origin:
    """Build the record, still without samples."""
    call = found.call
    if call.stage == "stored":
        return _stored_origin(found, traced, step)
    at = call
    if call.uninitialised and found.consumer is not None:
        # Reading uninitialised memory is the mistake, not allocating it.
        at = found.consumer
    facts = call.evidence | found.evidence | _surroundings(step, traced)
    facts |= Evidence(
        uninitialised=call.uninitialised,
        inner_gradient=call.node is not None and call.stage == "forward",
    )
    for path, module in named_modules(step.named_roots()) if call.number else ():
        for key, value in vars(module).items():
            # An attribute of a module that is NaN or infinite: the operation was probably given it.
            if not facts.attribute and isinstance(value, float) and not math.isfinite(value):
                facts |= Evidence(attribute=f"{path}.{key}".strip("."))
    return replace(
        _at(Origin(step=step.index, phase="loss"), at, traced),
        op=call.op,
        node=call.node,
        micro_batch=traced.micro_batch,
        inputs=call.inputs,
        output=call.output,
        method="replay",
        reproduced=True,
        evidence=facts,
    )


def _stored_origin(found: FirstBad, traced: Tracer, step: Step) -> Origin:
    """Build the record of a tensor that was bad before the step, located at its first consumer."""
    name = found.call.op
    kind = name.partition(":")[0]
    origin = Origin(
        step=step.index,
        phase="loss",
        method="replay",
        reproduced=True,
        evidence=found.evidence | _surroundings(step, traced),
    )
    if found.consumer is not None:
        origin = _at(origin, found.consumer, traced)
    origin = replace(origin, phase=PHASES.get(kind, origin.phase))
    tensor = evidence.stored_tensor(step, name, traced.micro_batch)
    if tensor is not None:
        operand = summarise(name, tensor)
        origin = with_evidence(origin, evidence.bad_elements(tensor, operand))
        origin = replace(origin, inputs=(operand,))
    if origin.phase == "input":
        origin = replace(origin, micro_batch=traced.micro_batch)
    if kind in PHASES and not name.startswith(evidence.KEPT):
        return replace(origin, tensor=name)
    origin = with_evidence(origin, Evidence(constant="nan" if found.call.out.nan else "inf"))
    if name.startswith(evidence.KEPT):
        origin = with_evidence(origin, Evidence(attribute=name.removeprefix(evidence.KEPT)))
    return origin


def huge_origin(origin: Origin, found: FirstBad, traced: Tracer, step: Step) -> Origin:
    """Name the finite but absurd tensor that made what overflowed, where it first did so."""
    name = found.call.op
    assert found.consumer is not None
    tensor = evidence.stored_tensor(step, name, traced.micro_batch)
    origin = replace(
        _at(origin, found.consumer, traced),
        tensor=name,
        inputs=() if tensor is None else (summarise(name, tensor),),
        output=None,
        micro_batch=traced.micro_batch,
        method="replay",
        reproduced=True,
    )
    if name.startswith("param:"):
        return with_evidence(origin, Evidence(huge_parameter=name))
    return with_evidence(origin, Evidence(huge_buffer=name))


def _at(origin: Origin, call: Call, tracer: Tracer) -> Origin:
    """Place the origin at a call."""
    module = call.module
    phase: Phase = "forward" if tracer.modules.belongs_to_model(module) else "loss"
    if call.stage == "backward":
        phase = "backward"
        module = tracer.modules.created(call.sequence)
    origin = replace(
        origin, phase=phase, module=module, op=call.op, node=call.node, inputs=call.inputs
    )
    return with_source(origin, line_of(call, tracer))


def _surroundings(step: Step, traced: Tracer) -> Evidence:
    """Facts on the replay as a whole."""
    sizes = []
    for _, tensor in batch_tensors(step.micro_batches[traced.micro_batch]):
        if numeric(tensor) and tensor.numel():
            sizes.append(float(plain(tensor).nan_to_num(0.0, 0.0, 0.0).abs().max()))
    return Evidence(
        scale=float(step.scale) if step.scale != 1.0 else None,
        autocast=traced.autocast,
        local_collectives=traced.local_collectives,
        unseen=tuple(sorted(traced.unseen)),
        batch_max=max(sizes, default=None),
    )


def line_of(call: Call, tracer: Tracer) -> Line | None:
    """Return the user's line; in the backward, of the forward behind it or behind its parents."""
    seen: set[int] = set()
    queue = [call]
    while queue:
        one = queue.pop(0)
        line = one.line or tracer.lines.get(one.sequence)
        if line is not None:
            return line
        seen.add(id(one))
        for parent in one.parents:
            if id(parent) not in seen and parent.stage != "stored":
                queue.append(parent)
    return None


# --- Locate bad values that the optimizer makes from finite gradients, and norms that overflow.


Gradients = dict[int, Tensor]
Updated = tuple[str, Tensor, Tensor]
"""Name, tensor and parameter: a parameter itself, or a slot of the optimizer's state."""


def update_origin(step: Step, reading: Reading) -> Origin:
    """Run the update again on copies of parameters, gradients and optimizer state."""
    origin = _of_update(reading)
    if reading.bad_state:
        origin = replace(origin, tensor=reading.bad_state[0])
    gradients = _gradients(step)
    if not gradients:
        return origin
    twin = _ready_twin(step, reading, gradients)
    known = names_by_id(named_parameters(step.named_roots()))
    names = [known.get(id(one), "") for one in optimizer_parameters(step.optimizer)]
    tracer = Tracer(ModuleSpans({}), stage="optimizer")
    for name, tensor, _ in _updated(twin, names):
        tracer.store(name, tensor)
    try:
        with torch.no_grad(), tracer:
            twin.step()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:200]
        origin = with_evidence(origin, Evidence(replay_error=failure))
        return replace(origin, remarks=(f"the replay failed: {failure}",))
    bad = [updated for updated in _updated(twin, names) if not is_finite(updated[1])]
    origin = _of_traced_update(replace(origin, method="replay"), tracer, twin, bad)
    if origin.reproduced and bad:
        return _with_loop(origin, twin, _ready_twin(step, reading, gradients), names)
    return origin


def _with_loop(origin: Origin, failed: Optimizer, twin: Optimizer, names: Sequence[str]) -> Origin:
    """Make the update by the optimizer's loop over parameters, unless that is what it was."""
    op = origin.op or ""
    kernel = "_fused_" in op or "._foreach_" in op or origin.evidence.opaque is not None
    if not kernel or not all("foreach" in group for group in twin.param_groups):
        return origin

    def tensors(optimizer: Optimizer) -> list[Tensor | None]:
        return [tensor for _, tensor, _ in _updated(optimizer, names)]

    def loop() -> list[Tensor | None]:
        for group in twin.param_groups:
            group.update({key: False for key in ("fused", "foreach") if key in group})
        with torch.no_grad():
            twin.step()
        return tensors(twin)

    name = "the loop over parameters (fused=False, foreach=False)"
    witness = compared("unfused", name, loop, tensors(failed))
    return with_evidence(origin, Evidence(witnesses=(witness,)))


def _ready_twin(step: Step, reading: Reading, gradients: Gradients) -> Optimizer:
    """A twin of the optimizer with copies of the gradients, clipped as the step did."""
    twin = _twin(step.optimizer)
    parameters = optimizer_parameters(twin)
    for parameter, original in zip(parameters, optimizer_parameters(step.optimizer), strict=True):
        gradient = gradients.get(id(original))
        parameter.grad = None if gradient is None else gradient.detach().clone()
    if step.sharded and reading.clip_factor is not None:
        scale_gradients(parameters, reading.clip_factor)
    elif step.clip_norm is not None:
        clip_grad_norm_(parameters, step.clip_norm)
    return twin


def _of_traced_update(
    origin: Origin, tracer: Tracer, twin: Optimizer, bad: list[Updated]
) -> Origin:
    # The first operation that made a bad value, and the tensor that it ended in.
    found: list[tuple[Call, str, Tensor]] = []
    for name, tensor, parameter in bad:
        maker = tracer.maker_of(tensor)
        for call in ancestors(maker) if maker is not None else ():
            if call.first_bad:
                found.append((call, name, parameter))
    if not found and bad:
        # a kernel wrote it that is no operation of torch's
        origin = with_evidence(origin, Evidence(opaque="code"))
        name = f"{type(twin).__name__}.step"
        return replace(origin, op=name, tensor=bad[0][0], reproduced=True)
    if not found:
        return replace(origin, reproduced=False)
    call, name, parameter = min(found, key=lambda one: one[0].index)
    if call.stage == "stored":
        return replace(origin, phase="state", tensor=call.op, reproduced=True)
    # Is the group's epsilon 0 in the parameter's dtype?
    epsilon = NO_EVIDENCE
    for group in twin.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and any(p is parameter for p in group["params"]):
            rounded = float(torch.tensor(eps, dtype=parameter.dtype))
            epsilon = Evidence(eps=eps, eps_underflow=eps > 0 and rounded == 0.0)
    return replace(
        with_source(origin, line_of(call, tracer)),
        op=call.op,
        tensor=name,
        inputs=call.inputs,
        output=call.output,
        reproduced=True,
        evidence=call.evidence | origin.evidence | epsilon,
    )


def _twin(optimizer: Optimizer) -> Optimizer:
    """An independent optimizer on copied parameters and state, without any hooks."""
    # What a deep copy finds here it takes for the copy: for sharded tensors a copy of what this
    # rank holds of them, since no other rank joins what this one computes.
    memo: dict[int, Any] = {}
    for parameter in optimizer_parameters(optimizer):
        if is_distributed(parameter):
            memo[id(parameter)] = nn.Parameter(local_part(parameter.detach()).clone())
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and is_distributed(value):
                memo[id(value)] = local_part(value.detach()).clone()
    twin = copy.deepcopy(optimizer, memo)
    # A deep copy of a torch optimizer carries groups, state and defaults only, not what its author
    # put on `self`.
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):
            # What cannot be copied is missed only if the update needs it: the replay says so then.
            with suppress(TypeError, RuntimeError):
                setattr(twin, name, copy.deepcopy(value, memo))
    return twin


def _updated(optimizer: Optimizer, names: Sequence[str]) -> Iterator[Updated]:
    parameters = optimizer_parameters(optimizer)
    for name, parameter in zip(names, parameters, strict=True):
        yield f"param:{name}", parameter, parameter
    for parameter in parameters:
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"opt:{slot}", value, parameter


def norm_origin(step: Step, reading: Reading) -> Origin:
    """Name the operation that overflows in the norm of finite gradients."""
    origin = replace(_of_update(reading), op="aten._foreach_norm")
    gradients = [gradient for gradient in _gradients(step).values() if gradient.numel()]
    if not gradients:
        return origin
    tracer = Tracer(ModuleSpans({}), stage="optimizer")
    with torch.no_grad(), tracer:
        norm = get_total_norm(gradients)
    for call in tracer.calls:
        if call.first_bad:
            origin = replace(origin, op=call.op, output=call.output)
            break
    exact = math.sqrt(sum(float(g.detach().double().norm()) ** 2 for g in gradients))
    if math.isfinite(exact):
        origin = with_evidence(origin, Evidence(finite_norm=exact))
    reproduced: bool | None = not is_finite(norm)
    if step.sharded and not reproduced:
        # what overflows is the norm of all ranks' parts, and this is one of them
        reproduced = None
    largest = max(gradients, key=lambda gradient: float(gradient.detach().abs().max()))
    position = unravel(largest.detach().abs().argmax(), largest.shape)
    shown = summarise("grad", largest, position)
    return replace(origin, inputs=(shown,), method="replay", reproduced=reproduced)


def divergence_origin(reading: Reading) -> Origin:
    """Blame the update as a whole: everything is finite, and yet the run is being lost."""
    return with_evidence(_of_update(reading), Evidence(repeat_loss=reading.repeat_loss))


def _of_update(reading: Reading) -> Origin:
    lr = Evidence(lr=max(reading.lr, default=None))
    return Origin(step=reading.step, phase="optimizer", method="evidence", evidence=lr)


def _gradients(step: Step) -> Gradients:
    """Return the gradients that are there, else those of a replay (unscaled), by parameter."""
    present = _present_gradients(step)
    if present or not step.replayable or not step.rng:
        return present
    with replaying(step) as replayer:
        try:
            for micro in range(len(step.micro_batches)):
                replayer.run(micro)
        except ReplayError:
            return {}
        replayed = _present_gradients(step)
        return {key: gradient / step.scale for key, gradient in replayed.items()}


def _present_gradients(step: Step) -> Gradients:
    """The gradients themselves; of sharded ones this rank's parts, with which it can work alone."""
    present = {}
    for parameter in optimizer_parameters(step.optimizer):
        if parameter.grad is not None:
            present[id(parameter)] = local_part(parameter.grad)
    return present


# --- Locate an exception of the user's code: read its traceback, then replay to find the samples.


_AUTOGRAD = str(Path(torch.__file__).parent / "autograd")
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")


def traceback_origin(error: BaseException, index: int, roots: dict[str, nn.Module]) -> Origin:
    """Read the user's line, the module and the part of the step from the traceback alone."""
    files: list[str] = []
    line = None
    module = None
    names = names_by_id(named_modules(roots))
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        file = frame.f_code.co_filename
        files.append(file)
        if is_users(file) and in_library(file):
            line = (line or Line(file, trace.tb_lineno))._replace(library=(file, trace.tb_lineno))
        elif is_users(file):
            line = Line(file, trace.tb_lineno)
        # The innermost module that was being called.
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = names.get(id(owner), module)
        trace = trace.tb_next
    phase: Phase = "loss"
    # autograd/grad_mode.py is in the traceback of everything that is decorated with no_grad.
    if any(file.startswith(_AUTOGRAD) and "grad_mode" not in file for file in files):
        phase = "backward"
    elif module is not None and module.partition(".")[0] not in roots.keys() - {""}:
        phase = "forward"
    elif any(file.startswith(_OPTIMIZERS) for file in files):
        phase = "optimizer"
    return with_source(Origin(step=index, phase=phase, module=module, method="traceback"), line)


def place_exception(
    origin: Origin, error: BaseException, step: Step, micro: int, budget: LocateBudget
) -> Origin:
    """Run the micro-batch again; name the operation that raises and the samples that make it."""
    origin = replace(origin, method="replay", micro_batch=micro)
    backward = origin.phase == "backward"
    budget.begin(step)
    with replaying(step, budget) as replayer:
        replayer.keeper = step.buffers
        replayer.any_gradient = True

        def same(failure: ReplayError) -> bool | None:
            """True if it raises the same type; None if another, so that nothing can be said."""
            return True if type(failure.__cause__) is type(error) else None

        def raises(keep: Sequence[int]) -> bool | None:
            try:
                samples.run_samples(replayer, micro, keep, backward=backward)
            except ReplayError as again:
                return same(again)
            return False

        try:
            replayer.trace(micro, backward=backward)
        except ReplayError as again:
            if same(again):
                guilty: tuple[int, ...] | None = ()
                with suppress(OutOfTimeError):
                    count = sample_count(step.micro_batches[micro])
                    guilty = samples.guilty_samples(count, raises)
                return replace(origin, reproduced=True, op=again.op, samples=guilty or ())
    return replace(origin, reproduced=False)


def place_replayed_exception(step: Step) -> Origin:
    """Run a step from a capsule that raised when it was recorded; locate what it raises now."""
    for micro in range(len(step.micro_batches)):
        try:
            with replaying(step) as replayer:
                replayer.keeper = step.buffers
                replayer.any_gradient = True
                replayer.run(micro)
        except ReplayError as failure:
            error = failure.__cause__
            assert error is not None
            origin = traceback_origin(error, step.index, step.named_roots())
            return place_exception(origin, error, step, micro, LocateBudget(math.inf))
    return Origin(step=step.index, phase="loss", method="replay", reproduced=False)


# --- Locate the operation of the forward that made a buffer non-finite, under a finite loss.


def buffer_origin(step: Step, reading: Reading, no_replay: str | None = None) -> Origin:
    """Name the operation that wrote the bad value into the first bad buffer.

    `no_replay`: why the step cannot be run again; then the buffer's name is all that is known.
    """
    name = reading.bad_state[0]
    origin = Origin(
        step=reading.step,
        phase="forward",
        module=evidence.owner_of(name),
        tensor=name,
        method="scan",
    )
    if no_replay is not None:
        remark = f"the step could not be replayed: {no_replay}"
        return replace(origin, evidence=Evidence(no_replay=no_replay), remarks=(remark,))
    with replaying(step) as replayer:
        for micro in range(len(step.micro_batches)):
            try:
                traced = replayer.trace(micro, backward=False)
            except ReplayError:
                return origin
            buffer = evidence.stored_tensor(step, name)
            if buffer is None or is_finite(buffer):
                continue
            maker = traced.maker_of(buffer)
            found = None
            if maker is not None and maker.out and maker.stage != "stored":
                found = blame_loss(traced, [maker])
            else:
                # Norm layers update their statistics inside the kernel: no operation of the trace
                # writes the buffer, but the layer's operation is handed it.
                for call in traced.calls:
                    if any(p.stage == "stored" and p.op == name for p in call.parents):
                        found = FirstBad(call)
            if found is not None:
                origin = origin_of(found, traced, step)
            return replace(origin, tensor=name, output=summarise(name, buffer))
    return replace(origin, reproduced=False)


# --- Is a loss infinite only because finite values were too many or too large to be added up?


SUM_NODES = frozenset(
    {"SumBackward", "MeanBackward", "DotBackward", "MseLossBackward", "L1LossBackward"}
    | {"SmoothL1LossBackward", "HuberLossBackward", "LinalgVectorNormBackward", "NormBackward"}
)
PASSED = frozenset({"Mul", "Div", "Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Reshape"})
"""Nodes behind a sum that may still belong to the loss: weights, means, casts."""
MOST_NODES = 16


def overflowed_in_replay(step: Step, micro: Sequence[int]) -> bool:
    """Run the forward of these micro-batches again: is each loss infinite by a sum alone?"""
    with replaying(step) as replayer:
        replayer.keeper = step.buffers
        for index in micro:
            traced = replayer.trace(index, backward=False)
            assert traced.ran.loss is not None
            maker = traced.maker_of(traced.ran.loss)
            behind = [] if maker is None else list(ancestors(maker))
            first = [call for call in behind if call.first_bad]
            if not first or any(call.out.nan for call in behind):
                return False
            if not all(call.adds_up for call in first):
                return False
    return True


def summed_in_half_precision(root: Tensor) -> bool:
    """Is the loss the result of a sum in float16, by the nodes that its backward begins with?"""
    waiting = [root.grad_fn]
    for _ in range(MOST_NODES):
        if not waiting:
            break
        node = waiting.pop()
        if node is None:
            continue
        kind = node.name().rstrip("0123456789")
        if kind in SUM_NODES:
            made = node._input_metadata[0].dtype
            if made is torch.float16:
                return True
        elif kind.removesuffix("Backward") in PASSED:
            waiting += [below for below, _ in node.next_functions]
    return False
