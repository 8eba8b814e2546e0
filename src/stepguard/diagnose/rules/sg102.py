"""SG102: a mean over no element at all."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import counts_nothing, zero_divisor
from stepguard.diagnose.case import Case, elements, high, low, reach
from stepguard.diagnose.ops import NLL, words
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.wording import call, describe, spell
from stepguard.records import Operand

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


def recognise(case: Case) -> Proof | None:
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


RULE = Rule(code="SG102", recognise=recognise)
