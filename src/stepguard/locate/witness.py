"""Run one kernel again on the inputs it had, by other paths: is the kernel at fault, or the inputs?

Torch shows nothing of what happens inside a kernel, so its boundary is where a bad value
originates. A witness is another way to the same result: a reference that the user registered,
attention as matrix products, torch's decomposition of a fused operation, the CPU, a wider dtype,
contiguous inputs, the optimizer's loop. A path counts only where it computes the same as the kernel
on the elements that the kernel got right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stepguard.locate.evidence import WIDER, Invocation
from stepguard.locate.operands import Call, numeric, plain, reach, summarise, tensors_in
from stepguard.locate.replay import Replayer, ReplayError
from stepguard.locate.tracer import FunctionCall
from stepguard.records.incident import Evidence, Origin, Witness, WitnessPath, with_evidence
from stepguard.tensors.names import named_modules
from stepguard.tensors.torch_private import (
    COMPILED_CALL,
    compiled_call,
    decomposition_of,
    observe_functions,
    tree_map,
)
from stepguard.tensors.values import dtype_name, is_finite

# --- Functions that compute the same as a kernel.


REFERENCES: dict[Any, Callable[..., Any]] = {}


def register_reference(kernel: Any, reference: Callable[..., Any]) -> None:
    """Say which function computes the same as a kernel, to compare them where the kernel fails.

    `kernel` is a `torch.autograd.Function`, an operator of `torch.library`, or the operator's name
    `namespace::name`. `reference` takes the same arguments and uses plain torch operations. It is
    called only at an incident, on the inputs of the call that returned NaN or Inf:

        stepguard.register_reference(FusedNorm, lambda x, weight: rms_norm(x) * weight)
    """
    if not callable(reference):
        raise TypeError(f"reference is {reference!r}, which is not a function")
    name = _key(kernel)
    if isinstance(name, str) and "::" not in name:
        raise TypeError(f"kernel is {kernel!r}; it must be an autograd function or an operator")
    REFERENCES[name] = reference


def _key(kernel: Any) -> Any:
    """An autograd function is known by its class, an operator by `namespace::name`."""
    if isinstance(kernel, type) and issubclass(kernel, torch.autograd.Function):
        return kernel
    schema = getattr(kernel, "_schema", None)
    if schema is not None:
        return schema.name
    # torch.library returns a CustomOpDef, torch.ops a packet
    named = getattr(kernel, "_qualname", None) or getattr(kernel, "_qualified_op_name", None)
    return named or str(kernel)


# --- One kernel, and the ways to run it again.


Results = list[Tensor | None]
Change = Callable[[Tensor], Tensor]
Path = tuple[WitnessPath, str, Callable[[], Results]]
"""Kind, name in words, and what runs it."""
ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
"""How torch's fused attention kernels begin."""
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linear", "mv", "dot")
"""Operations that multiply and add: finite in a wider dtype whatever the inputs are."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class Kernel:
    """One call of a kernel. Every run works on copies of the inputs."""

    run: Callable[[Change], Results]
    """The kernel itself: what it returned, or the gradients of its inputs."""
    inputs: list[Tensor]
    """Tensors of floating point that went in."""
    independent: list[Path]
    """Paths that share no code with the kernel."""
    foreign: bool = True
    """A kernel from outside torch."""
    forward: Callable[[Sequence[Any]], Any] | None = None
    """In the backward of a custom function: its forward."""
    given: tuple[Any, ...] = ()
    """What that forward was given."""
    gradients: tuple[Any, ...] = ()
    """What came into the backward."""


def _copies(value: Any, change: Change = _same) -> Any:
    """Copy all tensors in a value, and change those of floating point."""

    def one(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        made = item.detach().clone()
        made = change(made) if numeric(made) else made
        return made.requires_grad_(item.requires_grad)

    return tree_map(one, value)


def _results(value: Any) -> Results:
    if isinstance(value, list | tuple):
        return [one for item in value for one in _results(item)]
    return [value if isinstance(value, Tensor) else None]


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu()


def _of_operator(bad_op: Invocation) -> Kernel:
    operator, func = bad_op.operator, bad_op.func
    base = operator.base

    def call(function: Callable[..., Any], change: Change = _same) -> Results:
        args, kwargs = _copies((bad_op.args, bad_op.kwargs), change)
        with torch.no_grad():
            made = _results(function(*args, **kwargs))
        named = dict(zip(operator.arguments, args, strict=False)) | kwargs
        return _results([named[name] for name in sorted(operator.written & named.keys())]) + made

    independent: list[Path] = []
    reference = REFERENCES.get(func._schema.name)
    if reference is not None:
        independent.append(("reference", _called(reference), lambda: call(reference)))
    if base.startswith(ATTENTION):
        independent.append(("math", "math", lambda: _attention(bad_op)))
    elif base in PRODUCTS and _cannot_overflow(bad_op):
        wide = WIDER.get(bad_op.out.dtype, torch.float64)
        name = f"the product in {dtype_name(wide)}"
        independent.append(("composite", name, lambda: call(func, lambda one: one.to(wide))))
    elif not operator.custom and torch.Tag.nondeterministic_seeded not in func.tags:
        composite = decomposition_of(func)
        if composite is not None:
            name = "torch's decomposition of it"
            independent.append(("composite", name, lambda: call(composite)))
    if bad_op.out.device.type != "cpu":
        independent.append(("cpu", "the CPU kernel", lambda: call(func, _to_cpu)))
    return Kernel(
        run=lambda change: call(func, change),
        inputs=[read.tensor for read in bad_op.reads if numeric(read.tensor)],
        independent=independent,
        foreign=operator.custom,
    )


def _called(function: Any) -> str:
    return f"the reference `{getattr(function, '__name__', type(function).__name__)}`"


def _cannot_overflow(bad_op: Invocation) -> bool:
    """No partial sum of products can leave the range, so that only the kernel can."""
    sizes = sorted(reach(read.tensor) for read in bad_op.reads if numeric(read.tensor))
    terms = max(read.tensor.numel() for read in bad_op.reads)
    # products of half precision are added up in float32
    wide = torch.promote_types(bad_op.out.dtype, torch.float32)
    return len(sizes) > 1 and sizes[-1] * max(sizes[-2], 1.0) * terms < torch.finfo(wide).max


def _attention(bad_op: Invocation) -> Results:
    """The attention, or its gradients, as two products and a softmax."""
    backward = bad_op.operator.base.endswith("backward")
    names = ("query", "key", "value")
    query, key, value = (
        bad_op.argument(name).detach().clone().requires_grad_(backward) for name in names
    )
    mask = bad_op.argument("attn_mask")
    mask = bad_op.argument("attn_bias") if mask is None else mask
    if isinstance(mask, Tensor):
        mask = mask.detach()
    with sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(backward):
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=bool(bad_op.argument("is_causal")),
            scale=bad_op.argument("scale"),
            enable_gqa=query.dim() == 4 and query.shape[1] != key.shape[1],
        )
    if not backward:
        return [out]
    return list(torch.autograd.grad(out, (query, key, value), bad_op.args[0].detach()))


def _of_function(call: FunctionCall, caught: _Caught) -> Kernel:
    given, backward = caught.given, call.gradients is not None

    def run(function: Callable[..., Any], change: Change = _same) -> Results:
        args, gradients = _copies((given, call.gradients), change)
        inputs = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
        with caught.autocast(), torch.enable_grad():
            # copies of the copies: a function may write a tensor that is no leaf in place
            handed = [one.clone() if isinstance(one, Tensor) else one for one in args]
            made = [one for one in _results(function(*handed)) if one is not None]
            if not backward:
                return [one.detach() for one in made]
            pairs = []
            for one, gradient in zip(made, gradients, strict=True):
                if one.requires_grad and gradient is not None:
                    pairs.append((one, gradient.detach().to(one.dtype)))
            outputs, gradients = zip(*pairs, strict=True)
            return list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))

    independent: list[Path] = []
    reference = REFERENCES.get(call.cls)
    if reference is not None:
        independent.append(("reference", _called(reference), lambda: run(reference)))
    tensors = [one for one in (*given, *(call.gradients or ())) if numeric(one)]
    if any(one.device.type != "cpu" for one in tensors):
        independent.append(("cpu", "the function on the CPU", lambda: run(call.cls.apply, _to_cpu)))
    return Kernel(
        run=lambda change: run(call.cls.apply, change),
        inputs=tensors,
        independent=independent,
        forward=call.cls.apply if backward else None,
        given=given,
        gradients=call.gradients or (),
    )


@dataclass(slots=True)
class _Caught:
    """What a custom function was given, in copies."""

    given: tuple[Any, ...]
    half: torch.dtype | None
    """What autocast computed in."""
    device: str

    def autocast(self) -> Any:
        if self.half is None:
            return nullcontext()
        return torch.autocast(self.device, self.half)


@contextmanager
def _catching(wanted: FunctionCall) -> Iterator[list[_Caught]]:
    """Copy what this call of a custom function is given, when it is run again."""
    found: list[_Caught] = []
    count = 0

    def around(cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        nonlocal count
        # a generated function of torch.library is another class each time
        if count == wanted.number and cls.__name__ == wanted.cls.__name__:
            devices = [one.device.type for one in args if isinstance(one, Tensor)]
            device = devices[0] if devices else "cpu"
            on = torch.is_autocast_enabled(device)
            half = torch.get_autocast_dtype(device) if on else None
            found.append(_Caught(_copies(args), half, device))
        count += 1
        return apply(*args, **kwargs)

    undo = observe_functions(around)
    try:
        yield found
    finally:
        undo()


# --- Ask the witnesses.


CLOSE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative difference up to which two paths compute the same; of other dtypes `CLOSE_IN_FLOAT`."""
CLOSE_IN_FLOAT = 1e-3
MOST_DIFFERENT = 0.1
"""Share of elements that may differ: memory that a kernel never wrote can hold any number."""
STEP = 1e-2
"""Relative change of an input with which the slope of a forward is measured."""
SLOPES = 0.1
"""How far two slopes of a smooth function may be apart, relative."""
MOST_WORDS = 100
NOT_FOUND = "the call could not be found again in a second run"
NO_PATH = "no other way to compute it is known: `stepguard.register_reference` names one"
SINGULAR = "its own forward has no slope there"


