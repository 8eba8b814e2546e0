"""Locate bad values that the optimizer makes from finite gradients, and norms that overflow.

The update is called from this file: its frames mark where the user's optimizer begins, see
`source`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from stepguard.locate import evidence, samples
from stepguard.locate import replay_state as batches
from stepguard.locate.blame import FirstBad, blame_loss
from stepguard.locate.live_trace import line_of, origin_of
from stepguard.locate.operands import COPIES, Call, ancestors, summarise, unravel
from stepguard.locate.replay import (
    ModelReplayer,
    Replayer,
    ReplayError,
    kept_loss_function_state,
)
from stepguard.locate.replay_state import clock_for
from stepguard.locate.source import Line, ModuleSpans, in_library, is_users, with_source
from stepguard.locate.tracer import Tracer
from stepguard.records.incident import (
    NO_EVIDENCE,
    Evidence,
    Origin,
    Phase,
    Reading,
    with_evidence,
)
from stepguard.sentinel.gradients import scale_gradients
from stepguard.state.batch import Step, total_loss
from stepguard.state.isolation import untouched
from stepguard.state.rng import restore_rng
from stepguard.tensors.names import (
    is_distributed,
    named_modules,
    named_parameters,
    names_by_id,
    optimizer_parameters,
)
from stepguard.tensors.torch_private import TorchDispatchMode, tree_flatten
from stepguard.tensors.values import is_finite, local_part

# --- Locate bad values that the optimizer makes from finite gradients, and norms that overflow.


Gradients = dict[int, Tensor]


def update_origin(step: Step, reading: Reading) -> Origin:
    """Run the update again on copies of parameters, gradients and optimizer state."""
    origin = Origin(
        step=reading.step,
        phase="optimizer",
        tensor=reading.bad_state[0] if reading.bad_state else None,
        method="evidence",
        evidence=_learning_rate(reading),
    )
    gradients = _gradients(step)
    if not gradients:
        return origin
    twin = _Twin(step, gradients)
    twin.clip(step.clip_norm, reading.clip_factor if step.sharded else None)
    tracer = Tracer(ModuleSpans({}), stage="optimizer")
    for stored in twin.tensors():
        tracer.store(stored.name, stored.tensor)
    try:
        with torch.no_grad(), tracer:
            twin.optimizer.step()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:200]
        origin = with_evidence(origin, Evidence(replay_error=failure))
        return replace(origin, remarks=(f"the replay failed: {failure}",))
    return _of_traced_update(replace(origin, method="replay"), tracer, twin)


def _of_traced_update(origin: Origin, tracer: Tracer, twin: _Twin) -> Origin:
    # The first operation that made a bad value, and the tensor that it ended in.
    found: list[tuple[Call, _Updated]] = []
    bad = [updated for updated in twin.tensors() if not is_finite(updated.tensor)]
    for updated in bad:
        maker = tracer.maker_of(updated.tensor)
        if maker is not None:
            found += [(call, updated) for call in ancestors(maker) if call.first_bad]
    if not found and bad:
        # a kernel wrote it that is no operation of torch's
        name = f"{type(twin.optimizer).__name__}.step"
        origin = with_evidence(origin, Evidence(opaque="code"))
        return replace(origin, op=name, tensor=bad[0].name, reproduced=True)
    if not found:
        return replace(origin, reproduced=False)
    call, updated = min(found, key=lambda pair: pair[0].index)
    if call.stage == "stored":
        return replace(origin, phase="state", tensor=call.op, reproduced=True)
    return replace(
        with_source(origin, line_of(call, tracer)),
        op=call.op,
        tensor=updated.name,
        inputs=call.inputs,
        output=call.output,
        reproduced=True,
        evidence=call.evidence | origin.evidence | _epsilon(twin.optimizer, updated.parameter),
    )


def _epsilon(optimizer: Optimizer, parameter: Tensor) -> Evidence:
    """Say whether the group's epsilon is 0 in the parameter's dtype."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and any(p is parameter for p in group["params"]):
            rounded = float(torch.tensor(eps, dtype=parameter.dtype))
            return Evidence(eps=eps, eps_underflow=eps > 0 and rounded == 0.0)
    return NO_EVIDENCE


@dataclass(frozen=True, slots=True)
class _Updated:
    """A parameter of the copied optimizer, or a slot of its state."""

    name: str
    tensor: Tensor
    parameter: Tensor


