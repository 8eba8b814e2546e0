"""SG104: a target the loss is not defined for."""

from __future__ import annotations

import math

from stepguard.diagnose.case import (
    EXPONENTIALS,
    NLL,
    Case,
    base_name,
    elements,
    exp_limit,
    high,
    largest,
    low,
    met,
    reach,
    words,
)
from stepguard.diagnose.rule import (
    Proof,
    Rule,
    at_index,
    call,
    certain,
    counts,
    counts_nothing,
    describe,
    likely,
    limit_of,
    log_argument,
    negative_root,
    overflow,
    possible,
    spell,
    zero_divisor,
)
from stepguard.records import Operand

# --- SG101: the batch already held NaN or Inf.


def recognise_sg101(case: Case) -> Proof | None:
    if case.verdict.finite_anomaly:
        return None
    return _in_batch(case) or _number(case) or _constant(case) or _only_listed(case)


def _in_batch(case: Case) -> Proof | None:
    named = case.tensor.startswith("batch:") and case.tensor in case.reading.bad_inputs
    if case.origin is None or not (named or case.phase == "input"):
        return None
    which = case.tensor or ", ".join(case.reading.bad_inputs)
    if not which:
        # a tensor that no operation made, read before the model was called
        return likely(f"a tensor from outside {_amount(case)}", case.confirmed_samples)
    return certain(f"`{which}` {_amount(case)}", case.confirmed_samples)


def _amount(case: Case) -> str:
    bad = case.bad_operand
    if bad is None:
        number = case.evidence.bad_elements
        amount = "was non-finite"
        if number:
            amount = f"holds {number} non-finite elements"
        return f"{amount} before the model saw it"
    amount = f"holds {counts(bad)} before the model saw it"
    if bad.index is None:
        return amount
    return f"{amount}; the first is {spell(bad.value)}{at_index(bad)}"


def _number(case: Case) -> Proof | None:
    """A Python number, such as a loss weight, that is not finite."""
    value = case.evidence.number
    if value is None or case.unselected:
        return None
    first = (
        f"{case.place} was given the number {case.evidence.number_argument}={value}: a Python "
        f"number from outside model and batch"
    )
    kept_as = case.evidence.attribute
    where = ""
    if kept_as:
        where = f"the attribute `{kept_as}` of the model is {value}"
    tensors = ""
    if case.finite_inputs:
        tensors = "every tensor that went in is finite"
    return certain(first, where, tensors)


def _constant(case: Case) -> Proof | None:
    """A tensor that belongs to no module and no batch; one that a module keeps is SG602."""
    constant = case.evidence.constant
    if constant is None or case.evidence.attribute is not None:
        return None
    text = f"a tensor from outside model and batch was already {constant} when {case.place} read it"
    return likely(text, case.confirmed_samples)


def _only_listed(case: Case) -> Proof | None:
    """The batch holds NaN or Inf, but it is not known to be the origin."""
    if not case.reading.bad_inputs:
        return None
    listed = f"the batch holds NaN or Inf in {', '.join(case.reading.bad_inputs)}"
    if case.origin is None:
        return certain(listed, case.verdict.summary)
    if case.verdict.kind == "nonfinite_input":
        return possible(listed, f"but the first harmful value was born in {case.place}")
    return None


SG101 = Rule(code="SG101", recognise=recognise_sg101, yields_to=("SG504",))


# --- SG102: a mean over no element at all.


NLL_BACKWARD = frozenset({"nll_loss_backward", "nll_loss2d_backward"})
REDUCTIONS = words(
    """
    mean mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss kl_div
    binary_cross_entropy_with_logits median nanmedian nanmean segment_reduce logsumexp
    poisson_nll_loss amax amin
    """
)
IGNORED_BY_DEFAULT = -100.0
"""torch's default ignore_index."""


def recognise_sg102(case: Case) -> Proof | None:
    return _no_label(case) or _empty_segment(case) or _nothing_reduced(case) or _count_is_zero(case)


def _no_label(case: Case) -> Proof | None:
    # the forward of nll_loss hands the weight of all targets to its backward
    total = case.argument("total_weight", 6)
    if case.op in NLL_BACKWARD and total is not None and reach(total) == 0:
        return certain(f"{case.place} divides by the weight of all targets, which is 0")
    if case.op not in NLL or not case.makes_nan or not case.finite_inputs:
        return None
    return _all_left_out(case) or _weightless(case)


