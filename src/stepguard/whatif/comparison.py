"""Try every candidate for an incident on the steps that led to it, and rank them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stepguard.records.whatif import TrialOutcome, WhatIf
from stepguard.state.steps_before import WindowStep
from stepguard.whatif.candidates import NOTHING, Candidate, OwnFix, candidates
from stepguard.whatif.ranking import judged_by, ranked
from stepguard.whatif.subject import TrialSubject
from stepguard.whatif.trial import Trials
from stepguard.whatif.undone import undone

MOST_STEPS = 32
"""Steps before the bad one that every candidate trains; what lies before is trained once."""
SAME_LOSS = 1e-3

Progress = Callable[[int, int, str], None]
"""Told how many trials are done, of how many, and the name of the next."""
Wanted = Callable[[Candidate], bool]
Adapt = Callable[[Candidate], Candidate]


def compare_candidates(
    subject: TrialSubject,
    *,
    own: OwnFix | None = None,
    wanted: Wanted = lambda candidate: True,
    adapt: Adapt = lambda candidate: candidate,
    usual_norm: float | None = None,
    most_steps: int = MOST_STEPS,
    progress: Progress = lambda done, total, name: None,
) -> WhatIf:
    """Run the trials and rank them. Model, optimizer and random numbers end as they began.

    `wanted`: which candidates to try; `adapt` changes each before its trial. `usual_norm`: of the
    gradients, where the steps before the bad one do not tell. Raises StateError where the state
    cannot be copied.
    """
    with undone(subject.step, subject.run_state):
        trials = Trials(subject, most_steps)
        progress(0, 1, "the steps as they were")
        healthy = judged_by(*trials.healthy())
        again = trials.lead_up()
        waiting = [NOTHING]
        waiting += candidates(
            subject.step.optimizer,
            subject.incident,
            subject.bad,
            way=trials.steps,
            usual_norm=trials.usual_norm or usual_norm,
            own=own,
        )
        waiting = [adapt(candidate) for candidate in waiting if wanted(candidate)]
        outcomes: list[TrialOutcome] = []
        for number, candidate in enumerate(waiting):
            progress(number, len(waiting), candidate.label)
            outcomes.append(trials.run(candidate))
        progress(len(waiting), len(waiting), "")
        steps = trials.steps
    recorded = [one.loss for one in steps if one.loss is not None]
    incident = subject.incident
    return WhatIf(
        incident=incident.id,
        step=incident.step,
        summary=incident.verdict.summary or incident.verdict.kind,
        first=steps[0].index if steps else subject.bad.index,
        window=len(steps),
        after=len(subject.after),
        held_out=len(subject.held_out),
        outcomes=tuple(ranked(outcomes, recorded, healthy)),
        remarks=tuple(_remarks(subject, steps, again)),
    )


def _remarks(
    subject: TrialSubject, steps: Sequence[WindowStep], again: Sequence[float]
) -> list[str]:
    """What to know before believing the table."""
    remarks: list[str] = []
    if not steps:
        remarks.append("no step before the bad one could be run again: trials begin with it")
    for one, loss in zip(steps, again, strict=False):
        if one.loss is not None and not math.isclose(one.loss, loss, rel_tol=SAME_LOSS):
            remarks.append(
                f"step {one.index} gives loss {loss:.4g} when run again, in training it was "
                f"{one.loss:.4g}: the loss depends on more than the batch"
            )
            break
    if not subject.after:
        remarks.append("nothing could be trained after the bad step: a later failure is not seen")
    elif subject.after[0].index < subject.bad.index:
        remarks.append("after the bad step, batches from before it are trained once more")
    if subject.failed_before:
        failed = ", ".join(str(one.index) for one in subject.failed_before)
        remarks.append(f"among them step {failed}, which failed as well")
    return remarks
