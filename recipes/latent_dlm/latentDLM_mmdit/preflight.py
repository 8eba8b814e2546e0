"""What can be seen before the first step: precision, epsilon, learning rate, and the files of the
data.
"""

from __future__ import annotations

from latentDLM_mmdit.guarded import guard_settings
from latentDLM_mmdit.pairs import folders
from latentDLM_mmdit.session import Session
from stepguard.check.preflight import Subject, check
from stepguard.check.settings import plain

LOOKED_AT = (
    "precision",
    "scaler",
    "optimizer",
    "norm",
    "lr.config",
    "lr.schedule",
    "config.types",
    "config.values",
)


def look_first(session: Session) -> tuple[str, bool]:
    """What to say, and whether the run may start. The run itself is left as it was, bit for bit."""
    alone = session.module
    session.module = session.trainer  # only one rank looks: no collective
    try:
        subject = Subject(
            model=session.trainer,
            optimizer=session.optimizer,
            scheduler=session.schedule,
            loss_fn=session.loss,
            batch=session.batches.at(0),
            config=plain(session.config),
            guard=guard_settings(session, None),
            steps=session.total_steps,
        )
        found = check(subject, only=LOOKED_AT)
    finally:
        session.module = alone
    outcomes = list(found.outcomes)
    places = folders(session.config.data)
    limit = int(session.config.data.initial_scan_limit)
    if places is not None and limit:
        for place in places:
            outcomes += check(
                Subject(data=place, examples=limit), only=("data.finite", "data.unreadable")
            ).outcomes
    lines = []
    for outcome in outcomes:
        if outcome.status in ("fail", "warn"):
            lines += [
                f"{outcome.status}: {outcome.id}: {'; '.join(outcome.evidence)}",
                f"   {outcome.fix}",
            ]
    failed = sum(outcome.status == "fail" for outcome in outcomes)
    passed = sum(outcome.status == "pass" for outcome in outcomes)
    lines.append(f"preflight: {passed} passed, {failed} failed")
    return "\n".join(lines), not failed