def with_witnesses(origin: Origin, call: Call, replayer: Replayer) -> Origin:
    """Add what other paths give on the inputs of the kernel that made the first bad value."""
    kernel = call.kernel
    if kernel is None:
        return origin
    if not replayer.budget.affords(1.0):
        replayer.budget.leave_out("running the kernel by another path")
        return origin
    if isinstance(kernel, Invocation):
        if not _all_finite([read.tensor for read in kernel.reads]):
            return origin
        found = _ask(_of_operator(kernel), origin, replayer)
        known = call.evidence.opaque or kernel.operator.base.startswith(ATTENTION)
    else:
        caught = _inputs_of(kernel, call, origin.micro_batch or 0, replayer)
        if caught is None:
            return with_evidence(origin, Evidence(witnesses=(_untried(NOT_FOUND),)))
        if not _all_finite([*caught.given, *(kernel.gradients or ())]):
            return origin
        found, known = _ask(_of_function(kernel, caught), origin, replayer), True
    if not known and not any(one.finite for one in found):
        # an ordinary operation: its rule says more than that other kernels agree with it
        return origin
    return with_evidence(origin, Evidence(witnesses=tuple(found)))


def _all_finite(values: Sequence[Any]) -> bool:
    return all(is_finite(one) for one in values if numeric(one))


