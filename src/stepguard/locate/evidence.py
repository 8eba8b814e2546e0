"""Measure the operation that made a bad value: its operands, and the facts that rules ask for.

Measured while the tensors are alive, since the trace keeps none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stepguard.locate import replay_state as batches
from stepguard.locate.operands import (
    Call,
    Index,
    Operator,
    Read,
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
from stepguard.tensors.names import named_buffers, named_parameters, names_by_id
from stepguard.tensors.torch_private import tree_map
from stepguard.tensors.values import dtype_name, is_finite, local_part

# --- See which dtype autocast computes in while the user's code is replayed.


class AutocastObserver(TorchFunctionMode):
    """Remembers the first autocast dtype in force at a torch function; changes no call."""

    def __init__(self, device_types: Iterable[str]) -> None:
        super().__init__()
        self.dtype: str | None = None
        self._device_types = sorted(set(device_types))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for device in self._device_types:
            if self.dtype is None and torch.is_autocast_enabled(device):
                self.dtype = dtype_name(torch.get_autocast_dtype(device))
        return func(*args, **(kwargs or {}))


# --- Tensors that were bad before the step ran: parameters, buffers, optimizer slots, the batch.


def stored_tensor(step: Step, name: str) -> Tensor | None:
    """Return the tensor behind `param:NAME`, `buffer:NAME` or `opt:SLOT` (its first bad one)."""
    kind, _, path = name.partition(":")
    if kind == "param":
        return dict(named_parameters(step.named_roots())).get(path)
    if kind == "buffer":
        return dict(named_buffers(step.named_roots())).get(path)
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
        for name, tensor in batches.named_tensors(batch):
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
    # A bad loss is told from a bad gradient, and no more.
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
    if reading.bad_micro_batches:
        return True
    return reading.loss is not None and not math.isfinite(reading.loss)


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
    selects: bool = False
    """Chooses elements by a condition."""
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

        def belongs(name: str) -> bool:
            return name.endswith(mark) or "[" not in name

        def one(value: Any) -> Any:
            # The operator still takes lists: one of one entry gives the same result for that entry.
            listed = isinstance(value, list | tuple) and position < len(value)
            if listed:
                return [value[position]]
            return value

        return replace(
            self,
            args=tuple(map(one, self.args)),
            kwargs={name: one(value) for name, value in self.kwargs.items()},
            reads=[
                replace(read, name=read.name.removesuffix(mark))
                for read in self.reads
                if belongs(read.name)
            ],
            numbers=[(n.removesuffix(mark), value) for n, value in self.numbers if belongs(n)],
        )

    @property
    def index(self) -> Index | None:
        """The first bad element that no input explains."""
        if self.where is None:
            return first_broken(self.out)
        return first_true(self.where)

    def read(self, name: str) -> Read | None:
        """Return the tensor that was given for this argument."""
        for read in self.reads:
            if read.name == name:
                return read
        return None

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


def rows(bad_op: Invocation) -> Evidence:
    """Everything that can be said about rows, reduced elements and targets."""
    base = bad_op.operator.base
    found = NO_EVIDENCE
    for applies, gather in _GATHERERS:
        if applies(base):
            found |= gather(bad_op)
    return found


def _masked_rows(bad_op: Invocation) -> Evidence:
    """How many rows of a softmax, or of the mask of an attention, are masked throughout."""
    attention = ("attn_mask", "attn_bias")
    for name in ("self",) if bad_op.operator.base in SOFTMAX else attention:
        read = bad_op.read(name)
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


def _reduced(bad_op: Invocation) -> Evidence:
    read = bad_op.read("self")
    if read is None:
        return NO_EVIDENCE
    group = read.tensor.numel() // max(1, bad_op.out.numel())
    if group == 0 or (group == 1 and bad_op.operator.base in SPREAD):
        return Evidence(reduced_elements=group)
    return NO_EVIDENCE


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


def _probabilities(bad_op: Invocation) -> Evidence:
    target = bad_op.argument("target")
    if isinstance(target, Tensor) and target.numel():
        for extreme in (float(target.min()), float(target.max())):
            if extreme < 0 or extreme > 1:
                return Evidence(target_out_of_domain=extreme)
    return NO_EVIDENCE


def _negative_target(bad_op: Invocation) -> Evidence:
    """A negative target of kl_div, which torch computes as xlogy(target, target)."""
    value = bad_op.at("other")
    if value is None or value >= 0 or not math.isfinite(value):
        return NO_EVIDENCE
    return Evidence(target_out_of_domain=value)


def _zero_norm(bad_op: Invocation) -> Evidence:
    """Weight normalisation divides every row of `v` by its norm."""
    direction = bad_op.argument("v")
    if not isinstance(direction, Tensor):
        return NO_EVIDENCE
    if bool(direction.reshape(direction.shape[0], -1).any(1).all()):
        return NO_EVIDENCE
    return Evidence(zero_denominator=True, denominator_from="norm")


def _negative_variance(bad_op: Invocation) -> Evidence:
    variance = bad_op.argument("running_var")
    if not isinstance(variance, Tensor) or bad_op.argument("training"):
        return NO_EVIDENCE
    eps = float(bad_op.argument("eps") or 0.0)
    if float(variance.min()) + eps < 0:
        return Evidence(argument="negative")
    return NO_EVIDENCE


def _ctc(bad_op: Invocation) -> Evidence:
    lengths = bad_op.argument("input_lengths")
    wanted = bad_op.argument("target_lengths")
    if lengths is None or wanted is None:
        return NO_EVIDENCE
    short = int((torch.as_tensor(lengths).flatten() < torch.as_tensor(wanted).flatten()).sum())
    # repeated labels need a blank in between: such a target fails without being longer
    return Evidence(ctc_infeasible=short or int(torch.isinf(bad_op.out).sum()))


_GATHERERS: tuple[tuple[Callable[[str], bool], Callable[[Invocation], Evidence]], ...] = (
    (SOFTMAX.__contains__, _masked_rows),
    (lambda base: "scaled_dot_product" in base or "efficient_attention" in base, _masked_rows),
    (REDUCES.__contains__, _reduced),
    (lambda base: base.startswith("nll_loss"), _targets),
    (PROBABILITY.__contains__, _probabilities),
    (lambda base: base == "xlogy", _negative_target),
    (lambda base: base == "_weight_norm_interface", _zero_norm),
    (lambda base: "batch_norm" in base, _negative_variance),
    (lambda base: base == "_ctc_loss", _ctc),
)
"""Which operations, by name, and what is measured there."""


# --- Measure the operation that made a bad value: its operands, and the facts that rules ask for.


MOST_OPERANDS = 6
HUGE = 1e15
"""Half of float32's exponent range: a square overflows, or nearly does."""
EPSILON_DEPTH = 4
"""How many operations back an epsilon that vanished is looked for."""
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
HALF = (torch.float16, torch.bfloat16)

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
    evidence = call.evidence
    if call.number is not None:
        argument, value = call.number
        evidence |= Evidence(number_argument=argument, number=value)
    for gather in (_division, _domain, _infinities, _gradient, rows, _precision, _stored_huge):
        evidence |= gather(bad_op)
    call.evidence = evidence


