"""Measure the operation that made a bad value: its operands, and the facts that rules ask for.

Measured while the tensors are alive, since the trace keeps none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.operands import (
    Call,
    Index,
    Operator,
    Read,
    batch_tensors,
    broadcast_index,
    element,
    first_broken,
    first_true,
    mask_like,
    numeric,
    of_number,
    plain,
    real_maker,
    summarise,
    walk,
)
from stepguard.records.incident import NO_EVIDENCE, Evidence, Operand, Origin, Reading
from stepguard.state.batch import Step
from stepguard.state.rng import kept_rng
from stepguard.tensors.names import named_buffers, named_modules, named_parameters, names_by_id
from stepguard.tensors.torch_private import tree_map
from stepguard.tensors.values import dtype_name, is_finite, local_part

# --- Tensors that were bad before the step ran: parameters, buffers, optimizer slots, the batch.


KEPT = "attr:"
"""Prefix of the name under which a trace knows a tensor that a module keeps outside its parameters
and buffers (`self.center`); not part of the public contract."""


def kept_tensors(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield name (`attr:head.center`) and tensor, also inside lists, tuples and dicts."""
    for path, module in named_modules(roots):
        for key, value in vars(module).items():
            if key.startswith("_"):
                continue
            name = f"{KEPT}{path}.{key}".replace(":.", ":")
            if isinstance(value, Tensor):
                yield name, value
            if isinstance(value, list | tuple):
                value = dict(enumerate(value))
            # a container may hold very much
            if isinstance(value, dict):
                for inner, item in islice(value.items(), 64):
                    if isinstance(item, Tensor):
                        yield f"{name}[{inner!r}]", item


def stored_tensor(step: Step, name: str, micro: int = 0) -> Tensor | None:
    """Return the tensor behind `param:NAME`, `buffer:NAME`, `opt:SLOT` (its first bad one),
    `attr:NAME` or `batch:KEY`.
    """
    kind, _, path = name.partition(":")
    roots = step.named_roots()
    if kind == "param":
        return dict(named_parameters(roots)).get(path)
    if kind == "buffer":
        return dict(named_buffers(roots)).get(path)
    if name.startswith(KEPT):
        return dict(kept_tensors(roots)).get(name)
    if kind == "batch":
        return dict(batch_tensors(step.micro_batches[micro])).get(name)
    for slot, _, tensor in optimizer_slots(step):
        if slot == path and not is_finite(tensor):
            return tensor
    return None


def optimizer_slots(step: Step) -> Iterator[tuple[str, str, Tensor]]:
    """Yield slot, parameter and tensor of the optimizer's state."""
    names = names_by_id(named_parameters(step.named_roots()))
    for parameter, slots in step.optimizer.state.items():
        # Some optimizers keep further entries there, under a string for instance.
        if not isinstance(slots, Mapping):
            continue
        for slot, value in slots.items():
            if numeric(value):
                yield str(slot), names.get(id(parameter), ""), value


def bad_elements(tensor: Tensor, operand: Operand) -> Evidence:
    """Count the bad elements of a stored tensor."""
    bad = operand.nan + operand.posinf + operand.neginf
    return Evidence(bad_elements=bad, elements=local_part(tensor).numel())


def state_origin(step: Step, reading: Reading) -> Origin:
    """Describe the first bad state tensor of a reading, as it is found now."""
    name = reading.bad_state[0]
    origin = Origin(
        step=reading.step, phase="state", module=owner_of(name), tensor=name, method="scan"
    )
    tensor = stored_tensor(step, name)
    if tensor is None:
        return origin
    operand = summarise(name, tensor)
    owner = None
    for _, parameter, value in optimizer_slots(step):
        if value is tensor and parameter:
            owner = parameter
            break
    return replace(
        origin,
        inputs=(operand,),
        reproduced=None if is_finite(tensor) else True,
        evidence=bad_elements(tensor, operand) | Evidence(parameter=owner),
    )


def owner_of(name: str) -> str | None:
    """Name the module that holds a parameter or buffer."""
    kind, _, path = name.partition(":")
    if kind == "opt":
        return None
    return path.rpartition(".")[0]