def _untried(why: str) -> Witness:
    return Witness(path="reference", name="a reference", why_not=why)


def _inputs_of(kernel: FunctionCall, call: Call, micro: int, replayer: Replayer) -> _Caught | None:
    replayer.clear_gradients()
    # a checkpointed block calls its functions again in the backward
    backward = call.evidence.recomputed or kernel.gradients is not None
    with _catching(kernel) as found:
        try:
            replayer.run(micro, backward=backward)
        except ReplayError:
            return None
        finally:
            replayer.clear_gradients()
    return found[0] if found else None


def _ask(kernel: Kernel, origin: Origin, replayer: Replayer) -> list[Witness]:
    # the kernel itself first: what it gives is what the others are compared with
    own = _attempt(lambda: kernel.run(_same))
    if isinstance(own, str):
        return [Witness(path="again", name="the same kernel once more", why_not=own)]
    found: list[Witness] = []
    if all(one is None or is_finite(one) for one in own):
        value = _at(own, _first_bad(own, origin))
        found.append(
            Witness(path="again", name="the same kernel once more", finite=True, value=value)
        )
    paths = [*kernel.independent]
    if kernel.foreign:
        paths += _same_code(kernel)
    for path, name, run in paths:
        if not replayer.budget.affords(0.0):
            found.append(Witness(path=path, name=name, why_not="locate_budget is used up"))
        else:
            found.append(_compared(path, name, run, own, origin))
    if kernel.forward is not None and replayer.budget.affords(0.0):
        found += _slopes(kernel, own)
    if kernel.foreign and not kernel.independent:
        found.append(_untried(NO_PATH))
    return found