def _division(bad_op: Invocation) -> Evidence:
    name = DIVIDES.get(bad_op.operator.base)
    if name is None or bad_op.at(name) != 0.0:
        return NO_EVIDENCE
    maker = _maker_behind(bad_op, name)
    found = Evidence(
        zero_denominator=True,
        denominator_from=_computed_by(maker),
        denominator_root=_only_batch_tensor(maker),
        eps_vanished=_vanished_epsilon(bad_op, name),
    )
    above = DIVIDED.get(bad_op.operator.base)
    if above is not None and bad_op.at(above) == 0.0:
        numerator = _computed_by(_maker_behind(bad_op, above))
        found |= Evidence(zero_numerator=True, numerator_from=numerator)
    read = bad_op.read(name)
    if read is None:
        return found
    fractional = False
    if numeric(read.tensor):
        # Whole numbers are counts.
        values = plain(read.tensor)
        values = values[torch.isfinite(values)]
        fractional = not bool((values == values.round()).all())
    return found | Evidence(
        denominator_learned=_learned(read.maker), denominator_fractional=fractional
    )


def _learned(maker: Call) -> bool:
    """Was it computed from parameters without a comparison in between (as counting has)?"""
    behind = walk([maker], lambda one: one.parents if one.numeric else ())
    return any(one.numeric and one.op.startswith("param:") for one in behind)


def _domain(bad_op: Invocation) -> Evidence:
    """The argument of a logarithm, root or power that is outside its domain."""
    base = bad_op.operator.base
    name = "self" if base in DOMAIN else ARGUMENT.get(base)
    value = None
    if name is not None:
        value = bad_op.at(name)
    if name is None or value is None:
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
    maker = _maker_behind(bad_op, name)
    return found | Evidence(
        argument_from=_computed_by(maker),
        argument_root=_only_batch_tensor(maker),
        eps_vanished=_vanished_epsilon(bad_op, name),
    )


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


def _stored_huge(bad_op: Invocation) -> Evidence:
    """Which stored tensor went in with values that one more product overflows?"""
    for read, operand in zip(bad_op.reads, bad_op.call.inputs, strict=False):
        maker = real_maker(read.maker).op
        reach = max(abs(operand.min or 0.0), abs(operand.max or 0.0))
        if maker.startswith("param:") and operand.finite and reach >= HUGE:
            return Evidence(huge_parameter=maker)
    return NO_EVIDENCE


def _computed_by(maker: Call | None) -> str | None:
    """The operation that computed an operand; None for a stored tensor."""
    if maker is None or maker.stage == "stored":
        return None
    return maker.op


def _only_batch_tensor(maker: Call | None) -> str | None:
    """The batch tensor an operand was computed from, if from nothing else that is stored."""
    if maker is None:
        return None
    roots: set[str] = set()
    for one in walk([maker], lambda one: one.parents):
        if one.stage == "stored" and not one.op.startswith("constant"):
            roots.add(one.op)
    root = ""
    if len(roots) == 1:
        root = roots.pop()
    if root.startswith("batch:"):
        return root
    return None


def _vanished_epsilon(bad_op: Invocation, name: str) -> float | None:
    """An epsilon on the way to this operand that its dtype could not hold."""
    read = bad_op.read(name)
    level = [read.maker] if read is not None else []
    for _ in range(EPSILON_DEPTH):
        for call in level:
            if call.rounded_to_zero is not None:
                return call.rounded_to_zero
        level = [parent for call in level for parent in call.parents]
    return None


def _maker_behind(bad_op: Invocation, name: str) -> Call | None:
    """The call that computed this operand, behind added constants and behind `1 - p`.

    A constant that its dtype could not hold is reported by itself.
    """
    read = bad_op.read(name)
    if read is None:
        return None
    maker = real_maker(read.maker)
    while len(maker.parents) == 1 and maker.rounded_to_zero is None:
        behind = real_maker(maker.parents[0])
        inverse = maker.op == "aten.rsub" and behind.op in ("aten.sigmoid", "aten._softmax")
        if maker.op not in ("aten.add", "aten.add_") and not inverse:
            break
        maker = behind
    return maker
