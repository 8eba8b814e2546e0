"""SG703: only the compiled graph makes it."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain


def recognise(case: Case) -> Proof | None:
    # inductor fuses and reorders, so its rounding and its masks may differ from eager's
    if not case.evidence.compiled_only:
        return None
    first = (
        "the compiled step is non-finite again; the same step run eagerly on the same weights "
        "and batch is finite"
    )
    return certain(first, case.verdict.summary)


RULE = Rule(code="SG703", recognise=recognise, shown_by="record")