def _same_code(kernel: Kernel) -> list[Path]:
    """The kernel itself with other inputs: a fault that goes away shows what it cannot take."""
    paths: list[Path] = []
    if any(not one.is_contiguous() for one in kernel.inputs):
        contiguous = lambda: kernel.run(Tensor.contiguous)  # noqa: E731
        paths.append(("contiguous", "the same kernel on contiguous copies", contiguous))
    kinds = {one.dtype for one in kernel.inputs}
    on_host = all(one.device.type == "cpu" for one in kernel.inputs)
    # on a device a kernel that does not check the dtype could end the process
    if len(kinds) == 1 and on_host:
        wide = WIDER.get(kinds.pop())
        if wide is not None:
            name = f"the same kernel in {dtype_name(wide)}"
            paths.append(("wider", name, lambda: kernel.run(lambda one: one.to(wide))))
    return paths


def _attempt(run: Callable[[], Results]) -> Results | str:
    """What a path gives, or why it cannot be run."""
    try:
        return run()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS]


def _compared(
    path: WitnessPath, name: str, run: Callable[[], Results], own: Results, origin: Origin
) -> Witness:
    given = _attempt(run)
    if isinstance(given, str):
        return Witness(path=path, name=name, why_not=given)
    pairs = []
    for position, (mine, other) in enumerate(zip(own, given, strict=False)):
        if mine is not None and other is not None and numeric(mine) and mine.numel():
            if mine.shape != other.shape:
                why = f"its result {position} has shape {tuple(other.shape)}"
                return Witness(path=path, name=name, why_not=why)
            # beyond the range of the kernel's dtype the value itself is the fault
            pairs.append((plain(mine).cpu(), plain(other).cpu().to(plain(mine).dtype)))
    if not pairs:
        return Witness(path=path, name=name, why_not="it returned nothing to compare")
    place = _first_bad([mine for mine, _ in pairs], origin)
    return Witness(
        path=path,
        name=name,
        finite=all(is_finite(other) for _, other in pairs),
        value=_at([other for _, other in pairs], place),
        agrees=_agrees(pairs),
    )


def first_bad_value(own: list[Tensor], other: list[Tensor]) -> tuple[float | None, bool | None]:
    """What the other has at the first bad element, and whether the two agree elsewhere."""
    pairs = []
    for mine, theirs in zip(own, other, strict=False):
        if numeric(mine) and mine.shape == theirs.shape and mine.numel():
            pairs.append((plain(mine), plain(theirs)))
    for mine, theirs in pairs:
        if not is_finite(mine):
            bad = ~mine.isfinite().flatten()
            return float(theirs.flatten()[bad][0]), _agrees(pairs)
    return None, _agrees(pairs)


def _agrees(pairs: list[tuple[Tensor, Tensor]]) -> bool | None:
    """Compare the values where both are finite; None where there is no such element."""
    compared = different = 0
    for mine, other in pairs:
        both = mine.isfinite() & other.isfinite()
        if bool(both.any()):
            one, two = mine[both].double(), other[both].double()
            usual = CLOSE.get(mine.dtype, CLOSE_IN_FLOAT) * (two.abs() + two.abs().mean())
            different += int(((one - two).abs() > usual).sum())
            compared += one.numel()
    return different <= MOST_DIFFERENT * compared if compared else None