def _all_left_out(case: Case) -> Proof | None:
    target = case.argument("target", 1)
    same = target is not None and _all_ignored(target, case.argument("ignore_index", 4))
    if not (same or case.evidence.valid_targets == 0 or case.reading.labels == 0):
        return None
    first = "no target counts"
    if target is not None:
        first = f"0 of {elements(target)} targets count"
        if same:
            first += f": every one is {spell(low(target))}, the ignore_index"
    return certain(first, f"{case.place} took the mean over none: 0 / 0")


def _weightless(case: Case) -> Proof:
    # the mean of nll_loss divides by the weights of the targets, not by their number
    weight = case.argument("weight", 2)
    if weight is not None and low(weight) == 0:
        return certain(
            f"{describe(weight)}: the classes in this batch all weigh 0, so {case.place} divides "
            f"by 0"
        )
    return certain(f"{case.place} made NaN from finite scores: no target of the batch counts")


def _all_ignored(target: Operand, ignored: Operand | None) -> bool:
    if not elements(target) or low(target) != high(target):
        return False
    if ignored is None or ignored.value is None:
        return low(target) == IGNORED_BY_DEFAULT
    return low(target) == ignored.value


def _empty_segment(case: Case) -> Proof | None:
    lengths = case.argument("lengths", 1)
    if case.op != "segment_reduce" or not case.makes_nan or lengths is None or not lengths.zeros:
        return None
    return certain(
        f"{lengths.zeros} of {elements(lengths)} segments have length 0: {case.place} took the "
        f"mean of none"
    )


def _nothing_reduced(case: Case) -> Proof | None:
    if case.op not in REDUCTIONS:
        return None
    for operand in case.inputs:
        if operand.dtype and operand.shape and elements(operand) == 0:
            what = f"{call(operand)} has shape {operand.shape}"
            return certain(f"{what}: {case.place} reduced 0 elements")
    if case.evidence.reduced_elements != 0:
        return None
    return certain(f"the reduced dimension is empty: {case.place} reduced 0 elements")


def _count_is_zero(case: Case) -> Proof | None:
    divisor = zero_divisor(case)
    if divisor is None or not case.forward or case.unselected or not counts_nothing(case, divisor):
        return None
    made_by = case.evidence.denominator_from
    source = ""
    if made_by:
        source = f"the divisor comes from {made_by}"
    elif elements(divisor) > 1:
        source = "the divisor takes whole values only, as a count does"
    numbers = f"{case.place} divided by a count of valid elements that is 0: {describe(divisor)}"
    return certain(numbers, source, case.confirmed_samples)


SG102 = Rule(code="SG102", recognise=recognise_sg102)


# --- SG103: the batch is finite, but so large that the model overflows on it, or the loss jumps.


EXTREME_INPUT = 1e6
"""A batch element no normalised data set has."""
OUTLIER = 1e4
"""Times the largest value of all other samples."""
EXTREME_OPERAND = 1e15
"""Half of float32's exponent range is gone: one more product overflows."""


def recognise_sg103(case: Case) -> Proof | None:
    outlier = outlier_of(case)
    if outlier:
        return likely(outlier)
    if not case.forward and case.phase != "backward":
        return None
    if not overflow(case) and case.op not in EXPONENTIALS:
        return None
    numbers = f"{case.place} overflowed: its operands reach {spell(case.magnitude)}, {_limit(case)}"
    return _extreme_batch(case, numbers) or _extreme_operand(case, numbers)


def _limit(case: Case) -> str:
    """What the operation can take, where that is known; else what its result can hold."""
    power = case.argument("exponent", 1)
    most = largest(case.dtype)
    if case.op in EXPONENTIALS:
        name = case.op.removeprefix("special_")
        return f"{name} takes at most {exp_limit(case.dtype, case.op):.1f} in {case.dtype}"
    if case.op == "square" or (case.op == "pow" and power is not None and high(power) > 1):
        times = 2.0 if power is None else high(power)
        return f"power {times:g} takes at most {most ** (1.0 / times):.3g} in {case.dtype}"
    return f"and the result may be at most {limit_of(case.dtype)}"


