"""SG101 to SG104: what is wrong with the data."""

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
    Found,
    certain,
    counts_nothing,
    likely,
    limit_of,
    log_argument,
    negative_root,
    overflow,
    possible,
    rule,
    zero_divisor,
)
from stepguard.records import Operand

# --- SG101: the batch already held NaN or Inf.


@rule(yields_to="SG504")
def sg101(case: Case) -> Found:
    evidence = case.evidence
    listed = case.reading.bad_inputs
    if case.verdict.finite_anomaly:
        return None
    in_batch = case.tensor.startswith("batch:") and case.tensor in listed
    if in_batch or case.phase == "input":
        which = case.tensor or ", ".join(listed)
        # without a name it is a tensor that no operation made, read before the model was called
        return certain("batch", which=which) if which else likely("outside")
    if evidence.number is not None and not case.unselected:
        return certain("number")
    # one that a module keeps is SG602
    if evidence.constant is not None and evidence.attribute is None:
        return likely("constant")
    if not listed:
        return None
    if case.origin is None:
        return certain("listed")
    elsewhere = case.verdict.kind == "nonfinite_input"
    if elsewhere:
        return possible("listed, but not the origin")
    return None


# --- SG102: a mean over no element at all.


NLL_BACKWARD = words("nll_loss_backward nll_loss2d_backward")
REDUCTIONS = words(
    """
    mean mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss kl_div
    binary_cross_entropy_with_logits median nanmedian nanmean segment_reduce logsumexp
    poisson_nll_loss amax amin
    """
)


@rule()
def sg102(case: Case) -> Found:
    proof = _no_label(case) or _nothing_reduced(case)
    divisor = zero_divisor(case)
    counted = divisor is not None and case.forward and not case.unselected
    if proof is None and divisor is not None and counted and counts_nothing(case, divisor):
        proof = certain("count", divisor=divisor, several=elements(divisor) > 1)
    if proof is None:
        return None
    evidence = case.evidence
    root = evidence.denominator_root or ""
    proof.fields["labels_missing"] = (
        evidence.valid_targets == 0
        or case.reading.labels == 0
        or case.op in NLL
        or base_name(evidence.numerator_from) in NLL
        or "label" in root
        or "target" in root
    )
    return proof


def _no_label(case: Case) -> Found:
    # the forward of nll_loss hands the weight of all targets to its backward
    total = case.argument("total_weight")
    if case.op in NLL_BACKWARD and total is not None and reach(total) == 0:
        return certain("weight of all targets")
    if case.op not in NLL or not case.makes_nan or not case.finite_inputs:
        return None
    target = case.argument("target")
    same = target is not None and _all_ignored(target, case.argument("ignore_index"))
    if same or case.evidence.valid_targets == 0 or case.reading.labels == 0:
        return certain("no label", target=target, same=same)
    # the mean of nll_loss divides by the weights of the targets, not by their number
    weight = case.argument("weight")
    if weight is not None and low(weight) == 0:
        return certain("weightless", weight=weight)
    return certain("nothing counts")


def _all_ignored(target: Operand, ignored: Operand | None) -> bool:
    # torch's default ignore_index
    index = -100.0
    if ignored is not None and ignored.value is not None:
        index = ignored.value
    return elements(target) > 0 and low(target) == high(target) == index


def _nothing_reduced(case: Case) -> Found:
    lengths = case.argument("lengths")
    if case.op == "segment_reduce" and case.makes_nan and lengths is not None and lengths.zeros:
        return certain("segment", lengths=lengths)
    if case.op not in REDUCTIONS:
        return None
    empty = [one for one in case.inputs if one.dtype and one.shape and elements(one) == 0]
    none = empty or case.evidence.reduced_elements == 0
    if none:
        return certain("nothing reduced", empty=empty)
    return None


# --- SG103: the batch is finite, but so large that the model overflows on it, or the loss jumps.


EXTREME_INPUT = 1e6
"""A batch element no normalised data set has."""
EXTREME_OPERAND = 1e15
"""Half of float32's exponent range is gone: one more product overflows."""


@rule()
def sg103(case: Case) -> Found:
    outlier = outlier_of(case)
    if outlier:
        return likely("outlier", outlier=outlier)
    if not case.forward and not case.backward:
        return None
    if not overflow(case) and case.op not in EXPONENTIALS:
        return None
    return _extreme_sample(case)


def _extreme_sample(case: Case) -> Found:
    evidence = case.evidence
    limit = _limit(case)
    batch_max = evidence.sample_max or evidence.batch_max
    others = evidence.others_max
    if batch_max is not None:
        # times the largest value of all other samples
        stands_out = others is not None and batch_max >= 1e4 * max(others, 1.0)
        if stands_out or batch_max >= min(EXTREME_INPUT, largest(case.dtype)):
            return certain("batch", batch_max=batch_max, limit=limit)
    # the batch does not stand out; an operand may, and a sample or the weights made it. In float16
    # ordinary operands overflow (SG301), and so do exponentials (SG203)
    if case.narrow or case.op in EXPONENTIALS:
        return None
    # a cube overflows on what a square still holds; the product itself may overflow
    times = max(1.0, _power(case) / 2)
    if math.log(max(case.magnitude, 1.0)) * times < math.log(EXTREME_OPERAND):
        return None
    if evidence.huge_buffer or evidence.huge_parameter:
        # where the magnitude comes from is known, and it is not the data
        return None
    if case.confirmed_samples and batch_max is None:
        return likely("operand of a sample", limit=limit)
    return possible("operand", limit=limit)