def _first_bad(results: Results, origin: Origin) -> tuple[int, int]:
    """Which result, and which of its elements: the first bad one, or where it was in the step."""
    for position, one in enumerate(results):
        if one is not None and numeric(one) and not is_finite(one):
            bad = ~plain(one).isfinite().flatten()
            return position, int(bad.nonzero()[0])
    out = origin.output
    for position, one in enumerate(results):
        if one is not None and out is not None and out.index and tuple(one.shape) == out.shape:
            flat = 0
            for size, index in zip(out.shape, out.index, strict=True):
                flat = flat * size + index
            return position, flat
    return 0, 0


def _at(results: Results, place: tuple[int, int]) -> float | None:
    one = results[place[0]] if place[0] < len(results) else None
    if one is None or one.numel() <= place[1]:
        return None
    return float(plain(one).flatten()[place[1]])


# --- Of a backward: the slope of its own forward, by small differences.


def _slopes(kernel: Kernel, own: Results) -> list[Witness]:
    """Compare the first bad gradient with how the forward changes when that input does.

    A slope that differs from side to side, or grows as the step shrinks, is no slope: then the
    inputs are at a singular point. A gradient that is meant to be another (straight through) shows
    by a good element.
    """
    name = "the slope of its own forward"
    inputs = [one for one in kernel.given if isinstance(one, Tensor) and one.requires_grad]
    position, flat = _first_bad(own, Origin(step=0, phase="backward"))
    if position >= len(inputs) or own[position] is None:
        return []
    gradient = plain(own[position]).flatten()  # type: ignore[arg-type]
    if gradient.isfinite()[flat]:
        return []
    try:
        slope = _slope(kernel, inputs[position], flat)
        good = (gradient.isfinite() & (gradient != 0)).nonzero().flatten().tolist()
        agrees = None
        if good and slope is not None:
            there = _slope(kernel, inputs[position], good[0])
            wanted = float(gradient[good[0]])
            agrees = there is not None and math.isclose(there, wanted, rel_tol=SLOPES)
    except Exception as error:
        return [Witness(path="slope", name=name, why_not=str(error)[:MOST_WORDS])]
    if slope is None:
        return [Witness(path="slope", name=name, finite=False, why_not=SINGULAR)]
    return [Witness(path="slope", name=name, finite=True, value=slope, agrees=agrees)]