def outlier_of(case: Case) -> str:
    """What stands out in the batch of a loss that jumped, in words; empty where nothing does."""
    if not case.verdict.finite_anomaly:
        return ""
    if case.origin is not None and case.evidence.loss_without is not None:
        with_it, without = case.evidence.loss_with, case.evidence.loss_without
        return f"without {case.origin.culprits} the loss is {without:.6g} instead of {with_it:.6g}"
    return str((case.verdict.evidence or {}).get("outlier", ""))


def _batch_max(case: Case) -> float | None:
    return case.evidence.sample_max or case.evidence.batch_max


def _extreme_batch(case: Case, numbers: str) -> Proof | None:
    batch_max = _batch_max(case)
    if batch_max is None:
        return None
    others = case.evidence.others_max
    stands_out = others is not None and batch_max >= OUTLIER * max(others, 1.0)
    if not stands_out and batch_max < min(EXTREME_INPUT, largest(case.dtype)):
        return None
    first = f"the batch is finite but holds {spell(batch_max)}"
    if others is not None:
        first += f"; all other samples stay within {spell(others)}"
    return certain(first, numbers, case.confirmed_samples)


def _extreme_operand(case: Case, numbers: str) -> Proof | None:
    """The batch does not stand out; an operand does, and a sample or the weights made it."""
    # in float16 ordinary operands overflow (SG301), and so do exponentials (SG203)
    if case.narrow or case.op in EXPONENTIALS or not _extreme(case):
        return None
    if case.evidence.huge_buffer or case.evidence.huge_parameter:
        # where the magnitude comes from is known, and it is not the data
        return None
    if case.confirmed_samples and _batch_max(case) is None:
        return likely(numbers, case.confirmed_samples)
    return possible(numbers)


def _extreme(case: Case) -> bool:
    """Do the operands use up the exponent range? A cube overflows on what a square still holds."""
    power = None
    if case.op == "pow":
        power = case.argument("exponent", 1)
    times = 1.0
    if power is not None:
        times = max(1.0, high(power) / 2)
    # compared as logarithms, since the product itself may overflow
    return math.log(max(case.magnitude, 1.0)) * times >= math.log(EXTREME_OPERAND)


SG103 = Rule(code="SG103", recognise=recognise_sg103)


# --- SG104: a target the loss is not defined for.


CURVES = words(
    "cos sin tan exp exp2 expm1 sigmoid tanh erf erfc softmax _softmax softplus acos asin atan"
)
"""What comes out of these is not a target any more: its range is theirs, and they round."""
BCE = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
CTC = ("_ctc_loss", "ctc_loss", "_cudnn_ctc_loss")


def recognise_sg104(case: Case) -> Proof | None:
    if case.unselected:
        return None
    for test in (_measured, _ctc, _class_index, _probability, _log_of_target, _from_batch):
        proof = test(case)
        if proof is not None:
            return proof
    return _ruled_out(case)


def _measured(case: Case) -> Proof | None:
    """Locating has compared the targets with what the loss allows."""
    worst = case.evidence.target_out_of_domain
    if worst is None:
        return None
    numbers = f"{case.place} got a target it is not defined for"
    operand = _first_with_value(case)
    if operand is not None:
        numbers += f": {describe(operand)}"
        if operand.value is not None:
            numbers += f"; the offending one is {spell(operand.value)}{at_index(operand)}"
    return certain(f"{numbers} ({spell(worst)})", case.confirmed_samples)


def _first_with_value(case: Case) -> Operand | None:
    for operand in case.inputs:
        if operand.value is not None:
            return operand
    if case.inputs:
        return case.inputs[0]
    return None


def _ctc(case: Case) -> Proof | None:
    # torch gives inf, not an error, for a target that does not fit (zero_infinity=False)
    if case.op not in CTC or not case.makes_inf:
        return None
    inputs = case.argument("input_lengths", 2)
    targets = case.argument("target_lengths", 3)
    lengths = ""
    if inputs is not None and targets is not None:
        lengths = (
            f"inputs are {spell(low(inputs))} long or more, targets up to {spell(high(targets))}"
        )
    numbers = (
        f"{case.place} is infinite: a target cannot be aligned with an input that short "
        f"(repeats need a blank each)"
    )
    how_many = case.evidence.ctc_infeasible
    short = ""
    if how_many is not None:
        short = f"{how_many} targets of the batch are too long"
    return certain(numbers, lengths, short, case.confirmed_samples)