class _Twin:
    """An independent optimizer on copied parameters, gradients and state, without any hooks."""

    def __init__(self, step: Step, gradients: Gradients) -> None:
        # What a deep copy finds here it takes for the copy: for sharded tensors a copy of what this
        # rank holds of them, since no other rank joins what this one computes.
        memo: dict[int, Any] = {}
        originals = optimizer_parameters(step.optimizer)
        for parameter in originals:
            if is_distributed(parameter):
                memo[id(parameter)] = nn.Parameter(local_part(parameter.detach()).clone())
            for value in step.optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and is_distributed(value):
                    memo[id(value)] = local_part(value.detach()).clone()
        self.optimizer = copy.deepcopy(step.optimizer, memo)
        # A deep copy of a torch optimizer carries groups, state and defaults only, not what its
        # author put on `self`.
        for name, value in vars(step.optimizer).items():
            if name in vars(self.optimizer) or callable(value):
                continue
            # What cannot be copied is missed only if the update needs it: the replay says so then.
            with suppress(TypeError, RuntimeError):
                setattr(self.optimizer, name, copy.deepcopy(value, memo))
        self._parameters = optimizer_parameters(self.optimizer)
        self._names: list[str] = []
        names = names_by_id(named_parameters(step.named_roots()))
        for parameter, original in zip(self._parameters, originals, strict=True):
            gradient = gradients.get(id(original))
            parameter.grad = None if gradient is None else gradient.detach().clone()
            self._names.append(names.get(id(original), ""))

    def clip(self, limit: float | None, factor: float | None = None) -> None:
        """Clip the gradients as the step did. `factor`: what sharded ones were multiplied by."""
        if factor is not None:
            scale_gradients(self._parameters, factor)
        elif limit is not None and any(p.grad is not None for p in self._parameters):
            clip_grad_norm_(self._parameters, limit)

    def tensors(self) -> Iterator[_Updated]:
        """Yield every parameter, then every slot of the optimizer's state."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            yield _Updated(f"param:{name}", parameter, parameter)
        for parameter in self._parameters:
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield _Updated(f"opt:{slot}", value, parameter)


def norm_origin(step: Step, reading: Reading) -> Origin:
    """Name the operation that overflows in the norm of finite gradients."""
    origin = Origin(
        step=reading.step,
        phase="optimizer",
        op="aten._foreach_norm",
        method="evidence",
        evidence=_learning_rate(reading),
    )
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
    position = unravel(int(largest.detach().abs().argmax()), tuple(largest.shape))
    shown = summarise("grad", largest, position)
    return replace(origin, inputs=(shown,), method="replay", reproduced=reproduced)


def divergence_origin(step: Step, reading: Reading) -> Origin:
    """Blame the update as a whole: everything is finite, and yet the run is being lost."""
    evidence = _learning_rate(reading) | Evidence(repeat_loss=reading.repeat_loss)
    return Origin(step=reading.step, phase="optimizer", method="evidence", evidence=evidence)


def _learning_rate(reading: Reading) -> Evidence:
    return Evidence(lr=max(reading.lr, default=None))


def _gradients(step: Step) -> Gradients:
    """Return the gradients that are there, else those of a replay (unscaled), by parameter."""
    present = _present_gradients(step)
    if present or not step.replayable or not step.rng:
        return present
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
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


Attempt = Callable[[Any], object]
"""Runs one micro-batch as far as the step came, and raises what the user's code raises."""
GRACE = 0.3
"""Seconds that locating may take however short the step is."""
CHECKS = ("aten._linalg_check_errors", "aten._assert_async")
"""Operations that only test the result of the operation before them."""
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
    origin: Origin, error: Exception, step: Step, micro: int, attempt: Attempt, budget: float
) -> Origin:
    """Run the micro-batch again; name the operation that raises and the samples that make it.

    `budget`: how long that may take, in runs of this micro-batch.
    """
    origin = replace(origin, method="replay", micro_batch=micro)
    batch = step.micro_batches[micro]
    parameters = optimizer_parameters(step.optimizer)
    clock = clock_for(on_host=all(p.device.type == "cpu" for p in parameters))
    count = batches.sample_count(batch)

    def raises(part: Any) -> bool | None:
        """True if it raises the same type; None if another, so that nothing can be said."""
        keeper.restore()
        step.buffers.restore()
        restore_rng(step.rng[micro])
        try:
            with torch.compiler.set_stance("force_eager"):
                attempt(batches.duplicate(part))
        except Exception as again:
            if type(again) is type(error):
                return True
            return None
        finally:
            for parameter in parameters:
                parameter.grad = None
        return False

    def bad_with(keep: Sequence[int]) -> bool | None:
        if not keep or clock() > deadline:
            return None
        return raises(batches.subset(batch, list(keep), count))

    with untouched(step) as keeper:
        began = clock()
        operations = _FailedOperation()
        with operations:
            again = raises(batch)
        if again is not True:
            return replace(origin, reproduced=False)
        deadline = clock() + (budget - 1.0) * (clock() - began) + GRACE
        guilty = samples.guilty_samples(count, bad_with) or ()
    return replace(origin, reproduced=True, op=operations.failed, samples=guilty)


def place_replayed_exception(step: Step) -> Origin:
    """Run a step from a capsule that raised when it was recorded; locate what it raises now."""
    for micro in range(len(step.micro_batches)):
        attempt = whole_attempt(step, Origin(step=step.index, phase="backward"))
        try:
            with untouched(step):
                step.buffers.restore()
                restore_rng(step.rng[micro])
                attempt(batches.duplicate(step.micro_batches[micro]))
        except Exception as error:
            origin = traceback_origin(error, step.index, step.named_roots())
            return place_exception(
                origin, error, step, micro, whole_attempt(step, origin), math.inf
            )
    return Origin(step=step.index, phase="loss", method="replay", reproduced=False)


