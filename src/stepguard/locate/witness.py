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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stepguard.locate.evidence import WIDER, Invocation
from stepguard.locate.operands import Call, numeric, plain, reach, summarise, tensors_in
from stepguard.locate.replay import LocateBudget, Replayer, ReplayError
from stepguard.locate.samples import compiled_in_place
from stepguard.locate.tracer import CustomFunction
from stepguard.records.incident import Evidence, Origin, Witness, WitnessPath, with_evidence
from stepguard.tensors.names import named_modules
from stepguard.tensors.torch_private import (
    COMPILED_CALL,
    decomposition_of,
    observe_functions,
    tree_map,
    tree_map_only,
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
    name = kernel
    # An autograd function is known by its class, an operator by `namespace::name`.
    if not (isinstance(kernel, type) and issubclass(kernel, torch.autograd.Function)):
        # torch.ops returns a packet or an overload, torch.library a CustomOpDef
        named = getattr(kernel, "_qualname", None) or getattr(kernel, "_qualified_op_name", None)
        name = getattr(getattr(kernel, "_schema", None), "name", named or str(kernel))
        if "::" not in name:
            raise TypeError(f"kernel is {kernel!r}; it must be an autograd function or an operator")
    REFERENCES[name] = reference


# --- One kernel, and the ways to run it again.


Results = list[Tensor | None]
Change = Callable[[Tensor], Tensor]
Path = tuple[WitnessPath, str, Callable[[], Results]]
"""Kind, name in words, and what runs it."""
ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
"""How torch's fused attention kernels begin."""
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linear", "mv", "dot")
"""Operations that multiply and add: finite in a wider dtype whatever the inputs are."""


def _copies(value: Any, change: Change | None = None) -> Any:
    """Copy all tensors in a value, and change those of floating point."""

    def one(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        made = item.detach().clone()
        if change is not None and numeric(made):
            made = change(made)
        return made.requires_grad_(item.requires_grad)

    return tree_map(one, value)


def _results(value: Any) -> Results:
    if isinstance(value, list | tuple):
        return [one for item in value for one in _results(item)]
    return [value if isinstance(value, Tensor) else None]


class Kernel:
    """One call of an operator or of a custom function. Every run works on copies of the inputs."""

    def __init__(
        self, bad: Invocation | CustomFunction, given: Sequence[Any], autocast: Any = nullcontext
    ) -> None:
        """`given`: what the forward of a custom function was given, and the `autocast` it ran in;
        of an operator, the tensors that went in.
        """
        self._bad = bad
        self._autocast = autocast
        self._args: Any = given
        self._kwargs: dict[str, Any] = {}
        self._gradients: Any = None
        """What came into the backward of a custom function; None of a forward."""
        self.foreign = True
        """A kernel from outside torch."""
        self.known = True
        """A kernel, and not one of torch's ordinary operations."""
        if isinstance(bad, Invocation):
            self._function, self._args, self._kwargs = bad.func, bad.args, bad.kwargs
            self._key = bad.func._schema.name
            self.foreign = bad.operator.custom
            self.known = bool(bad.call.evidence.opaque) or bad.operator.base.startswith(ATTENTION)
        else:
            self._function = self._key = bad.cls
            self._function, self._gradients = bad.cls.apply, bad.gradients
        self.inputs = [one for one in (*given, *(self._gradients or ())) if numeric(one)]
        """Tensors of floating point that went in."""

    def run(self, function: Any = None, change: Change | None = None) -> Results:
        """What the kernel, or a function in its place, returns; of a backward, the gradients of its
        inputs.
        """
        function = function or self._function
        args, kwargs, gradients = _copies((self._args, self._kwargs, self._gradients), change)
        if isinstance(self._bad, Invocation):
            with torch.no_grad():
                made = _results(function(*args, **kwargs))
            operator = self._bad.operator
            named = dict(zip(operator.arguments, args, strict=False)) | kwargs
            written = sorted(operator.written & named.keys())
            return _results([named[name] for name in written]) + made
        with self._autocast(), torch.enable_grad():
            # copies of the copies: a function may write a tensor that is no leaf in place
            handed = tree_map_only(Tensor, Tensor.clone, args)
            outputs = [one for one in _results(function(*handed)) if one is not None]
            if gradients is None:
                return [one.detach() for one in outputs]
            reached, received = [], []
            for one, gradient in zip(outputs, gradients, strict=True):
                if one.requires_grad and gradient is not None:
                    reached.append(one)
                    received.append(gradient.detach().to(one.dtype))
            inputs = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
            return list(torch.autograd.grad(reached, inputs, received, allow_unused=True))

    def independent(self) -> list[Path]:
        """Paths that share no code with the kernel."""
        paths: list[Path] = []
        reference = REFERENCES.get(self._key)
        if reference is not None:
            name = getattr(reference, "__name__", type(reference).__name__)
            paths.append(("reference", f"the reference `{name}`", partial(self.run, reference)))
        if isinstance(self._bad, Invocation):
            paths += self._of_torch(self._bad)
        if any(one.device.type != "cpu" for one in self.inputs):
            name = "the CPU kernel"
            paths.append(("cpu", name, lambda: self.run(change=lambda one: one.cpu())))
        return paths

    def _of_torch(self, bad_op: Invocation) -> Iterator[Path]:
        """What torch itself has in the place of one of its operators."""
        base, dtype = bad_op.operator.base, bad_op.out.dtype
        if base.startswith(ATTENTION):
            yield "math", "math", partial(_attention, bad_op)
            return
        if base in PRODUCTS:
            # Where no partial sum of products can leave the range, only the kernel can. Products of
            # half precision are added up in float32.
            *_, second, first = 0.0, 0.0, *sorted(map(reach, self.inputs))
            terms = max(read.tensor.numel() for read in bad_op.reads)
            limit = torch.finfo(torch.promote_types(dtype, torch.float32)).max
            if len(self.inputs) > 1 and first * max(second, 1.0) * terms < limit:
                yield self._wider("composite", "the product", WIDER.get(dtype, torch.float64))
                return
        if bad_op.operator.custom or torch.Tag.nondeterministic_seeded in bad_op.func.tags:
            return
        composite = decomposition_of(bad_op.func)
        if composite is not None:
            yield "composite", "torch's decomposition of it", partial(self.run, composite)

    def same_code(self) -> Iterator[Path]:
        """The kernel itself with other inputs: a fault that goes away shows what it cannot take."""
        if any(not one.is_contiguous() for one in self.inputs):
            run = partial(self.run, change=Tensor.contiguous)
            yield "contiguous", "the same kernel on contiguous copies", run
        kinds = {one.dtype for one in self.inputs}
        on_host = all(one.device.type == "cpu" for one in self.inputs)
        # on a device a kernel that does not check the dtype could end the process
        if len(kinds) == 1 and on_host:
            wide = WIDER.get(kinds.pop())
            if wide is not None:
                yield self._wider("wider", "the same kernel", wide)

    def _wider(self, path: WitnessPath, what: str, dtype: torch.dtype) -> Path:
        run = partial(self.run, change=lambda one: one.to(dtype))
        return path, f"{what} in {dtype_name(dtype)}", run

    # --- of a backward: the slope of its own forward, by small differences

    def slopes(self, own: Results) -> Iterator[Witness]:
        """Compare the first bad gradient with how the forward changes when that input does.

        A slope that differs from side to side, or grows as the step shrinks, is no slope: then the
        inputs are at a singular point. A gradient that is meant to be another (straight through)
        shows by a good element.
        """
        inputs = [one for one in self._args if isinstance(one, Tensor) and one.requires_grad]
        position, flat = _first_bad(own, None)
        given = next(iter(own[position : position + 1]), None)
        if self._gradients is None or position >= len(inputs) or given is None:
            return
        gradient = plain(given).flatten()
        if gradient.isfinite()[flat]:
            return
        found = Witness(path="slope", name="the slope of its own forward")
        try:
            slope = self._slope(inputs[position], flat)
            good = (gradient.isfinite() & (gradient != 0)).nonzero().flatten().tolist()
            agrees = None
            if good and slope is not None:
                there = self._slope(inputs[position], good[0])
                wanted = float(gradient[good[0]])
                agrees = there is not None and math.isclose(there, wanted, rel_tol=SLOPES)
        except Exception as error:
            yield replace(found, why_not=str(error)[:MOST_WORDS])
            return
        if slope is None:
            yield replace(found, finite=False, why_not="its own forward has no slope there")
        else:
            yield replace(found, finite=True, value=slope, agrees=agrees)

    def _slope(self, tensor: Tensor, flat: int) -> float | None:
        """How the incoming gradient times the outputs changes with this element; None: no slope."""
        usual = float(plain(tensor).double().square().mean().sqrt())
        # an input is changed by a hundredth
        width = 1e-2 * max(abs(float(tensor.detach().flatten()[flat])), usual, 1e-6)

        def moved(by: float) -> tuple[float, float]:
            """The sum of the products, and that of their magnitudes."""

            def shift(item: Any) -> Any:
                if not isinstance(item, Tensor):
                    return item
                made = item.detach().clone()
                if item is tensor:
                    made.view(-1)[flat] += by
                return made

            with torch.no_grad():
                made = _results(self._function(*tree_map(shift, self._args)))
            value = total = 0.0
            for one, gradient in zip(made, self._gradients, strict=False):
                if one is not None and gradient is not None and numeric(one):
                    product = plain(one).double() * plain(gradient).double()
                    value += float(product.sum())
                    total += float(product.abs().sum())
            return value, total

        here, _ = moved(0.0)
        slopes = []
        for by in (width, -width, width / 2, -width / 2):
            there, total = moved(by)
            slopes.append((there - here) / by)
        noise = 16 * torch.finfo(tensor.dtype).eps * total
        if not all(map(math.isfinite, slopes)):
            return None
        if max(slopes) - min(slopes) > SLOPES * max(map(abs, slopes)) + noise / (width / 2):
            return None
        return sum(slopes) / len(slopes)


def _attention(bad_op: Invocation) -> Results:
    """The attention, or its gradients, as two products and a softmax."""
    backward = bad_op.operator.base.endswith("backward")
    names = ("query", "key", "value")
    query, key, value = (
        bad_op.argument(name).detach().clone().requires_grad_(backward) for name in names
    )
    mask = bad_op.argument("attn_mask")
    if mask is None:
        mask = bad_op.argument("attn_bias")
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


# --- Ask the witnesses.


CLOSE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative difference up to which two paths compute the same; of other dtypes 1e-3."""
SLOPES = 0.1
"""How far two slopes of a smooth function may be apart, relative."""
MOST_WORDS = 100
UNTRIED = Witness(path="reference", name="a reference")
NO_PATH = "no other way to compute it is known: `stepguard.register_reference` names one"


def with_witnesses(origin: Origin, call: Call, replayer: Replayer) -> Origin:
    """Add what other paths give on the inputs of the kernel that made the first bad value."""
    bad, budget = call.kernel, replayer.budget
    if bad is None:
        return origin
    if not budget.affords(1.0):
        budget.leave_out("running the kernel by another path")
        return origin
    if isinstance(bad, Invocation):
        kernel = Kernel(bad, [read.tensor for read in bad.reads])
    else:
        # a checkpointed block calls its functions again in the backward
        backward = call.evidence.recomputed or bad.gradients is not None
        caught = _given_to(bad, origin.micro_batch or 0, replayer, backward=backward)
        if caught is None:
            why = "the call could not be found again in a second run"
            return with_evidence(origin, Evidence(witnesses=(replace(UNTRIED, why_not=why),)))
        kernel = Kernel(bad, *caught)
    if not _finite(kernel.inputs):
        return origin
    found = _ask(kernel, origin, budget)
    if not kernel.known and not any(one.finite for one in found):
        # an ordinary operation: its rule says more than that other kernels agree with it
        return origin
    return with_evidence(origin, Evidence(witnesses=tuple(found)))


def _ask(kernel: Kernel, origin: Origin, budget: LocateBudget) -> list[Witness]:
    # the kernel itself first: what it gives is what the others are compared with
    again = Witness(path="again", name="the same kernel once more")
    own = _attempt(kernel.run)
    if isinstance(own, str):
        return [replace(again, why_not=own)]
    found: list[Witness] = []
    if _finite(own):
        found.append(replace(again, finite=True, value=_at(own, _first_bad(own, origin))))
    paths = independent = kernel.independent()
    if kernel.foreign:
        paths = [*independent, *kernel.same_code()]
    for path, name, run in paths:
        if budget.affords(0.0):
            found.append(compared(path, name, run, own, origin))
        else:
            found.append(Witness(path=path, name=name, why_not="locate_budget is used up"))
    if budget.affords(0.0):
        found += kernel.slopes(own)
    if kernel.foreign and not independent:
        found.append(replace(UNTRIED, why_not=NO_PATH))
    return found


def _finite(values: Sequence[Any]) -> bool:
    return all(is_finite(one) for one in values if numeric(one))


def _given_to(
    wanted: CustomFunction, micro: int, replayer: Replayer, *, backward: bool
) -> tuple[tuple[Any, ...], Callable[[], AbstractContextManager[Any]]] | None:
    """Copy what this call of a custom function is given when it is run again, and its autocast."""
    found: list[Any] = []
    count = 0

    def around(cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        nonlocal count
        # a generated function of torch.library is another class each time
        if count == wanted.number and cls.__name__ == wanted.cls.__name__:
            device = next((one.device.type for one in args if isinstance(one, Tensor)), "cpu")
            autocast: Any = nullcontext
            if torch.is_autocast_enabled(device):
                autocast = partial(torch.autocast, device, torch.get_autocast_dtype(device))
            found.append((_copies(args), autocast))
        count += 1
        return apply(*args, **kwargs)

    with ExitStack() as stack:
        replayer.clear_gradients()
        stack.callback(replayer.clear_gradients)
        stack.callback(observe_functions(around))
        try:
            replayer.run(micro, backward=backward)
        except ReplayError:
            return None
    return next(iter(found), None)


def _attempt(run: Callable[[], Results]) -> Results | str:
    """What a path gives, or why it cannot be run."""
    try:
        return run()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS]


def compared(
    path: WitnessPath,
    name: str,
    run: Callable[[], Results],
    own: Results,
    origin: Origin | None = None,
) -> Witness:
    """Run another path, and compare what it gives with what the kernel gave."""
    found = Witness(path=path, name=name)
    given = _attempt(run)
    if isinstance(given, str):
        return replace(found, why_not=given)
    mine: Results = []
    others: Results = []
    compared = different = 0
    for position, (one, other) in enumerate(zip(own, given, strict=False)):
        if one is None or other is None or not numeric(one) or not one.numel():
            continue
        if one.shape != other.shape:
            why = f"its result {position} has shape {tuple(other.shape)}"
            return replace(found, why_not=why)
        # beyond the range of the kernel's dtype the value itself is the fault
        one = plain(one).cpu()
        other = plain(other).cpu().to(one.dtype)
        mine.append(one)
        others.append(other)
        # do they agree where both are finite?
        both = one.isfinite() & other.isfinite()
        if bool(both.any()):
            usual, theirs = one[both].double(), other[both].double()
            allowed = CLOSE.get(one.dtype, 1e-3) * (theirs.abs() + theirs.abs().mean())
            different += int(((usual - theirs).abs() > allowed).sum())
            compared += usual.numel()
    if not mine:
        return replace(found, why_not="it returned nothing to compare")
    return replace(
        found,
        finite=_finite(others),
        value=_at(others, _first_bad(mine, origin)),
        # memory that a kernel never wrote can hold any number
        agrees=different <= 0.1 * compared if compared else None,
    )


def _first_bad(results: Results, origin: Origin | None) -> tuple[int, int]:
    """Which result, and which of its elements: the first bad one, or where it was in the step."""
    for position, one in enumerate(results):
        if one is not None and numeric(one) and not is_finite(one):
            return position, int((~plain(one).isfinite().flatten()).nonzero()[0])
    out = getattr(origin, "output", None)
    for position, one in enumerate(results):
        if one is not None and out is not None and out.index and tuple(one.shape) == out.shape:
            flat = 0
            for size, index in zip(out.shape, out.index, strict=True):
                flat = flat * size + index
            return position, flat
    return 0, 0


def _at(results: Results, place: tuple[int, int]) -> float | None:
    position, flat = place
    one = next(iter(results[position : position + 1]), None)
    if one is None or one.numel() <= flat:
        return None
    return float(plain(one).flatten()[flat])


# --- A fault that only compiled code shows: which region, and what it gives when run eagerly.
#
# Nothing inside a compiled region can be traced as it runs, so its boundary is watched: the first
# region whose inputs are finite and whose outputs, or gradients, are not. The same region run
# eagerly on the same inputs is the witness.


@dataclass(slots=True)
class _Region:
    """One call of a compiled region."""

    name: str
    module: nn.Module
    below: Callable[..., Any]
    given: Any
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
    backward = ran.loss_finite
    # the backward runs from the last call to the first
    for call in reversed(calls) if backward else calls:
        read, made, gradients = tensors_in(call.given), call.outputs, []
        if backward:
            read, made = call.came_in, call.went_out
            gradients = [one.grad for one in call.module.parameters()]
        fault = _finite(read) and not _finite([*made, *gradients])
        if not fault or (backward and not read):
            continue
        origin = replace(
            origin,
            phase="backward" if backward else "forward",
            module=call.name,
            op="torch.compile",
            micro_batch=micro,
            inputs=tuple(summarise(f"input {n}", one) for n, one in enumerate(read[:6])),
            output=next((summarise("out", one) for one in made if not _finite([one])), None),
        )
        if not backward:
            name = f"`{call.name or 'the model'}` run eagerly"
            witness = compared("eager", name, partial(_eagerly, call), [*made])
            origin = with_evidence(origin, Evidence(witnesses=(witness,)))
        break
    replayer.clear_gradients()
    return origin


def _eagerly(call: _Region) -> Results:
    """The region without the compiler, on the inputs it had."""
    args, kwargs = call.given
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        return [*tensors_in(call.below(*args, **kwargs))]


@contextmanager
def _watched(replayer: Replayer) -> Iterator[list[_Region]]:
    """Note what goes in and out of every compiled region."""
    calls: list[_Region] = []
    watched: set[int] = set()
    step = replayer.step
    # the roots of a step are what is inside the compiled wrappers
    wrappers = [("", step.model), *step.modules.items()]
    with ExitStack() as undo:
        for name, module in (*wrappers, *named_modules(step.named_roots())):
            spaces = vars(module)
            if "_orig_mod" in module._modules:
                key = "forward"
            elif compiled_in_place(module):
                key = COMPILED_CALL
            else:
                continue
            if id(module) not in watched:
                watched.add(id(module))
                name = name.replace("_orig_mod", "").strip(".")
                below = spaces[key]
                # not by setattr, which a compiled module passes on to the module inside
                undo.callback(spaces.__setitem__, key, below)
                spaces[key] = partial(_noted, calls, name, module, below)
        yield calls


def _noted(
    calls: list[_Region], name: str, module: nn.Module, below: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call what is compiled, and note what passes."""

    def copy(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    given = tree_map(copy, (args, kwargs))
    result = below(*args, **kwargs)
    outputs = tensors_in(result)
    call = _Region(name, module, below, given, [one.detach() for one in outputs])
    calls.append(call)
    for tensors, seen in ((outputs, call.came_in), (tensors_in((args, kwargs)), call.went_out)):
        for one in tensors:
            if one.requires_grad:
                one.register_hook(seen.append)  # type: ignore[no-untyped-call]
    return result