def evidence_origin(
    step: Step, reading: Reading, evidence: Evidence = NO_EVIDENCE, *remarks: str
) -> Origin:
    """Say the best that can be said without a replay."""
    if reading.bad_state and not reading.state_born:
        return state_origin(step, reading)
    for micro, batch in enumerate(step.micro_batches):
        for name, tensor in batch_tensors(batch):
            if numeric(tensor) and not is_finite(tensor) and not mask_like(tensor):
                operand = summarise(name, tensor)
                return Origin(
                    step=reading.step,
                    phase="input",
                    tensor=name,
                    micro_batch=micro,
                    inputs=(operand,),
                    method="scan",
                    evidence=bad_elements(tensor, operand) | evidence,
                    remarks=remarks,
                )
    # Only a bad loss and a bad gradient are distinguished here.
    origin = Origin(
        step=reading.step, phase="backward", method="evidence", evidence=evidence, remarks=remarks
    )
    if loss_is_bad(reading):
        return replace(origin, phase="loss", micro_batch=first_bad_micro_batch(reading))
    if reading.bad_grads:
        return replace(origin, tensor=f"param:{reading.bad_grads[0]}")
    return origin


def loss_is_bad(reading: Reading) -> bool:
    """True if the loss of the step, or of one of its micro-batches, is not finite."""
    bad = reading.loss is not None and not math.isfinite(reading.loss)
    return bad or bool(reading.bad_micro_batches)


def first_bad_micro_batch(reading: Reading) -> int | None:
    """Return the index of the first micro-batch with a bad loss."""
    return reading.bad_micro_batches[0] if reading.bad_micro_batches else None


# --- One operation that has just made a bad value, with the arguments it had.


