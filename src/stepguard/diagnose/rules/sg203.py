"""SG203: an exponential left the range."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import singular_inputs
from stepguard.diagnose.case import Case, high, low, reach
from stepguard.diagnose.dtypes import exp_limit
from stepguard.diagnose.ops import EVEN, EXPONENTIALS
from stepguard.diagnose.rule import LIKELY, PLAUSIBLE, STRONG, Proof, Rule, code, prose
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Operand, Remedy

LOG2_E = 1.4426950408889634
POLYNOMIAL = 4
"""Powers up to here are products: it is the number that is too large, not its exponent."""


def _evidence(case: Case) -> Proof | None:
    if case.unselected or not case.makes_inf:
        return None
    exponent = case.argument("self", 0)
    if case.op in EXPONENTIALS and exponent is not None and exponent.finite:
        return _exponential(case, exponent)  # also inside a backward that people wrote themselves
    return _power(case) if case.computes else None


def _exponential(case: Case, exponent: Operand) -> Proof | None:
    limit = exp_limit(case.dtype) * (LOG2_E if "exp2" in case.op else 1.0)
    largest = reach(exponent) if case.op in EVEN else high(exponent)
    if not largest > limit * 0.99:
        return None
    confidence = LIKELY if case.absorbed or case.narrow else STRONG
    grows = "which grows as " if case.op in EVEN else ""
    numbers = (
        f"{case.place}: {grows}exp({spell(largest)}){at_index(exponent)} exceeds what "
        f"{case.dtype} can hold"
    )
    bound = f"in {case.dtype} the exponent may be at most {limit:.2f}; {describe(exponent)}"
    return Proof(confidence=confidence, evidence=(numbers, bound, case.confirmed_samples))


def _power(case: Case) -> Proof | None:
    base, exponent = case.argument("self", 0), case.argument("exponent", 1)
    if (
        case.op in ("prod", "cumprod", "_linalg_matrix_exp", "linalg_matrix_exp", "matrix_exp")
        and base is not None
    ):
        text = (
            f"{case.place}: repeated products of numbers up to {spell(reach(base))} exceed what "
            f"{case.dtype} can hold"
        )
        found = Proof(confidence=0.7, evidence=(text, describe(base), case.confirmed_samples))
        return found if base.finite and case.wider and not case.narrow else None
    if (
        case.op not in ("pow", "float_power")
        or base is None
        or exponent is None
        or singular_inputs(case)
    ):
        return None
    if case.narrow or reach(exponent) <= POLYNOMIAL or low(exponent) < 0:
        return None
    text = (
        f"{case.place}: {spell(reach(base))} to the power {spell(high(exponent))} exceeds what "
        f"{case.dtype} can hold"
    )
    return Proof(confidence=PLAUSIBLE + 0.05, evidence=(text, case.confirmed_samples))


RULE = Rule(
    code="SG203",
    title="exp overflow",
    what=prose(
        """
        exp(x) (or expm1, sinh, cosh, a large power) exceeds the largest number of its dtype. The limit is x =
        88.7 in float32 and bfloat16 and x = 11.09 in float16.
        """
    ),
    why=prose(
        """
        A log-variance, logit or routing coefficient that nothing bounds has grown; a hand-written softmax,
        softplus, sigmoid or Sinkhorn iteration exponentiates without subtracting the maximum first.
        """
    ),
    how=prose(
        """
        The operation is an exponential, its operand is finite and larger than the limit of its dtype. If the
        infinity is then swallowed and only backward fails it is SG403; in float16 with an exponent that
        float32 could take, SG301.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Use the fused, max-subtracted form: softmax, logsumexp, softplus, logsigmoid",
            snippet="loss = torch.logsumexp(score, dim=-1).mean()",
        ),
        Remedy(
            title="Subtract the maximum before exponentiating",
            snippet=code(
                """
                top = score.amax(dim=-1, keepdim=True).detach()
                loss = ((score - top).exp().sum(dim=-1).log() + top.squeeze(-1)).mean()
                """
            ),
        ),
        Remedy(
            title="Bound what is exponentiated with a soft limit that keeps its gradient (for a "
            "log-variance)",
            snippet=code(
                """
                limit = 20.0
                bounded = limit * torch.tanh(score / limit)
                loss = bounded.exp().sum(dim=-1).log().mean()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        score = torch.tensor([[100.0, 1.0], [2.0, 3.0]], requires_grad=True)
        """
    ),
    bad="loss = score.exp().sum(dim=-1).log().mean()",
    see=(
        "vanderschaarlab/synthcity#331",
        "Linear95/CLUB#27",
    ),
)