def _class_index(case: Case) -> Proof | None:
    scores = case.argument("self", 0)
    target = case.argument("target", 1)
    if case.op not in NLL or scores is None or target is None:
        return None
    return _beyond_classes(scores, target) or _impossible_class(case, scores)


def _beyond_classes(scores: Operand, target: Operand) -> Proof | None:
    # scores without a batch axis do not say how many classes there are
    if len(scores.shape) < 2:
        return None
    classes = scores.shape[1]
    if not high(target) >= classes > 0:
        return None
    return certain(
        f"a target is {spell(high(target))}, but there are {classes} classes (0 to {classes - 1})"
    )


def _impossible_class(case: Case, scores: Operand) -> Proof | None:
    masked = scores.neginf and case.makes_inf and not scores.nan
    if not masked and not case.evidence.zero_target_probability:
        return None
    text = (
        f"a target names a class whose score is -inf ({scores.neginf} scores are): its "
        f"probability is exactly 0"
    )
    return certain(text, case.confirmed_samples)


def _probability(case: Case) -> Proof | None:
    target = case.argument("target", 1)
    if case.op not in BCE or target is None:
        return None
    if low(target) < 0 or high(target) > 1:
        text = f"{case.place} needs targets in [0, 1]: {describe(target)}"
        return certain(text, case.confirmed_samples)
    return None


def _log_of_target(case: Case) -> Proof | None:
    """`xlogy(t, t)`, as kl_div computes it: both operands are the target."""
    mine = case.argument("self", 0)
    other = case.argument("other", 1)
    if case.op != "xlogy" or mine is None or other is None or not low(mine) < 0:
        return None
    if (mine.min, mine.max) != (other.min, other.max):
        return None
    text = f"a target probability is negative ({spell(low(mine))}): t * log t does not exist"
    return certain(text, case.confirmed_samples)


def _from_batch(case: Case) -> Proof | None:
    """A logarithm, root or division in the loss whose operand is computed from the batch alone."""
    root = case.evidence.argument_root or case.evidence.denominator_root
    value = _broken_operand(case)
    if case.phase != "loss" or not root or value is None:
        return None
    text = (
        f"{case.place} got {spell(met(value)[0])}{at_index(value)}, which is computed from "
        f"`{root}` alone"
    )
    sentences = (text, describe(value), case.confirmed_samples)
    if log_argument(case) is None or _changed_on_the_way(case):
        return likely(*sentences)
    return certain(*sentences)


def _broken_operand(case: Case) -> Operand | None:
    """What was divided by, or the argument of a logarithm or root beyond its domain."""
    divisor = zero_divisor(case)
    if divisor is not None:
        # a count that is 0 is SG102
        if counts_nothing(case, divisor):
            return None
        return divisor
    if log_argument(case) is None and negative_root(case) is None:
        return None
    return _first_with_index(case)


def _changed_on_the_way(case: Case) -> bool:
    """Is the operand the batch's value only after rounding or a bounded function?"""
    if base_name(case.evidence.argument_from) in CURVES:
        return True
    # a 0 in half precision is more likely rounded to 0 than in the data
    return case.short and any(operand.zeros for operand in case.inputs)


def _first_with_index(case: Case) -> Operand:
    for operand in case.inputs:
        if operand.index is not None:
            return operand
    return case.inputs[0]


def _ruled_out(case: Case) -> Proof | None:
    """A loss that adds up what a mask has set to -inf, such as label smoothing over all classes."""
    if case.phase != "loss" or not case.evidence.intended_inf:
        return None
    if case.output is None or case.output.nan:
        return None
    for operand in case.inputs:
        if operand.neginf and not operand.nan and not operand.posinf:
            text = (
                f"{case.place} counts {operand.neginf} entries that were set to -inf on purpose: "
                f"their loss is infinite"
            )
            return likely(text, describe(operand), case.confirmed_samples)
    return None


SG104 = Rule(code="SG104", recognise=recognise_sg104)