@dataclass(slots=True)
class Invocation:
    """One operation with its arguments, as they were before it ran."""

    operator: Operator
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: list[Read]
    numbers: list[tuple[str, float]]
    call: Any = None
    """The recorded call, once it has given a bad value."""
    out: Any = None
    """The tensor with the bad value."""
    where: Tensor | None = None
    """True at the elements of it that no input explains, where that is known."""

    @property
    def used(self) -> list[Read]:
        """Tensors whose values the result depends on."""
        return [read for read in self.reads if self.operator.reads(read.name)]

    def only(self, position: int) -> Invocation:
        """Return what a foreach operation did at one position of its lists, by plain names."""
        mark = f"[{position}]"

        def one(value: Any) -> Any:
            # The operator still takes lists: one of one entry gives the same result for that entry.
            if isinstance(value, list | tuple) and position < len(value):
                return [value[position]]
            return value

        def chosen(named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
            """Entries of this position, and what belongs to all of them."""
            mine = [(name, item) for name, item in named if name.endswith(mark) or "[" not in name]
            return [(name.removesuffix(mark), item) for name, item in mine]

        reads = chosen([(read.name, read) for read in self.reads])
        return replace(
            self,
            args=tuple(map(one, self.args)),
            kwargs={name: one(value) for name, value in self.kwargs.items()},
            reads=[replace(read, name=name) for name, read in reads],
            numbers=chosen(self.numbers),
        )

    @property
    def index(self) -> Index | None:
        """The first bad element that no input explains."""
        if self.where is None:
            return first_broken(self.out)
        return first_true(self.where)

    def read(self, name: str) -> Read | None:
        """Return the tensor that was given for this argument."""
        return next((read for read in self.reads if read.name == name), None)

    def argument(self, name: str) -> Any:
        """Return an argument by its name in the schema, given by position or by keyword."""
        by_position = dict(zip(self.operator.arguments, self.args, strict=False))
        return self.kwargs.get(name, by_position.get(name))

    def at(self, name: str) -> float | None:
        """Return the element of this argument that met the bad position, or the number itself."""
        read = self.read(name)
        if read is None:
            return dict(self.numbers).get(name)
        index = self.index
        if index is None:
            return None
        return element(read.tensor, broadcast_index(index, tuple(read.tensor.shape)))


# --- Measure operations that work along an axis: softmax rows, reductions, losses over targets.


DIVIDES = {
    "div": "other",
    "true_divide": "other",
    "reciprocal": "self",
    "addcdiv": "tensor2",
    "rsqrt": "self",
}
"""Operation -> the argument it divides by."""
DIVIDED = {"div": "self", "true_divide": "self", "addcdiv": "tensor1"}
"""Operation -> the argument that is divided; the others divide 1."""
ARGUMENT = {
    "log": "self",
    "log2": "self",
    "log10": "self",
    "log1p": "self",
    "xlogy": "other",
    "logit": "self",
    "sqrt": "self",
    "rsqrt": "self",
    "pow": "self",
}
"""Operation -> the argument that must be positive."""
DOMAIN = ("acos", "asin", "acosh", "atanh", "erfinv")
SUMS = ("sum", "mean", "dot", "nansum", "linalg_vector_norm", "norm")
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses that make one value of each element before they add: `reduction` is an argument."""
SOFTMAX = (
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "logsumexp",
    "softmax",
    "log_softmax",
    "_softmax_backward_data",
)
SPREAD = ("std", "var", "var_mean", "std_mean")
REDUCES = (
    "mean",
    "sum",
    "amax",
    "amin",
    "max",
    "min",
    "median",
    "nanmean",
    "logsumexp",
    "prod",
    *SPREAD,
)
PROBABILITY = ("binary_cross_entropy", "kl_div")

Gather = Callable[[Invocation], Evidence]
_GATHERERS: list[tuple[tuple[str, ...], tuple[str, ...], Gather]] = []
"""What is measured, and of which operations: their names, or parts of their names."""


def _gathers(*names: str, within: tuple[str, ...] = ()) -> Callable[[Gather], Gather]:
    """Have facts measured of these operations; of all where none is named."""

    def register(gather: Gather) -> Gather:
        _GATHERERS.append((names, within, gather))
        return gather

    return register


@_gathers(*SOFTMAX, within=("scaled_dot_product", "efficient_attention"))
def _masked_rows(bad_op: Invocation) -> Evidence:
    """How many rows of a softmax, or of the mask of an attention, are masked throughout."""
    softmax = bad_op.operator.base in SOFTMAX
    for read in map(bad_op.read, ("self",) if softmax else ("attn_mask", "attn_bias")):
        if read is None or not read.tensor.dim():
            continue
        axis = bad_op.argument("dim")
        if isinstance(axis, list | tuple) and axis:
            axis = axis[0]
        tensor = read.tensor
        # a boolean attention mask is True where a key may be looked at
        closed = ~tensor if tensor.dtype is torch.bool else torch.isneginf(tensor)
        dead = closed.all(dim=axis if isinstance(axis, int) else -1)
        if bool(dead.any()):
            return Evidence(masked_rows=int(dead.sum()), rows=dead.numel())
    return NO_EVIDENCE


@_gathers(*REDUCES)
def _reduced(bad_op: Invocation) -> Evidence:
    read = bad_op.read("self")
    if read is None:
        return NO_EVIDENCE
    group = read.tensor.numel() // max(1, bad_op.out.numel())
    if group == 0 or (group == 1 and bad_op.operator.base in SPREAD):
        return Evidence(reduced_elements=group)
    return NO_EVIDENCE


@_gathers(within=("nll_loss",))
def _targets(bad_op: Invocation) -> Evidence:
    target = bad_op.argument("target")
    if not isinstance(target, Tensor):
        return NO_EVIDENCE
    ignored = bad_op.argument("ignore_index")
    count = target.numel()
    if isinstance(ignored, int):
        count = int((target != ignored).sum())
    scores = bad_op.argument("self")
    impossible = isinstance(scores, Tensor) and bool(torch.isinf(scores).any())
    return Evidence(
        valid_targets=count,
        targets=target.numel(),
        zero_target_probability=count > 0 and impossible,
    )


@_gathers(*PROBABILITY, "xlogy")
def _target_domain(bad_op: Invocation) -> Evidence:
    """A target that the loss is not defined for; kl_div computes xlogy(target, target)."""
    values: tuple[float | None, ...] = ()
    target = bad_op.argument("target")
    if bad_op.operator.base == "xlogy":
        values = (bad_op.at("other"),)
    elif isinstance(target, Tensor) and target.numel():
        values = (float(target.min()), float(target.max()))
    for value in values:
        if value is not None and (-math.inf < value < 0 or value > 1):
            return Evidence(target_out_of_domain=value)
    return NO_EVIDENCE


@_gathers("_weight_norm_interface", within=("batch_norm",))
def _stored_domain(bad_op: Invocation) -> Evidence:
    """A row of weights whose norm is 0 and that is divided by it; a variance below 0."""
    direction, variance = bad_op.argument("v"), bad_op.argument("running_var")
    if isinstance(direction, Tensor):
        if not bool(direction.reshape(direction.shape[0], -1).any(1).all()):
            return Evidence(zero_denominator=True, denominator_from="norm")
    elif isinstance(variance, Tensor) and not bad_op.argument("training"):
        lowest = float(variance.min()) + float(bad_op.argument("eps") or 0.0)
        if lowest < 0:
            return Evidence(argument="negative")
    return NO_EVIDENCE


@_gathers("_ctc_loss")
def _ctc(bad_op: Invocation) -> Evidence:
    lengths = bad_op.argument("input_lengths")
    wanted = bad_op.argument("target_lengths")
    if lengths is None or wanted is None:
        return NO_EVIDENCE
    short = int((torch.as_tensor(lengths).flatten() < torch.as_tensor(wanted).flatten()).sum())
    # repeated labels need a blank in between: such a target fails without being longer
    return Evidence(ctc_infeasible=short or int(torch.isinf(bad_op.out).sum()))


# --- Measure the operation that made a bad value: its operands, and the facts that rules ask for.


MOST_OPERANDS = 6
HUGE = 1e15
"""Half of float32's exponent range: a square overflows, or nearly does."""
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
HALF = (torch.float16, torch.bfloat16)


def measure(bad_op: Invocation) -> None:
    """Fill the operands, the output and the evidence of the call."""
    call = bad_op.call
    index = bad_op.index
    operands: list[Operand] = []
    for read in bad_op.reads[:MOST_OPERANDS]:
        shape = tuple(read.tensor.shape)
        spot = None
        # The element that met the bad one, where that is known.
        if index is not None and (bad_op.operator.pointwise or shape == tuple(bad_op.out.shape)):
            spot = broadcast_index(index, shape)
        operands.append(summarise(read.name, read.tensor, spot))
    operands += [of_number(name, value) for name, value in bad_op.numbers[:MOST_OPERANDS]]
    call.inputs = tuple(operands)
    call.output = summarise("out", bad_op.out, index)
    if call.number is not None:
        argument, value = call.number
        call.evidence |= Evidence(number_argument=argument, number=value)
    base = bad_op.operator.base
    for names, within, gather in _GATHERERS:
        everywhere = not names and not within
        if everywhere or base in names or any(part in base for part in within):
            call.evidence |= gather(bad_op)
    call.adds_up = _adds_up(bad_op)


def _adds_up(bad_op: Invocation) -> bool:
    """Are all elements finite, and only their sum is not?"""
    base = bad_op.operator.base
    if bad_op.call.out.nan or any(read.flaws for read in bad_op.reads):
        return False
    if base in LOSSES:
        rest = {key: value for key, value in bad_op.kwargs.items() if key != "reduction"}
        return is_finite(bad_op.func(*bad_op.args[:2], 0, *bad_op.args[3:], **rest))
    # terms of a loss are scalars
    return base in SUMS or (base == "add" and bad_op.out.numel() == 1 and len(bad_op.reads) > 1)


@_gathers(*DIVIDES)
def _division(bad_op: Invocation) -> Evidence:
    base = bad_op.operator.base
    name = DIVIDES[base]
    if bad_op.at(name) != 0.0:
        return NO_EVIDENCE
    made_by, root, eps = _way_to(bad_op, name)
    found = Evidence(
        zero_denominator=True, denominator_from=made_by, denominator_root=root, eps_vanished=eps
    )
    above = DIVIDED.get(base)
    if above is not None and bad_op.at(above) == 0.0:
        found |= Evidence(zero_numerator=True, numerator_from=_way_to(bad_op, above)[0])
    read = bad_op.read(name)
    if read is None:
        return found
    fractional = False
    if numeric(read.tensor):
        # Whole numbers are counts.
        values = plain(read.tensor)
        values = values[torch.isfinite(values)]
        fractional = not bool((values == values.round()).all())
    # Computed from parameters without a comparison in between, as counting has.
    behind = walk([read.maker], lambda one: one.parents if one.numeric else ())
    learned = any(one.numeric and one.op.startswith("param:") for one in behind)
    return found | Evidence(denominator_learned=learned, denominator_fractional=fractional)


@_gathers(*ARGUMENT, *DOMAIN)
def _domain(bad_op: Invocation) -> Evidence:
    """The argument of a logarithm, root or power that is outside its domain."""
    base = bad_op.operator.base
    name = ARGUMENT.get(base, "self")
    value = bad_op.at(name)
    if value is None:
        return NO_EVIDENCE
    found = NO_EVIDENCE
    if base not in DOMAIN:
        edge = -1.0 if base == "log1p" else 0.0
        if not value <= edge:
            return NO_EVIDENCE
        found = Evidence(argument="zero" if value == edge else "negative")
        if base == "pow" and value == edge:
            found = Evidence(negative_power=True)
            if not (bad_op.at("exponent") or 0.0) < 0:
                return NO_EVIDENCE
        elif base == "pow" and not bad_op.call.out.nan:
            # a large negative base overflows like a positive one: no root is missing
            return NO_EVIDENCE
    made_by, root, eps = _way_to(bad_op, name)
    return found | Evidence(argument_from=made_by, argument_root=root, eps_vanished=eps)


@_gathers()
def _infinities(bad_op: Invocation) -> Evidence:
    """Infinities that went in: written on purpose (a mask), times 0, or minus one another."""
    constants = [value for _, value in bad_op.numbers]
    masked = any(read.intended_inf and read.flaws for read in bad_op.reads)
    intended = Evidence(intended_inf=masked or any(map(math.isinf, constants)))
    met = [bad_op.at(read.name) for read in bad_op.reads] + constants
    if not any(value is not None and math.isinf(value) for value in met):
        return intended
    base = bad_op.operator.base
    return intended | Evidence(
        zero_times_inf=base == "mul" and 0.0 in met, inf_minus_inf=base in ("add", "sub")
    )


@_gathers()
def _gradient(bad_op: Invocation) -> Evidence:
    """In the backward: the gradient that came in, and the point at which the derivative breaks."""
    call = bad_op.call
    if call.stage != "backward" or call.node is None or not bad_op.operator.pointwise:
        return NO_EVIDENCE
    found = NO_EVIDENCE
    for read in bad_op.reads:
        value = bad_op.at(read.name)
        if value is None:
            continue
        # another node made it, so it is the gradient, not a value that the forward saved
        came_in = read.maker.stage == "backward" and read.maker.sequence != call.sequence
        if came_in:
            found |= Evidence(zero_upstream_gradient=value == 0.0)
        elif math.isfinite(value):
            found |= Evidence(singular_at=value)
    return found


@_gathers()
def _precision(bad_op: Invocation) -> Evidence:
    """Is the same operation finite in a wider dtype? Then the number format is what broke it."""
    kinds = {read.tensor.dtype for read in bad_op.reads if numeric(read.tensor)}
    kinds.add(bad_op.out.dtype)
    found = Evidence(half_precision=bool(kinds & set(HALF)))
    wider = WIDER.get(bad_op.out.dtype)
    if wider is None or any(read.flaws for read in bad_op.reads):
        return found
    found |= Evidence(dtype_limit=float(torch.finfo(bad_op.out.dtype).max))
    if bad_op.operator.custom:
        # The user's own kernel is not ours to run again.
        return found

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return wider
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(wider, copy=True)
        return value

    try:
        # a random operation would draw numbers that the step draws afterwards
        with kept_rng():
            result = bad_op.func(*tree_map(widen, bad_op.args), **tree_map(widen, bad_op.kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        # an operator without a kernel of that dtype: then nothing is known of a wider one
        return found
    for part in result if isinstance(result, list | tuple) else [result]:
        if isinstance(part, Tensor) and part.shape == bad_op.out.shape:
            again = plain(part)
            if is_finite(again):
                found |= Evidence(finite_in=dtype_name(again.dtype))
            break
    return found


@_gathers()
def _stored_huge(bad_op: Invocation) -> Evidence:
    """Which stored tensor went in with values that one more product overflows?"""
    for read, operand in zip(bad_op.reads, bad_op.call.inputs, strict=False):
        maker = real_maker(read.maker).op
        reach = max(abs(operand.min or 0.0), abs(operand.max or 0.0))
        if maker.startswith("param:") and operand.finite and reach >= HUGE:
            return Evidence(huge_parameter=maker)
    return NO_EVIDENCE


def _way_to(bad_op: Invocation, name: str) -> tuple[str | None, str | None, float | None]:
    """The operation that computed an operand, the only batch tensor behind it, a lost epsilon.

    The operation is looked for behind added constants and behind `1 - p`. An epsilon that its dtype
    could not hold is reported by itself.
    """
    read = bad_op.read(name)
    if read is None:
        return None, None, None
    maker = real_maker(read.maker)
    while len(maker.parents) == 1 and maker.rounded_to_zero is None:
        behind = real_maker(maker.parents[0])
        inverse = maker.op == "aten.rsub" and behind.op in ("aten.sigmoid", "aten._softmax")
        if maker.op not in ("aten.add", "aten.add_") and not inverse:
            break
        maker = behind
    stored = {one.op for one in walk([maker], lambda one: one.parents) if one.stage == "stored"}
    roots = [name for name in stored if not name.startswith("constant")]
    root = None
    if len(roots) == 1 and roots[0].startswith("batch:"):
        root = roots[0]
    eps = _vanished_epsilon(read.maker)
    return None if maker.stage == "stored" else maker.op, root, eps


def _vanished_epsilon(maker: Call) -> float | None:
    """An epsilon on the way to this operand that its dtype could not hold."""
    level = [maker]
    for _ in range(4):
        for call in level:
            if call.rounded_to_zero is not None:
                return call.rounded_to_zero
        level = [parent for call in level for parent in call.parents]
    return None