def _slope(kernel: Kernel, tensor: Tensor, flat: int) -> float | None:
    """How the incoming gradient times the outputs changes with this element; None: no slope."""
    assert kernel.forward is not None
    usual = float(plain(tensor).double().square().mean().sqrt())
    width = STEP * max(abs(float(tensor.detach().flatten()[flat])), usual, 1e-6)
    total = 0.0

    def moved(by: float) -> float:
        nonlocal total

        def shift(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            made = item.detach().clone()
            if item is tensor:
                made.view(-1)[flat] += by
            return made

        assert kernel.forward is not None
        with torch.no_grad():
            made = _results(kernel.forward(*tree_map(shift, kernel.given)))
        value = total = 0.0
        for one, gradient in zip(made, kernel.gradients, strict=False):
            if one is not None and gradient is not None and numeric(one):
                product = plain(one).double() * plain(gradient).double()
                value += float(product.sum())
                total += float(product.abs().sum())
        return value

    here = moved(0.0)
    noise = 16 * torch.finfo(tensor.dtype).eps * total
    slopes = [(moved(by) - here) / by for by in (width, -width, width / 2, -width / 2)]
    if not all(map(math.isfinite, slopes)):
        return None
    if max(slopes) - min(slopes) > SLOPES * max(map(abs, slopes)) + noise / (width / 2):
        return None
    return sum(slopes) / len(slopes)


# --- A fault that only compiled code shows: which region, and what it gives when run eagerly.
#
# Nothing inside a compiled region can be traced as it runs, so its boundary is watched: the first
# region whose inputs are finite and whose outputs, or gradients, are not. The same region run
# eagerly on the same inputs is the witness.

WHAT_RAN = "torch.compile"


@dataclass(slots=True)
class _Call:
    """One call of a compiled region."""

    name: str
    module: nn.Module
    below: Callable[..., Any]
    given: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    came_in: list[Tensor] = field(default_factory=list)
    """Gradients of the outputs."""
    went_out: list[Tensor] = field(default_factory=list)
    """Gradients of the inputs."""


def locate_region(replayer: Replayer, micro: int, origin: Origin) -> Origin:
    """Run the compiled micro-batch again; the origin at the first region that is to blame.

    Unchanged where no region is: the loss function itself is compiled, or a part of a region that
    an earlier one has spoiled.
    """
    replayer.clear_gradients()
    with _watched(replayer) as calls:
        ran = replayer.run(micro, eager=False)
    try:
        found = _guilty_forward(calls) if not ran.loss_finite else _guilty_backward(calls)
        if found is None:
            return origin
        backward = ran.loss_finite
        read = found.came_in if backward else found.inputs
        bad = [one for one in (found.went_out if backward else found.outputs) if not _fine([one])]
        origin = replace(
            origin,
            phase="backward" if backward else "forward",
            module=found.name,
            op=WHAT_RAN,
            micro_batch=micro,
            inputs=tuple(summarise(f"input {n}", one) for n, one in enumerate(read[:6])),
            output=summarise("out", bad[0]) if bad else None,
        )
        if backward:
            return origin
        return with_evidence(origin, Evidence(witnesses=(_eagerly(found),)))
    finally:
        replayer.clear_gradients()


def _guilty_forward(calls: list[_Call]) -> _Call | None:
    for call in calls:
        if _fine(call.inputs) and not _fine(call.outputs):
            return call
    return None


def _guilty_backward(calls: list[_Call]) -> _Call | None:
    for call in reversed(calls):
        gradients = [one.grad for one in call.module.parameters() if one.grad is not None]
        if call.came_in and _fine(call.came_in) and not _fine([*call.went_out, *gradients]):
            return call
    return None


def _fine(tensors: list[Tensor]) -> bool:
    return all(is_finite(one) for one in tensors if numeric(one))


def _eagerly(call: _Call) -> Witness:
    """The region without the compiler, on the inputs it had."""
    name = f"`{call.name or 'the model'}` run eagerly"
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            args, kwargs = call.given
            outputs = tensors_in(call.below(*args, **kwargs))
    except Exception as error:
        return Witness(path="eager", name=name, why_not=f"{type(error).__name__}: {error}"[:100])
    value, agrees = first_bad_value(call.outputs, outputs)
    return Witness(path="eager", name=name, finite=_fine(outputs), value=value, agrees=agrees)


@contextmanager
def _watched(replayer: Replayer) -> Iterator[list[_Call]]:
    """Note what goes in and out of every compiled region."""
    calls: list[_Call] = []
    undo: list[Callable[[], None]] = []
    step = replayer.step
    # the roots of a step are what is inside the compiled wrappers
    wrappers = [("", step.model), *step.modules.items()]
    for name, module in (*wrappers, *named_modules(step.named_roots())):
        spaces = vars(module)
        if "_orig_mod" in module._modules:
            key = "forward"
        elif _compiled_in_place(module):
            key = COMPILED_CALL
        else:
            continue
        if isinstance(spaces[key], _Boundary):
            continue
        below = spaces[key]
        # not by setattr, which a compiled module passes on to the module inside
        spaces[key] = _Boundary(calls, name.replace("_orig_mod", "").strip("."), module, below)
        undo.append(partial(spaces.__setitem__, key, below))
    try:
        yield calls
    finally:
        for one in reversed(undo):
            one()


def _compiled_in_place(module: nn.Module) -> bool:
    """After `module.compile()`; a guard that listens to calls stands in the same place."""
    present = compiled_call(module)
    return present is not None and getattr(present, "below", present) is not None


class _Boundary:
    """Stands in the place of a compiled call, and notes what passes."""

    def __init__(
        self, calls: list[_Call], name: str, module: nn.Module, below: Callable[..., Any]
    ) -> None:
        self._calls = calls
        self._name = name
        self._module = module
        self._below = below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def copy(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) else value

        given = tree_map(copy, (args, kwargs))
        result = self._below(*args, **kwargs)
        outputs = tensors_in(result)
        copies = [one.detach() for one in outputs]
        call = _Call(self._name, self._module, self._below, given, tensors_in(given), copies)
        self._calls.append(call)
        for tensors, seen in ((outputs, call.came_in), (tensors_in((args, kwargs)), call.went_out)):
            for one in tensors:
                if one.requires_grad:
                    one.register_hook(seen.append)  # type: ignore[no-untyped-call]
        return result
