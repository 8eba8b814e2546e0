"""SG208: a kernel that no tracer can look into turned finite values into NaN or Inf."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely, possible
from stepguard.diagnose.wording import counts
from stepguard.records import Operand

KINDS = {
    "function": "a custom autograd function",
    "operator": "an operator from outside torch",
    "module": "a module that computes outside torch's operations",
    "code": "code that writes tensors outside torch's operations",
    "fused": "one of torch's fused kernels",
}
FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_", "miopen_")
"""Operations of torch's own that compute many steps in one kernel."""


def recognise(case: Case) -> Proof | None:
    kind: str | None = case.evidence.opaque
    prove = likely
    if kind is None and case.op.startswith(FUSED) and case.inputs and case.finite_inputs:
        # a row that is masked throughout is SG204, an overflow SG301: those say more
        kind, prove = "fused", possible
    if kind is None or case.origin is None:
        return None
    went_in = "every tensor that went in is finite"
    if not case.inputs:
        went_in = "no bad tensor went in"
    elif not case.finite_inputs:
        went_in = "no NaN went in"
    out = case.output
    made = "what came out is not finite" if out is None else f"what came out holds {counts(out)}"
    return prove(
        f"{case.place} is {KINDS[kind]}: {went_in}, {made}",
        _shapes(case),
        "no operation inside its kernel could be observed",
        case.confirmed_samples,
    )


def _shapes(case: Case) -> str:
    """Which shapes and dtypes the kernel was called with."""
    given = [_shape(operand) for operand in case.inputs if operand.dtype]
    if not given:
        return ""
    way = "with the gradient" if case.phase == "backward" else "with"
    made = "" if case.output is None else f" and returned {_shape(case.output)}"
    return f"it was called {way} {', '.join(given)}{made}"


def _shape(operand: Operand) -> str:
    sizes = ",".join(map(str, operand.shape))
    reaches = "" if operand.max is None else f" from {operand.min:.4g} to {operand.max:.4g}"
    return f"{operand.dtype} [{sizes}]{reaches}"


RULE = Rule(code="SG208", recognise=recognise, shown_by="inference")
