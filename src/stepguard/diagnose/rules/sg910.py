"""SG910: an infinity that a norm absorbs."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.seen import named, newest_look
from stepguard.records.look import Look, TensorLook

ALL_ZERO = 0.99
SQUARE_OVERFLOWS = 255.0
"""Root mean square from which on squares overflow float16."""


def recognise(case: Case) -> Proof | None:
    look = newest_look(case)
    if look is None:
        return None
    silent = _switched_off(look)
    born = [one for one in look.tensors if _absorbed(one)]
    if not silent and not born:
        return None
    sentences = [_birth(one, look.step) for one in born[:2]]
    if silent:
        return certain(*sentences, f"the output of {named(silent)} is 0")
    return likely(*sentences)


def _absorbed(row: TensorLook) -> bool:
    """One of a backward pass is not: a GradScaler has left the update out."""
    return bool(row.infinities) and row.dtype == "float16" and row.stage == "forward"


def _switched_off(look: Look) -> list[str]:
    """Norms whose input is too large to be squared, and whose output is 0."""
    found = []
    for one in look.norms:
        if one.output_zeros >= ALL_ZERO and one.scale >= SQUARE_OVERFLOWS:
            found.append(one.module)
    return found


def _birth(row: TensorLook, step: int) -> str:
    return (
        f"{row.op.removeprefix('aten.')} in {row.module or 'the loss function'} made "
        f"{row.infinities:,} infinities of finite {row.dtype} numbers at step {step}, and the loss "
        "was finite all the same"
    )


RULE = Rule(code="SG910", recognise=recognise)
