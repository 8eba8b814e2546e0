"""SG502: the optimizer's epsilon is zero in the parameters' dtype."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import zero_divisor
from stepguard.diagnose.case import Case, met
from stepguard.diagnose.dtypes import FORMATS, NARROW, rounds_to_zero
from stepguard.diagnose.ops import words
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.wording import describe, spell
from stepguard.records import Remedy

NORMS = words("linalg_vector_norm norm _foreach_norm linalg_norm")
"""What LARS, SAM and normalised descent divide by."""
DIVIDES = words("addcdiv div reciprocal rsqrt _fused_adam _fused_adamw _fused_adagrad")


def _evidence(case: Case) -> Proof | None:
    dtype = case.dtype or next((name for name in case.facts.param_dtypes if name in NARROW), "")
    eps = case.facts.eps
    underflows = eps is not None and (eps == 0.0 or rounds_to_zero(eps, dtype))
    if case.phase == "optimizer" and case.op:
        return _located(case, dtype, underflows)
    born = case.reading.state_born and case.verdict.kind in (
        "nonfinite_parameter",
        "nonfinite_optimizer_state",
    )
    if (case.phase == "optimizer" or case.origin is None) and born and underflows:
        first = f"finite gradients became non-finite weights in the update: {case.verdict.summary}"
        return Proof(confidence=0.91, evidence=(first, _epsilon(case, dtype)))
    return None


def _located(case: Case, dtype: str, underflows: bool) -> Proof | None:
    divisor = zero_divisor(case)
    noted = case.evidence.eps_underflow
    if case.op not in DIVIDES or not (noted or divisor is not None or underflows):
        return None
    numerator = case.argument("tensor1", 1)
    zero_over_zero = numerator is not None and met(numerator) == (0.0, 0.0)
    shown = f": {describe(divisor)}" if divisor is not None else ""
    form = (
        "0 / 0 for every element without gradient"
        if zero_over_zero
        else "a moment divided by an exact 0"
    )
    made_by = (case.evidence.denominator_from or "").removeprefix("aten.")
    normed = made_by in NORMS and case.facts.eps is None
    what = (
        "the norm of a gradient that is 0, with no epsilon beside it"
        if normed
        else "sqrt(second moment) + eps, which is 0"
    )
    first = f"{case.place} divided by {what}{shown}; {form}"
    confidence = 0.98 if noted or underflows else 0.9
    if case.facts.eps is None and not noted and dtype not in NARROW:
        confidence = PLAUSIBLE  # nothing rounded to 0: there is no epsilon
    return Proof(confidence=confidence, evidence=(first, _epsilon(case, dtype)))


def _epsilon(case: Case, dtype: str) -> str:
    eps = case.facts.eps if case.facts.eps is not None else case.evidence.eps
    if eps is None or dtype not in FORMATS:
        return ""
    owner = f"{case.facts.optimizer} " if case.facts.optimizer else ""
    smallest = f"{FORMATS[dtype].smallest:.3g}"
    return f"{owner}eps={spell(eps)} is 0 in {dtype}, whose smallest positive number is {smallest}"


RULE = Rule(
    code="SG502",
    title="optimizer epsilon underflow",
    what=prose(
        """
        Adam divides by sqrt(v) + eps. With parameters in float16, eps=1e-8 is stored as 0, so a weight whose
        gradient is 0 (or whose squared gradient underflows) is updated by 0 / 0 or m / 0. Loss and gradients
        of that step are finite; the weights are NaN after it.
        """
    ),
    why=prose(
        """
        The model was cast with .half() or loaded with torch_dtype=float16 and handed to the optimizer as it
        is. Embedding rows that do not occur and LoRA's zero-initialised half have gradients of exactly 0 at
        once.
        """
    ),
    how=prose(
        """
        Gradients were finite before the update and parameters are not after it; the division in the update
        has a zero divisor and the optimizer's eps rounds to 0 in the dtype of the parameters.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Keep the weights in float32 and let autocast choose half precision for the "
            "arithmetic",
            snippet=code(
                """
                model.float()
                optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
                with torch.autocast('cpu', dtype=torch.bfloat16):
                    loss = model(ids).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                """
            ),
            safety="changes-numbers",
        ),
        Remedy(
            title="Raise eps to what float16 can hold",
            snippet=code(
                """
                optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4, foreach=False)
                loss = model(ids).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        model = torch.nn.Embedding(6, 4).half()
        ids = torch.tensor([1, 2])  # rows 0, 3, 4, 5: gradient 0
        """
    ),
    bad=code(
        """
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)  # eps=1e-8 is 0 in float16
        loss = model(ids).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        """
    ),
    see=(
        "NVIDIA/apex#240",
        "afiaka87/glide-finetune#5",
        "jinxixiang/magic_animate_unofficial#6",
    ),
)