def outlier_of(case: Case) -> str:
    """What stands out in the batch of a loss that jumped, in words; empty where nothing does."""
    if not case.verdict.finite_anomaly:
        return ""
    if case.evidence.loss_without is not None:
        with_it, without = case.evidence.loss_with, case.evidence.loss_without
        return f"without {case.where.culprits} the loss is {without:.4g} instead of {with_it:.4g}"
    return str(case.said.get("outlier", ""))


def _limit(case: Case) -> str:
    """What the operation can take, where that is known; else what its result can hold."""
    if case.op in EXPONENTIALS:
        name = case.op.removeprefix("special_")
        return f"{name} takes at most {exp_limit(case.dtype, case.op):.1f} in {case.dtype}"
    times = _power(case)
    if times > 1.0:
        most = largest(case.dtype) ** (1.0 / times)
        return f"power {times:g} takes at most {most:.3g} in {case.dtype}"
    return f"and the result may be at most {limit_of(case.dtype)}"


def _power(case: Case) -> float:
    power = case.argument("exponent")
    if case.op == "pow" and power is not None:
        return high(power)
    return 2.0 if case.op == "square" else 1.0


# --- SG104: a target the loss is not defined for.


CURVES = words(
    "cos sin tan exp exp2 expm1 sigmoid tanh erf erfc softmax _softmax softplus acos asin atan"
)
"""What comes out of these is not a target any more: its range is theirs, and they round."""
BCE = words("binary_cross_entropy binary_cross_entropy_with_logits")
CTC = ("_ctc_loss", "ctc_loss", "_cudnn_ctc_loss")


@rule()
def sg104(case: Case) -> Found:
    if case.unselected:
        return None
    if case.evidence.target_out_of_domain is not None:
        valued = [operand for operand in case.inputs if operand.value is not None]
        return certain("measured", operands=(*valued, *case.inputs))
    # torch gives inf, not an error, for a target that does not fit (zero_infinity=False)
    if case.op in CTC and case.makes_inf:
        lengths = case.argument("input_lengths")
        return certain("ctc", lengths=lengths, targets=case.argument("target_lengths"))
    proof = _beyond_domain(case)
    if proof is not None or case.phase != "loss":
        return proof
    return _from_batch(case) or _ruled_out(case)


def _beyond_domain(case: Case) -> Found:
    """A target that is not a class, not a probability, or has probability 0."""
    scores = case.argument("self")
    target = case.argument("target")
    other = case.argument("other")
    if case.op in BCE and target is not None and (low(target) < 0 or high(target) > 1):
        return certain("probability", target=target)
    if scores is None:
        return None
    if case.op == "xlogy" and other is not None and low(scores) < 0:
        # `xlogy(t, t)`, as kl_div computes it: both operands are the target
        same = (scores.min, scores.max) == (other.min, other.max)
        if same:
            return certain("negative probability", scores=scores)
        return None
    if case.op not in NLL or target is None:
        return None
    return _no_class(case, scores, target)


def _no_class(case: Case, scores: Operand, target: Operand) -> Found:
    # scores without a batch axis do not say how many classes there are
    classes = sum(scores.shape[1:2])
    if high(target) >= classes > 0:
        return certain("class", target=target, classes=classes, last=classes - 1)
    masked = scores.neginf and case.makes_inf and not scores.nan
    impossible = masked or case.evidence.zero_target_probability
    if impossible:
        return certain("impossible class", scores=scores)
    return None


def _from_batch(case: Case) -> Found:
    """A logarithm, root or division in the loss whose operand is computed from the batch alone."""
    evidence = case.evidence
    root = evidence.argument_root or evidence.denominator_root
    operand = zero_divisor(case)
    logarithm = log_argument(case)
    if operand is None and (logarithm or negative_root(case)):
        operand = min(case.inputs, key=lambda one: one.index is None)
    elif operand is not None and counts_nothing(case, operand):
        # a count that is 0 is SG102
        return None
    if not root or operand is None:
        return None
    # a 0 in half precision is more likely rounded to 0 than in the data
    rounded = case.short and sum(one.zeros for one in case.inputs) > 0
    changed = base_name(evidence.argument_from) in CURVES
    prove = likely if logarithm is None or changed or rounded else certain
    return prove("from batch", operand=operand, value=met(operand)[0], root=root)


def _ruled_out(case: Case) -> Found:
    """A loss that adds up what a mask has set to -inf, such as label smoothing over all classes."""
    if not case.evidence.intended_inf or case.output is None or case.output.nan:
        return None
    operands = []
    for operand in case.inputs:
        if operand.neginf and not operand.nan and not operand.posinf:
            operands.append(operand)
    if operands:
        return likely("ruled out", operands=operands)
    return None
