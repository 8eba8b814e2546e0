"""SG206: an indeterminate form, inf - inf or 0 * inf."""

from __future__ import annotations

from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.ops import SOFTMAXES, words
from stepguard.diagnose.rule import PLAUSIBLE, STRONG, Proof, Rule, code, prose
from stepguard.diagnose.wording import counts, describe
from stepguard.records import Operand, Remedy

TIMES = words("mul multiply mm bmm addmm baddbmm matmul dot mv addcmul linear convolution einsum")
SUMS = words(
    "add sub rsub sum mean cumsum lerp addmm logaddexp addcmul nansum index_add scatter_add"
)


def _evidence(case: Case) -> Proof | None:
    infinite = [o for o in case.inputs if not o.nan and (o.posinf or o.neginf)]
    if not infinite or not case.makes_nan or any(o.nan for o in case.inputs):
        return None
    if case.unselected or case.phase in ("input", "state"):
        return None
    if case.op in SOFTMAXES and not any(o.posinf for o in infinite):
        return None
    form, confidence = _form(case, infinite)
    if case.phase == "backward" and case.absorbed:
        confidence = PLAUSIBLE
    numbers = f"{case.place}: {form}"
    zero = [o for o in case.inputs if o not in infinite and has_zero(o)]
    operands = map(_infinities, (*infinite, *zero[:1]))
    return Proof(confidence=confidence, evidence=(numbers, *operands, case.confirmed_samples))


def _form(case: Case, infinite: list[Operand]) -> tuple[str, float]:
    zero = next((o for o in case.inputs if has_zero(o)), None)
    if case.op in TIMES and zero is not None:
        return (
            "0 * inf is NaN, a mask of 0 does not hide an infinity",
            0.85 if case.phase == "backward" else STRONG,
        )
    if case.op in SUMS and (len(infinite) > 1 or any(o.posinf and o.neginf for o in infinite)):
        return "inf - inf is NaN", STRONG
    if case.op == "div" and len(infinite) > 1:
        return "inf / inf is NaN", STRONG
    if case.op in SOFTMAXES:
        return "the maximum of a row is +inf, and inf - inf is NaN", 0.88
    return "an infinity went in and has no value here", 0.6


def _infinities(operand: Operand) -> str:
    amount = ", ".join(
        part for part in (counts(operand, kind) for kind in ("posinf", "neginf", "zeros")) if part
    )
    return f"`{operand.name or 'operand'}` has {amount}" if amount else describe(operand)


RULE = Rule(
    code="SG206",
    title="inf - inf or 0 * inf",
    what=prose(
        """
        Two infinities met, or an infinity met a zero. inf - inf, 0 * inf and inf / inf have no value: the
        result is NaN.
        """
    ),
    why=prose(
        """
        An infinity that was harmless by itself (a -inf mask, log 0, an overflowed score) is multiplied by a 0
        mask instead of being selected away, or two masked terms are subtracted from each other.
        """
    ),
    how=prose(
        """
        The operation has an infinite operand and makes NaN without having been given one. Where the infinity
        came from an operation of this step, that operation is reported instead.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Select instead of multiplying: masked_fill or where on the operand, not on the "
            "product",
            snippet=code(
                """
                kept = log_ratio.masked_fill(~mask, 0.0)
                loss = (kept * weight).sum() / mask.sum().clamp_min(1)
                """
            ),
        ),
        Remedy(
            title="Keep infinities out: mask with a large finite number instead of -inf",
            snippet=code(
                """
                finite = log_ratio.clamp_min(-1e4)
                loss = (finite * mask * weight).sum() / mask.sum().clamp_min(1)
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        log_ratio = torch.tensor([0.3, float('-inf'), 0.1])  # the second position is padding
        mask = torch.tensor([True, False, True])
        weight = torch.ones(3, requires_grad=True)
        """
    ),
    bad="loss = (log_ratio * mask * weight).sum() / mask.sum()",
    see=(
        "ecmwf/WeatherGenerator#2723",
        "NovaSky-AI/SkyRL#1635",
        "NVIDIA-NeMo/Megatron-Bridge#3117",
    ),
)
