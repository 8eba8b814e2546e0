"""SG201: something was divided by zero."""

from __future__ import annotations

import math

from stepguard.diagnose.arithmetic import DIVISIONS, counts_nothing, zero_divisor
from stepguard.diagnose.case import Case, has_zero, low, reach
from stepguard.diagnose.ops import NORM_LAYERS, words
from stepguard.diagnose.rule import HINT, LIKELY, STRONG, Proof, Rule, code, prose
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Operand, Remedy

TINY = 1e-30
TINY_NUMBER = 1e-6
SOLVES = words(
    """
    linalg_solve_triangular triangular_solve linalg_solve _linalg_solve_ex linalg_solve_ex cholesky_solve
    linalg_inv linalg_inv_ex inverse linalg_lu_solve cholesky_inverse
    """
)


def _evidence(case: Case) -> Proof | None:
    if case.phase == "optimizer":
        return _own_optimizer(case)
    if not case.forward or case.unselected:
        return None
    divisor = zero_divisor(case)
    if divisor is not None:
        confidence = (
            HINT
            if counts_nothing(case, divisor)
            else LIKELY
            if case.absorbed and case.makes_inf
            else STRONG
        )
        return Proof(
            confidence=confidence, evidence=(*_numbers(case, divisor), case.confirmed_samples)
        )
    return _no_epsilon(case) or _inside(case) or _singular(case) or _tiny(case)


def _own_optimizer(case: Case) -> Proof | None:
    """An update that divides without any epsilon; where there is one, SG502 says what became of it."""
    divisor = zero_divisor(case)
    if divisor is None or case.facts.eps is not None or case.narrow:
        return None
    return Proof(confidence=STRONG, evidence=_numbers(case, divisor))


def _numbers(case: Case, divisor: Operand) -> tuple[str, str]:
    above = case.argument("self", 0)
    form = (
        "0 / 0 = NaN"
        if case.op == "div" and has_zero(above) and case.makes_nan
        else "x / 0 is infinite"
    )
    made_by = case.evidence.denominator_from
    source = f"the divisor comes from {made_by}" if made_by else ""
    return f"{case.place} divided by zero{at_index(divisor)} ({form}): {describe(divisor)}", source


def _no_epsilon(case: Case) -> Proof | None:
    eps = case.argument("eps", 7)
    if (
        case.op not in NORM_LAYERS
        or not case.finite_inputs
        or eps is None
        or eps.value is None
        or eps.value >= TINY
    ):
        return None
    text = (
        f"{case.place} has eps={spell(eps.value)}: where all elements are equal the variance is "
        f"0 and is divided by"
    )
    return Proof(confidence=0.85, evidence=(text, case.confirmed_samples))


def _inside(case: Case) -> Proof | None:
    """An operator that divides by something it computes itself, such as weight normalisation by a
    norm.
    """
    if not case.evidence.zero_denominator or case.op in DIVISIONS:
        return None
    what = (case.evidence.denominator_from or "value").removeprefix("aten.")
    text = f"{case.place} divides by a {what} that is 0"
    return Proof(
        confidence=STRONG, evidence=(text, *map(describe, case.inputs[:2]), case.confirmed_samples)
    )


def _singular(case: Case) -> Proof | None:
    """Solving with a matrix divides by its pivots; of a triangular one, by its diagonal."""
    matrix = case.argument("self", 0) or case.argument("A", 0)
    if case.op not in SOLVES or matrix is None or not case.finite_inputs:
        return None
    text = (
        f"{case.place} divides by the diagonal or pivots of a matrix that is singular: "
        f"{describe(matrix)}"
    )
    return Proof(confidence=0.85, evidence=(text, case.confirmed_samples))


def _tiny(case: Case) -> Proof | None:
    divisor = case.argument("other", 1) if case.op == "div" else case.argument("self", 0)
    exponent = case.argument("exponent", 1) if case.op in ("pow", "float_power") else None
    divides = case.op in ("div", "reciprocal", "rsqrt") or (
        exponent is not None and low(exponent) < 0
    )
    if not divides or divisor is None or case.short or not case.finite_inputs:
        return None
    small = divisor.value if divisor.value is not None else low(divisor)
    least = TINY if exponent is None else TINY ** (-1 / low(exponent))
    if math.isnan(small) or not (abs(small) < least or _tiny_number(case, divisor)):
        return None
    text = (
        f"{case.place} divided by {spell(small)}{at_index(divisor)}: so small that the quotient "
        f"overflows"
    )
    return Proof(confidence=0.85, evidence=(text, case.confirmed_samples))


def _tiny_number(case: Case, divisor: Operand) -> bool:
    """A Python number, such as a temperature annealed to almost 0, that outweighs what it divides."""
    above = case.argument("self", 0)
    if (
        case.op != "div"
        or above is None
        or divisor.shape
        or divisor.dtype != "float"
        or not divisor.value
    ):
        return False
    return abs(divisor.value) <= TINY_NUMBER and 1 / abs(divisor.value) >= reach(above)


RULE = Rule(
    code="SG201",
    title="division by zero",
    what=prose(
        """
        A divisor is exactly zero (or so small that the quotient overflows): x / 0 is infinite, 0 / 0 is NaN.
        """
    ),
    why=prose(
        """
        Something that is usually positive is zero for one sample: the standard deviation of a silent clip or
        a blank image, the norm of a zero row, the sum of weights, the range max - min of constant data.
        """
    ),
    how=prose(
        """
        The operation divides (div, reciprocal, rsqrt, a negative power, a norm layer with eps 0) and the
        operand it divides by holds a zero. A divisor that counts valid elements is SG102; an epsilon that
        rounded to zero is SG302.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Put a floor under the divisor: every healthy sample keeps its exact value",
            snippet=code(
                """
                scaled = (wave - wave.mean(-1, keepdim=True)) / wave.std(-1, keepdim=True).clamp_min(1e-5)
                loss = (scaled * gain).pow(2).mean()
                """
            ),
        ),
        Remedy(
            title="Leave constant samples out when the data is read, and count them",
            snippet=code(
                """
                audible = wave.std(-1) > 0
                heard = wave[audible]
                scaled = (heard - heard.mean(-1, keepdim=True)) / heard.std(-1, keepdim=True)
                loss = (scaled * gain).pow(2).mean()
                """
            ),
        ),
        Remedy(
            title="Add the epsilon to the divisor (this also changes healthy samples a little)",
            snippet=code(
                """
                scaled = (wave - wave.mean(-1, keepdim=True)) / (wave.std(-1, keepdim=True) + 1e-5)
                loss = (scaled * gain).pow(2).mean()
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        wave = torch.randn(4, 16)
        wave[2] = 0  # digital silence
        gain = torch.ones(16, requires_grad=True)
        """
    ),
    bad=code(
        """
        scaled = (wave - wave.mean(-1, keepdim=True)) / wave.std(-1, keepdim=True)
        loss = (scaled * gain).pow(2).mean()
        """
    ),
    see=(
        "huggingface/peft#2049",
        "maxrmorrison/torchcrepe#5",
        "yxlu-0102/MP-SENet#33",
    ),
)
