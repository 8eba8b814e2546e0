"""SG206: an indeterminate form, inf - inf or 0 * inf."""

from __future__ import annotations

from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.ops import SOFTMAXES, words
from stepguard.diagnose.rule import Proof, Rule
from stepguard.diagnose.wording import call, counts, describe
from stepguard.records import Certainty, Operand

TIMES = words("mul multiply mm bmm addmm baddbmm matmul dot mv addcmul linear convolution einsum")
SUMS = words(
    "add sub rsub sum mean cumsum lerp addmm logaddexp addcmul nansum index_add scatter_add"
)


def recognise(case: Case) -> Proof | None:
    if not case.makes_nan or case.unselected or case.phase in ("input", "state"):
        return None
    infinite = _infinite(case)
    if not infinite:
        return None
    form, certainty = _form(case, infinite)
    # the forward swallowed the infinity: SG403
    if case.phase == "backward" and case.absorbed:
        certainty = "possible"
    zero = [operand for operand in case.inputs if operand.finite and has_zero(operand)]
    operands = map(_infinities, (*infinite, *zero[:1]))
    sentences = (f"{case.place}: {form}", *operands, case.confirmed_samples)
    return Proof(certainty=certainty, sentences=sentences)


def _infinite(case: Case) -> list[Operand]:
    """The operands that hold an infinity, where no NaN went in and they are not just a mask."""
    found = [operand for operand in case.inputs if not operand.finite]
    if any(operand.nan for operand in found):
        return []
    # a softmax takes -inf as a mask
    if case.op in SOFTMAXES and not any(operand.posinf for operand in found):
        return []
    return found


def _form(case: Case, infinite: list[Operand]) -> tuple[str, Certainty]:
    if case.op in TIMES and any(map(has_zero, case.inputs)):
        form = "0 * inf is NaN, a mask of 0 does not hide an infinity"
        if case.phase == "backward":
            return form, "likely"
        return form, "certain"
    if case.op in SUMS and _cancels(infinite):
        return "inf - inf is NaN", "certain"
    if case.op == "div" and len(infinite) > 1:
        return "inf / inf is NaN", "certain"
    if case.op in SOFTMAXES:
        return "the maximum of a row is +inf, and inf - inf is NaN", "likely"
    return "an infinity went in and has no value here", "likely"


def _cancels(infinite: list[Operand]) -> bool:
    """Two infinities in one sum, in two operands or in one with both signs."""
    if len(infinite) > 1:
        return True
    return any(operand.posinf and operand.neginf for operand in infinite)


def _infinities(operand: Operand) -> str:
    amount = counts(operand, ("posinf", "neginf", "zeros"))
    if amount:
        return f"{call(operand)} has {amount}"
    return describe(operand)


RULE = Rule(code="SG206", recognise=recognise, yields_to=("SG204", "SG301", "SG403"))
