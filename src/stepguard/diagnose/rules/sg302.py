"""SG302: a small number that half precision rounds to zero."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import log_argument, zero_divisor
from stepguard.diagnose.case import Case
from stepguard.diagnose.dtypes import FORMATS, rounds_to_zero
from stepguard.diagnose.ops import NORM_LAYERS, words
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.wording import describe, spell
from stepguard.records import Operand, Remedy

GUARDS = words("add clamp clamp_min maximum rsub addcmul")
"""Operations people keep a number above 0 with: x + eps, clamp_min(eps), 1 - t."""


def _evidence(case: Case) -> Proof | None:
    if not case.short or case.phase == "optimizer" or case.unselected:
        return None
    zero = _zero(case)
    if case.evidence.eps_underflow:
        eps = case.evidence.eps
        which = f"eps={spell(eps)}" if eps is not None else "the epsilon"
        first = f"{which} is 0 in {case.dtype}, whose smallest positive number is {_smallest(case)}"
        return Proof(
            confidence=0.96, evidence=(first, _consequence(case, zero), case.confirmed_samples)
        )
    eps_operand = next((o for o in case.inputs if o.name == "eps" and o.value is not None), None)
    if (
        case.op in NORM_LAYERS
        and eps_operand is not None
        and rounds_to_zero(eps_operand.value or 0.0, case.dtype)
    ):
        first = f"{case.place} has eps={spell(eps_operand.value)}, which is 0 in {case.dtype}"
        return Proof(
            confidence=0.9,
            evidence=(first, f"the smallest positive number there is {_smallest(case)}"),
        )
    if zero is None:
        return None
    vanished = case.evidence.eps_vanished
    if vanished is not None:
        first = (
            f"{spell(vanished)}, on the way to this operand, is 0 in {case.dtype}: "
            f"{_smallest(case)} is its smallest"
        )
        return Proof(
            confidence=0.96, evidence=(first, _consequence(case, zero), case.confirmed_samples)
        )
    rounded = (
        f"in {case.dtype} everything up to {_smallest(case)} / 2 is 0, and next to 1 "
        f"everything below {_ulp(case)}"
    )
    made_by = (
        (case.evidence.denominator_from or case.evidence.argument_from or "")
        .removeprefix("aten.")
        .rstrip("_")
    )
    guarded = (
        f"the 0 comes from {made_by}, which was to keep it above 0" if made_by in GUARDS else ""
    )
    confidence = 0.94 if case.wider or guarded else PLAUSIBLE
    return Proof(
        confidence=confidence,
        evidence=(_consequence(case, zero), guarded, rounded, case.confirmed_samples),
    )


def _zero(case: Case) -> Operand | None:
    found = log_argument(case)
    return zero_divisor(case) or (found[0] if found is not None and found[0].zeros else None)


def _consequence(case: Case, zero: Operand | None) -> str:
    return f"{case.place} then met an exact 0: {describe(zero)}" if zero is not None else ""


def _smallest(case: Case) -> str:
    return f"{FORMATS[case.dtype].smallest:.3g}"


def _ulp(case: Case) -> str:
    return f"{2.0 ** -FORMATS[case.dtype].bits:.3g}"


RULE = Rule(
    code="SG302",
    title="half-precision underflow (eps rounds to 0)",
    what=prose(
        """
        A number that protects a division or a logarithm is zero in half precision: 1e-8 does not exist in
        float16 (its smallest number is 6e-8), and 1 - t is 0 in bfloat16 for every t above 0.998.
        """
    ),
    why=prose(
        """
        Epsilons are written for float32 (F.normalize uses 1e-12, many RMSNorms 1e-8), and casting a model or
        a time step to half precision silently switches them off. A probability per sample of 1/512 makes it
        look random.
        """
    ),
    how=prose(
        """
        The operation runs in half precision and divides by, or takes the log of, an exact 0, while the
        epsilon that was added or clamped to rounds to 0 in that dtype, or the same lines are finite in
        float32.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Compute this line in float32 and cast the result back",
            snippet=code(
                """
                wide = x.float()
                unit = (wide / wide.norm(dim=-1, keepdim=True).clamp_min(1e-12)).to(x.dtype)
                loss = (unit * scale).float().pow(2).mean()
                """
            ),
            safety="changes-numbers",
        ),
        Remedy(
            title="Choose the epsilon from the dtype",
            snippet=code(
                """
                unit = torch.nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)
                loss = (unit * scale).float().pow(2).mean()
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        x = torch.zeros(2, 4, dtype=torch.float16)  # a padded row
        x[0] = 1.0
        scale = torch.ones(4, requires_grad=True)
        """
    ),
    bad=code(
        """
        unit = torch.nn.functional.normalize(x, dim=-1)  # eps=1e-12 is 0 in float16
        loss = (unit * scale).float().pow(2).mean()
        """
    ),
    see=(
        "pytorch/pytorch#32137",
        "pytorch/pytorch#41527",
        "huggingface/diffusers#13316",
    ),
)
