"""SG502: the optimizer's epsilon is zero in the parameters' dtype."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import zero_divisor
from stepguard.diagnose.case import Case, met
from stepguard.diagnose.dtypes import FORMATS, NARROW, rounds_to_zero
from stepguard.diagnose.ops import base_name, words
from stepguard.diagnose.rule import Proof, Rule, certain, possible
from stepguard.diagnose.wording import describe, spell

NORMS = words("linalg_vector_norm norm _foreach_norm linalg_norm")
"""What LARS, SAM and normalised descent divide by."""
DIVIDES = words("addcdiv div reciprocal rsqrt _fused_adam _fused_adamw _fused_adagrad")
BORN_BAD = ("nonfinite_parameter", "nonfinite_optimizer_state")


def recognise(case: Case) -> Proof | None:
    dtype = case.dtype or _narrow_parameters(case)
    if case.phase == "optimizer" and case.op:
        return _located(case, dtype)
    if case.origin is not None and case.phase != "optimizer":
        return None
    born = case.reading.state_born and case.verdict.kind in BORN_BAD
    if not born or not _underflows(case, dtype):
        return None
    first = f"finite gradients became non-finite weights in the update: {case.verdict.summary}"
    return certain(first, _epsilon(case, dtype))


def _narrow_parameters(case: Case) -> str:
    return next((name for name in case.facts.param_dtypes if name in NARROW), "")


def _underflows(case: Case, dtype: str) -> bool:
    eps = case.facts.eps
    return eps is not None and (eps == 0.0 or rounds_to_zero(eps, dtype))


def _located(case: Case, dtype: str) -> Proof | None:
    if case.op not in DIVIDES:
        return None
    divisor = zero_divisor(case)
    vanished = case.evidence.eps_underflow or _underflows(case, dtype)
    if not vanished and divisor is None:
        return None
    shown = ""
    if divisor is not None:
        shown = f": {describe(divisor)}"
    sentences = (
        f"{case.place} divided by {_what(case)}{shown}; {_form(case)}",
        _epsilon(case, dtype),
    )
    # without an epsilon nothing rounded to 0: SG201 says what was
    no_epsilon = case.facts.eps is None and not case.evidence.eps_underflow
    if no_epsilon and dtype not in NARROW:
        return possible(*sentences)
    return certain(*sentences)


def _what(case: Case) -> str:
    if case.facts.eps is None and base_name(case.evidence.denominator_from) in NORMS:
        return "the norm of a gradient that is 0, with no epsilon beside it"
    return "sqrt(second moment) + eps, which is 0"


def _form(case: Case) -> str:
    # Adam's addcdiv: param += -lr * tensor1 / tensor2, with the first moment as tensor1
    numerator = case.argument("tensor1", 1)
    if numerator is not None and met(numerator) == (0.0, 0.0):
        return "0 / 0 for every element without gradient"
    return "a moment divided by an exact 0"


def _epsilon(case: Case, dtype: str) -> str:
    eps = case.evidence.eps
    if case.facts.eps is not None:
        eps = case.facts.eps
    if eps is None or dtype not in FORMATS:
        return ""
    owner = ""
    if case.facts.optimizer:
        owner = f"{case.facts.optimizer} "
    smallest = f"{FORMATS[dtype].smallest:.3g}"
    return f"{owner}eps={spell(eps)} is 0 in {dtype}, whose smallest positive number is {smallest}"


RULE = Rule(code="SG502", recognise=recognise)
