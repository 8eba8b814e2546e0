"""SG403: an infinity that forward swallowed and backward turned into NaN."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import DIVISIONS, LOGS, overflow
from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.ops import EXPONENTIALS
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.rules.sg202 import SATURATING
from stepguard.diagnose.wording import counts, describe
from stepguard.records import Remedy

POLES = frozenset(DIVISIONS) | EXPONENTIALS | {"pow", "float_power", "tan", "cosh", "sinh"}


def _evidence(case: Case) -> Proof | None:
    if case.unselected:
        return None
    if case.phase == "backward":
        return _in_backward(case)
    if not case.absorbed or not case.forward or not case.makes_inf:
        return None
    swallowed_by = (case.evidence.absorbed_by or "").removeprefix("aten.").rstrip("_")
    if (case.op in POLES and not (case.short and overflow(case))) or (
        case.op in LOGS and swallowed_by in SATURATING
    ):
        confidence = 0.94
    elif case.evidence.absorbed:
        confidence = PLAUSIBLE + 0.1
    else:
        return None
    return Proof(
        confidence=confidence, evidence=(*_numbers(case, swallowed_by), case.confirmed_samples)
    )


def _numbers(case: Case, swallowed_by: str) -> tuple[str, ...]:
    made = ""
    if case.output is not None:
        made = ", ".join(
            part for part in (counts(case.output, kind) for kind in ("posinf", "neginf")) if part
        )
    by = f" ({swallowed_by})" if swallowed_by else ""
    cause = next(
        (describe(o) for o in case.inputs if has_zero(o)),
        describe(case.inputs[0]) if case.inputs else "",
    )
    first = f"{case.place} makes an infinity in forward" + (f": {made}" if made else "")
    return (
        first,
        f"a later operation{by} turns it into a finite number, backward multiplies it by 0",
        cause,
    )


def _in_backward(case: Case) -> Proof | None:
    infinite = next((o for o in case.inputs if o.posinf or o.neginf), None)
    noted = case.evidence.absorbed
    if not noted and (infinite is None or not case.loss_finite or any(o.nan for o in case.inputs)):
        return None
    if not noted and not any(has_zero(o) for o in case.inputs):
        return None
    detail = describe(infinite) if infinite is not None else ""
    text = f"{case.place} met a value that was infinite in forward although the loss is finite"
    return Proof(
        confidence=0.95 if noted else 0.86, evidence=(text, detail, case.confirmed_samples)
    )


RULE = Rule(
    code="SG403",
    title="infinity absorbed in forward, NaN in backward",
    what=prose(
        """
        An operation made an infinity, a saturating function turned it into a harmless number (erf(inf) = 1, 1
        / inf = 0, exp(-inf) = 0), and the loss is finite. Backward multiplies the saturated slope 0 by the
        infinite one: NaN.
        """
    ),
    why=prose(
        """
        A divisor or exponent reached its limit for one sample: erf(1 / s) with s = 0, a hand-written sigmoid
        1 / (1 + exp(-x)) with a large -x, exp(-d / 0). Forward checks and loss checks cannot see it.
        """
    ),
    how=prose(
        """
        In the replay an operation with finite operands makes an infinity, the loss is finite, and the
        gradients are NaN through that very place.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Use the built-in that has this limit built in (sigmoid, softplus, expm1, "
            "logaddexp)",
            snippet="loss = torch.sigmoid(x).sum()",
        ),
        Remedy(
            title="Bound the argument where the function has long saturated",
            snippet="loss = (1 / (1 + torch.exp((-x).clamp_max(80.0)))).sum()",
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        x = torch.tensor([0.5, -200.0], requires_grad=True)
        """
    ),
    bad="loss = (1 / (1 + torch.exp(-x))).sum()  # exp(200) = inf, 1 / inf = 0: looks right",
    see=("SuLvXiangXin/zipnerf-pytorch#54",),
)
