"""SG301: a result beyond the range of half precision."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow, zero_divisor
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.wording import describe, limit_of, spell
from stepguard.records import Remedy

HALF_SCORE = 0.93
DYNAMIC_SCALE = Remedy(
    title="Use a dynamic loss scale (GradScaler): it halves itself until the gradients fit",
    snippet=code(
        """
        scaler = torch.amp.GradScaler('cpu', init_scale=2.0**8)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            loss = layer(x).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        """
    ),
)


def _evidence(case: Case) -> Proof | None:
    if case.overflows_by_scale:
        return _static_scale(case)
    if not case.inputs or case.unselected or not case.short:
        return None
    if case.op in ("exp", "exp2", "expm1", "sinh", "cosh"):
        return _result(case) if case.narrow and case.wider else None
    if case.node == "AccumulateGrad" and case.finite_inputs:
        return _accumulated(case)
    if (case.narrow or case.wider) and (overflow(case) or _backward(case)):
        return _result(case)
    return None


def _backward(case: Case) -> bool:
    """Gradients of any operation overflow half precision as long as nothing was divided by zero."""
    return (
        case.phase == "backward"
        and case.finite_inputs
        and zero_divisor(case) is None
        and bool(case.wider)
    )


def _result(case: Case) -> Proof:
    parts = [
        describe(operand) for operand in case.inputs if operand.dtype and operand.max is not None
    ][:3]
    limit = (
        f"{case.place} has finite operands but a result beyond {limit_of(case.dtype)}{_sum(case)}"
    )
    wider = f"computed in {case.wider} the same operation is finite" if case.wider else ""
    return Proof(confidence=HALF_SCORE, evidence=(limit, *parts, wider, case.confirmed_samples))


def _sum(case: Case) -> str:
    """The very numbers that met, where the operation is simple enough to write down."""
    values = [o.value for o in case.inputs if o.value is not None][:2]
    sign = {"add": "+", "mul": "*", "div": "/"}.get(case.op)
    if sign is None or len(values) < 2:
        return ""
    return f": {spell(values[0])} {sign} {spell(values[1])}"


def _accumulated(case: Case) -> Proof:
    which = (
        f" of micro-batch {case.origin.micro_batch}"
        if case.origin and case.origin.micro_batch is not None
        else ""
    )
    text = (
        f"adding the gradient{which} to those before it exceeds {limit_of(case.dtype)}; each of "
        f"them is finite"
    )
    return Proof(confidence=HALF_SCORE, evidence=(text, *map(describe, case.inputs[:2])))


def _static_scale(case: Case) -> Proof:
    scale = spell(case.reading.scale)
    text = f"the gradients overflow at loss scale {scale} and are finite at scale 1"
    static = case.facts.scaling == "static" or case.verdict.kind == "nonfinite_gradient"
    stays = (
        "the scale is static: skipping the step cures nothing, the next one overflows too"
        if static
        else ""
    )
    confidence = PLAUSIBLE if case.verdict.kind == "scaler_collapse" else 0.95
    return Proof(confidence=confidence, evidence=(text, stays), remedies=(DYNAMIC_SCALE,))


RULE = Rule(
    code="SG301",
    title="half-precision overflow",
    what=prose(
        """
        An operation in half precision has finite operands, but its result exceeds the largest number of the
        dtype: 65504 in float16. The same operation is finite in float32.
        """
    ),
    why=prose(
        """
        float16 covers five decades above 1. Activations of a wide feed-forward layer, unscaled attention
        scores, a mask of finfo.min plus a negative score, a sum over many elements, gradients under a large
        loss scale or added up over micro-batches leave it easily. bfloat16 has the range of float32 and does
        not overflow here.
        """
    ),
    how=prose(
        """
        The operands are finite float16, no zero was divided by, and the result is infinite; where possible
        the operation is repeated in float32 and is finite. For gradients, the step is repeated at loss scale
        1.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Run this layer in float32: leave autocast for it",
            snippet=code(
                """
                with torch.autocast('cpu', dtype=torch.float16):
                    with torch.autocast('cpu', enabled=False):
                        loss = layer(x.float()).pow(2).mean()
                """
            ),
            safety="changes-numbers",
        ),
        Remedy(
            title="Autocast to bfloat16, which has the range of float32 and needs no loss scale",
            snippet=code(
                """
                with torch.autocast('cpu', dtype=torch.bfloat16):
                    loss = layer(x).float().pow(2).mean()
                """
            ),
            safety="changes-numbers",
        ),
        Remedy(
            title="Divide the loss by the number of micro-batches before backward, not the "
            "gradients after",
            snippet=code(
                """
                micro_batches = x.float().split(1)
                loss = sum(layer(part).pow(2).mean() / len(micro_batches) for part in micro_batches)
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        layer = torch.nn.Linear(8, 4, bias=False)
        torch.nn.init.constant_(layer.weight, 200.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        x = torch.full((2, 8), 100.0)
        """
    ),
    bad=code(
        """
        with torch.autocast('cpu', dtype=torch.float16):
            loss = layer(x).float().pow(2).mean()
        """
    ),
    see=(
        "huggingface/transformers#5651",
        "huggingface/transformers#9295",
        "huggingface/transformers#17306",
        "deepspeedai/DeepSpeed#8035",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
)
