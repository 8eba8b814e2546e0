"""SG104: a target the loss is not defined for."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import counts_nothing, log_argument, negative_root, zero_divisor
from stepguard.diagnose.case import Case, high, low, met
from stepguard.diagnose.ops import NLL, base_name, words
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Operand

CURVES = words(
    "cos sin tan exp exp2 expm1 sigmoid tanh erf erfc softmax _softmax softplus acos asin atan"
)
"""What comes out of these is not a target any more: its range is theirs, and they round."""
BCE = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
CTC = ("_ctc_loss", "ctc_loss", "_cudnn_ctc_loss")


def recognise(case: Case) -> Proof | None:
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


RULE = Rule(code="SG104", recognise=recognise)