def whole_attempt(step: Step, origin: Origin) -> Attempt:
    """Run the user's loss function, and its backward where that is what raised."""

    def attempt(batch: Any) -> None:
        assert step.loss_fn is not None
        loss = total_loss(step.loss_fn(batch))
        if origin.phase == "backward":
            if step.scale != 1.0:
                loss = loss * step.scale
            torch.autograd.backward(loss)

    return attempt


class _FailedOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the operation that raised."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: str | None = None
        self._before: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            if self.failed is None:
                self.failed = self._before if name in CHECKS else name
            raise
        # Autograd detaches what it saves: that is not what a test is about.
        if name not in COPIES:
            self._before = name
        return out


# --- Locate the operation of the forward that made a buffer non-finite, under a finite loss.


def buffer_origin(step: Step, reading: Reading, no_replay: str | None = None) -> Origin:
    """Name the operation that wrote the bad value into the first bad buffer.

    `no_replay`: why the step cannot be run again; then the buffer's name is all that is known.
    """
    name = reading.bad_state[0]
    unlocated = Origin(
        step=reading.step,
        phase="forward",
        module=evidence.owner_of(name),
        tensor=name,
        method="scan",
    )
    if no_replay is not None:
        remark = f"the step could not be run again: {no_replay}"
        return replace(unlocated, evidence=Evidence(no_replay=no_replay), remarks=(remark,))
    with untouched(step) as keeper:
        # under `watch` only the calls of the model can be run again
        replayer = ModelReplayer(step, keeper) if step.model_only else Replayer(step, keeper)
        for micro in range(len(step.micro_batches)):
            try:
                traced = replayer.trace(micro, backward=False)
            except ReplayError:
                return unlocated
            buffer = evidence.stored_tensor(step, name)
            if buffer is not None and not is_finite(buffer):
                maker = traced.tracer.maker_of(buffer)
                found = None
                if maker is not None and maker.out and maker.stage != "stored":
                    found = blame_loss(traced.tracer, [maker])
                else:
                    # Norm layers update their statistics inside the kernel: no operation of the
                    # trace writes the buffer, but the layer's operation is handed it.
                    for call in traced.tracer.calls:
                        if any(p.stage == "stored" and p.op == name for p in call.parents):
                            found = FirstBad(call)
                origin = unlocated
                if found is not None:
                    origin = origin_of(found, traced, replayer)
                return replace(origin, tensor=name, output=summarise(name, buffer))
    return replace(unlocated, reproduced=False)


# --- Is a loss infinite only because finite values were too many or too large to be added up?


SUMS = frozenset({"sum", "mean", "dot", "nansum", "linalg_vector_norm", "norm"})
LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that make one value of each element before they add: `reduction` is an argument."""
SUM_NODES = frozenset(
    {"SumBackward", "MeanBackward", "DotBackward", "MseLossBackward", "L1LossBackward"}
    | {"SmoothL1LossBackward", "HuberLossBackward", "LinalgVectorNormBackward", "NormBackward"}
)
PASSED = frozenset({"Mul", "Div", "Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Reshape"})
"""Nodes behind a sum that may still belong to the loss: weights, means, casts."""
MOST_NODES = 16


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows infinities that sums of finite values have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[Tensor] = []

    def made(self, tensor: Tensor) -> bool:
        return any(tensor is one for one in self._made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = list(_floats((args, kwargs)))
        rest = [tensor for tensor in given if not self.made(tensor)]
        adds = name in SUMS or name in LOSSES
        if name in ("add", "add_") and len(given) > 1:
            # terms of a loss are scalars; `+=` writes into its first operand, so it is read before
            adds = max(t.numel() for t in given) == 1
        follows = (adds or len(rest) < len(given)) and all(map(is_finite, rest))
        out = func(*args, **kwargs)
        for tensor in _floats(out) if follows else ():
            infinite = not is_finite(tensor) and not bool(tensor.isnan().any())
            if infinite and _elements_finite(func, args, kwargs):
                self._made.append(tensor)
        return out


def _elements_finite(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Of a loss that makes elements by itself: are they finite before they are added?"""
    if func.overloadpacket.__name__ not in LOSSES:
        return True
    unreduced = {key: value for key, value in kwargs.items() if key != "reduction"}
    return is_finite(func(*args[:2], 0, *args[3:], **unreduced))


def _floats(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def overflowed_in_replay(step: Step, micro: Sequence[int]) -> bool:
    """Run the forward of these micro-batches again: is each loss infinite by a sum alone?"""
    assert step.loss_fn is not None
    with untouched(step), kept_loss_function_state(step):
        step.buffers.restore()
        for index in range(max(micro) + 1):
            restore_rng(step.rng[index])
            with _Sums() as sums:
                loss = total_loss(step.loss_fn(step.micro_batches[index]))
            if index in micro and not sums.made(loss):
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
