"""Run the bad step with each code fix before it is offered.

A fix is written into the user's own line, in memory, and the step is run with it as a replay is:
same batch, weights, buffers and random numbers, and everything is put back afterwards. It is
offered as tried if loss and gradients are finite and what was finite before has kept its value.
Where the step then fails at another place (the root that a divisor came from), the fix of that
place is added and both are tried together.
"""

from __future__ import annotations

import ast
import linecache
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import CapsuleError, ConfigError, StateError
from stepguard.diagnose import RunFacts, diagnose
from stepguard.diagnose.source_line import import_of, name_operands
from stepguard.engine.context import Context, bare_step
from stepguard.engine.incident.situation import as_window, why_not
from stepguard.engine.recover.snapshots import SnapshotKeeper
from stepguard.locate.find_origin import search
from stepguard.locate.live_trace import origin_of
from stepguard.locate.replay import ModelReplayer, Replayer, ReplayError, kept_loss_function_state
from stepguard.locate.replay_state import LocateBudget
from stepguard.locate.source import SEEN, PatchError, difference, edited, with_files
from stepguard.records import Action, Decision, Edit, Finding, Incident, Remedy, Statement
from stepguard.records.probes import TrialOutcome, WhatIf
from stepguard.report import probes as table
from stepguard.report.phrases import count
from stepguard.sentinel.gradients import gradient_norm
from stepguard.state.batch import Step
from stepguard.state.capsule import Window, WindowStep, read_capsule, read_window
from stepguard.state.isolation import untouched
from stepguard.state.rng import kept_rng
from stepguard.tensors.values import HALVES
from stepguard.whatif.candidates import Candidate, OwnFix, no_worse
from stepguard.whatif.trial import LeadUp, TrialSubject, compare_candidates, copied_state

# --- Run the bad step with each code fix before it is offered.


FINITE = "tried on this step: loss and gradients finite"
MODEL_FINITE = "tried on the model's part of this step: outputs and gradients finite"
NO_LOSS = "the loss expression cannot be run again (guard.loss(loss_fn, batch) makes it so)"
NO_TIME = "running the step once more would exceed locate_budget"
NOT_BEYOND = "not verified beyond this step"
NONE_MENDS = (
    "Change this line by hand: the changes that stepguard knows were run and do not mend this "
    "step; `stepguard explain {code}` shows how the cause is usually removed"
)
MOST_ROUNDS = 3
"""Places that one fix may change, one after the other."""
TRACE = 4.0
"""What a traced run is taken to cost, in runs of the step."""
ROUNDING = 1e-3
ROUNDING_OF_HALF = 2e-2
ROUNDING_OF_LOSS = 1e-3
FAR_ABOVE = 1e6
"""Times the losses of the run so far."""
MOST_CHANGE = 0.1
"""Of a value that was fine, by a fix that is known to change some."""


class _NoFixError(Exception):
    """The step is not mended by this fix."""


@dataclass(slots=True)
class _Draft:
    """The user's files with a fix in them."""

    remedy: Remedy
    titles: list[str]
    needs: set[str]
    files: dict[str, list[str]] = field(default_factory=dict)

    def add(self, remedy: Remedy) -> None:
        """Write one more change into the files."""
        for edit in remedy.edits:
            lines = self.files.get(edit.file) or linecache.getlines(edit.file)
            self.files[edit.file] = edited(lines, [edit])
        self.needs.update(remedy.needs)

    def finished(self, tried: str, loss: float | None) -> Remedy:
        """The remedy with all changes, and what came of it."""
        edits: list[Edit] = []
        for file, lines in self.files.items():
            edits += difference(file, linecache.getlines(file), lines)
        needs = tuple(sorted(self.needs))
        code = [line for edit in edits for line in edit.new]
        if len(self.titles) == 1 and self.remedy.snippet:
            snippet = self.remedy.snippet
        else:
            snippet = "\n".join(([import_of(needs)] if needs else []) + [c.strip() for c in code])
        return replace(
            self.remedy,
            title="; and ".join(self.titles),
            snippet=snippet,
            edits=tuple(edits),
            needs=needs,
            tried=tried,
            proven=True,
            loss=loss,
        )


def try_remedies(incident: Incident, step: Step, facts: RunFacts, budget: LocateBudget) -> Incident:
    """The incident whose code fixes have been run, or say why not. The step ends as it began.

    Only the fixes of the first finding are run, until one mends the step; those that do not mend it
    are left out.
    """
    if not any(remedy.edits for finding in incident.findings for remedy in finding.remedies):
        return incident
    first, *others = incident.findings
    others = [_not_tried(finding, "another cause is likelier") for finding in others]
    why_not = _why_not(incident, step)
    if why_not or not any(remedy.edits for remedy in first.remedies):
        first = _not_tried(first, why_not)
    else:
        with untouched(step) as keeper, kept_loss_function_state(step) as own:
            replayer = Replayer(step, keeper, budget)
            if step.model_only:
                replayer = ModelReplayer(step, keeper, budget)
                replayer.any_gradient = True
            replayer.loss_fn_state = own
            kept = _Trial(replayer, incident, facts).of_all(first.remedies)
        if not kept:
            kept = [Remedy(title=NONE_MENDS.format(code=first.code))]
        first = replace(first, remedies=tuple(kept))
    return replace(incident, findings=(first, *others))


def _not_tried(finding: Finding, why: str) -> Finding:
    remedies = [
        replace(remedy, tried=f"not tried: {why}") if remedy.edits else remedy
        for remedy in finding.remedies
        if remedy.snippet or not remedy.edits
    ]
    return replace(finding, remedies=tuple(remedies))


def _why_not(incident: Incident, step: Step) -> str:
    origin = incident.origin
    if origin is None or origin.statement is None:
        return "the place is not known exactly"
    if origin.rank is not None and origin.rank != incident.rank:
        return f"rank {origin.rank} has the batch"
    if step.sharded and not step.gathered:
        return "the model is sharded"
    if origin.phase not in ("input", "forward", "loss", "backward"):
        return "forward and backward are run on trial, not an update"
    if origin.method == "live" or not (step.replayable or step.model_only):
        return NO_LOSS
    if not origin.reproduced:
        return "the replay does not show the bad value again"
    return ""


class _Trial:
    """Runs one step with other lines; use it inside `untouched`."""

    def __init__(self, replayer: Replayer, incident: Incident, facts: RunFacts) -> None:
        self._replayer = replayer
        self._incident = incident
        self._facts = facts

    def of_all(self, remedies: Sequence[Remedy]) -> list[Remedy]:
        """What to offer: code fixes up to the first that mends the step, and all that is words."""
        kept: list[Remedy] = []
        proven = False
        steep: list[Remedy] = []
        waiting = list(remedies)
        while waiting:
            remedy = waiting.pop(0)
            if not remedy.edits:
                kept.append(remedy)
                continue
            outcome = None if proven else self.outcome(remedy)
            if outcome is None:
                continue
            if not outcome.proven and outcome.loss is not None:
                # it is shown only where no other holds
                steep.append(outcome)
                continue
            proven = outcome.proven
            # A fix that is not shown untried may be followed by the same in words.
            if proven or remedy.snippet:
                kept.append(outcome)
            if proven and not remedy.snippet and waiting and not waiting[0].edits:
                waiting.pop(0)
        return kept if proven else kept + steep[:1]

    def outcome(self, remedy: Remedy) -> Remedy | None:
        """The remedy with what it came to; None where the step stays bad with it."""
        draft = _Draft(remedy, [remedy.title], set())
        try:
            draft.add(remedy)
            return self._judged(draft, remedy, self._loss_once_finite(draft))
        except (_NoFixError, ReplayError):
            return None
        except PatchError as why:
            return replace(remedy, tried=f"not tried: {why}")

    def _loss_once_finite(self, draft: _Draft) -> float | None:
        """Run the step, with further changes where it is bad at another place, until it is fine.

        Raises _NoFixError where it stays bad, and PatchError where there is no time to run it.
        """
        budget = self._replayer.budget
        for round_ in range(1, MOST_ROUNDS + 1):
            if not budget.affords(1.0):
                raise PatchError(NO_TIME)
            with with_files(draft.files, draft.needs):
                loss, bad = self._run()
                if bad is None:
                    return loss
                further = None
                if round_ < MOST_ROUNDS and budget.affords(TRACE):
                    further = self._next_fix(bad)
            if further is None:
                break
            draft.add(further)
            draft.titles.append(further.title)
        raise _NoFixError

    def _judged(self, draft: _Draft, remedy: Remedy, loss: float | None) -> Remedy:
        """The remedy of a step that is finite with it. Raises _NoFixError if it is no mend."""
        usual = max(map(abs, self._facts.losses), default=math.inf)
        if remedy.safety != "safe" and abs(loss or 0.0) > FAR_ABOVE * max(usual, 1.0):
            # finite, but a bound of ours that leaves such a loss mends nothing
            raise _NoFixError
        told = MODEL_FINITE if self._replayer.step.model_only else FINITE
        changed = self._changed(draft, loss)
        if changed > 0.0:
            if remedy.safety == "safe" or changed > MOST_CHANGE:
                raise _NoFixError
            told += f"; values that were fine change by up to {changed:.2g}"
        mended = draft.finished(told, loss)
        # A bound of ours is arbitrary, and it takes the gradient away from what is beyond it.
        name = "" if remedy.safety == "safe" else self._moved_too_far()
        if name:
            told += f", but `{name}` would move by more than its own size: {NOT_BEYOND}"
            mended = replace(mended, tried=told, proven=False)
        return mended

    def _moved_too_far(self) -> str:
        """A parameter that the gradients of the mended step would throw far off; else empty.

        Only for plain gradient descent, whose update is the rate times the gradient.
        """
        replayer = self._replayer
        rates = {
            id(parameter): float(group["lr"])
            for group in replayer.step.optimizer.param_groups
            for parameter in group["params"]
        }
        if not isinstance(replayer.step.optimizer, torch.optim.SGD):
            return ""
        clip = replayer.step.clip_norm or math.inf
        for name, parameter in replayer.parameters.items():
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                continue
            moves = rates.get(id(parameter), 0.0) * min(float(parameter.grad.norm()), clip)
            size = max(float(parameter.detach().norm()), math.sqrt(parameter.numel()))
            if moves > size:
                return name
        return ""

    def _run(self) -> tuple[float | None, int | None]:
        """The loss of the whole step, and its first bad micro-batch; None where all are fine."""
        replayer = self._replayer
        replayer.clear_gradients()
        total = 0.0
        for micro in range(len(replayer.step.micro_batches)):
            ran = replayer.run(micro)
            if not ran.clean:
                return None, micro
            if ran.loss is not None and not replayer.step.model_only:
                total += float(ran.loss)
        # a guard refuses gradients whose norm overflows, so a fix must not end there
        norm = gradient_norm([p.grad for p in replayer.parameters.values() if p.grad is not None])
        if norm is not None and not math.isfinite(float(norm.total)):
            raise _NoFixError
        return (None if replayer.step.model_only else total), None

    def _next_fix(self, micro: int) -> Remedy | None:
        """What to change beside, by where the changed step is bad."""
        replayer = self._replayer
        replayer.clear_gradients()
        traced, found = search(replayer, micro, replayer.step.micro_batches[micro])
        if found is None:
            return None
        origin = name_operands(origin_of(found, traced, replayer))
        loss = 0.0 if traced.ran.loss_finite else math.nan
        reading = replace(
            self._incident.reading,
            loss=loss,
            micro_losses=(),
            grads_finite=traced.ran.grads_finite,
        )
        found_now = diagnose(replace(self._incident, origin=origin, reading=reading), self._facts)
        for remedy in found_now[0].remedies if found_now else ():
            if remedy.edits:
                return remedy
        return None

    def _changed(self, draft: _Draft, loss: float | None) -> float:
        """How far values that were finite have moved, relative; 0 where only by rounding."""
        incident = self._incident
        assert incident.origin is not None
        of_loss = 0.0
        before = incident.reading.loss
        if loss is not None and before is not None and math.isfinite(before):
            of_loss = abs(loss - before) / max(abs(before), 1e-6)
            of_loss = of_loss if of_loss > ROUNDING_OF_LOSS else 0.0
        if incident.origin.evidence.unselected:
            # nobody has seen the values of that branch
            return of_loss
        statement = incident.origin.statement
        assert statement is not None
        was = linecache.getlines(statement.file)
        old = _wrapped(statement, was)
        new = _wrapped(statement, draft.files.get(statement.file, was))
        if old is None or new is None or not self._replayer.budget.affords(1.0):
            return of_loss
        values = []
        for files in ({statement.file: old}, {**draft.files, statement.file: new}):
            seen: list[Tensor] = []
            with with_files(files, draft.needs, **{SEEN: _remember(seen)}):
                self._replayer.run(incident.origin.micro_batch or 0, backward=False)
            values.append(seen)
        # Where one expression is all that has changed, its own values say more than a loss near 0.
        return max(_moved(*values), of_loss if len(draft.titles) > 1 else 0.0)


def _remember(seen: list[Tensor]) -> Any:
    def look(value: Any) -> Any:
        seen.append(torch.as_tensor(value).detach().clone())
        return value

    return look


def _wrapped(statement: Statement, lines: Sequence[str]) -> list[str] | None:
    """The lines with a look at the value of the operation; None where more than it has changed."""
    first = statement.line - 1
    count = statement.text.count("\n") + 1
    old = statement.text.encode()
    now = "".join(lines[first : first + count]).rstrip("\n").encode()
    before, after = old[: statement.start], old[statement.end :]
    if not now.startswith(before) or not now.endswith(after):
        return None
    inside = now[len(before) : len(now) - len(after)].decode()
    try:
        ast.parse(f"({inside})", mode="eval")
    except SyntaxError:
        return None  # a statement, as `y /= x` is, has no value
    text = f"{before.decode()}{SEEN}({inside}){after.decode()}\n"
    new = text.splitlines(keepends=True)
    return [*lines[:first], *new, *["\n"] * (count - len(new)), *lines[first + count :]]


def _moved(old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """The largest relative change of an element that was finite, up to the first bad value.

    What is computed after a bad value may have been spoiled by it.
    """
    most = 0.0
    for was, now in zip(old, new, strict=False):
        if was.shape != now.shape:
            return math.inf
        if was.is_complex():
            was, now = torch.view_as_real(was), torch.view_as_real(now)
        fine = torch.isfinite(was)
        tolerated = ROUNDING_OF_HALF if was.dtype in HALVES else ROUNDING
        kept, present = was[fine].double(), now[fine].double()
        if kept.numel():
            # bounded slopes cost a little at the pole itself, where the value may be 0
            scale = kept.abs() + kept.abs().max().clamp_min(1.0)
            moved = float(((present - kept).abs() / scale).max())
            if not moved <= tolerated:
                most = max(most, moved) if math.isfinite(moved) else math.inf
        if not bool(fine.all()):
            break
    return most


# --- Try, on the way that led to the last incident, what would have helped.


NOTHING_MOVED = ("skip", "undo", "stop")
"""Decisions after which the weights are those that the bad step began from."""


def try_what_helps(context: Context, snapshots: SnapshotKeeper, own: OwnFix | None) -> WhatIf:
    """Try the candidates for the last incident, and show what they came to.

    Raises ConfigError with the reason where it cannot.
    """
    if not context.incidents:
        raise ConfigError("there is no incident yet: whatif looks at what went wrong.")
    subject = _subject(context, snapshots)
    quiet = context.config.terminal != "auto"
    try:
        with kept_rng(), table.progress_bar(None if quiet else sys.stderr) as progress:
            found = compare_candidates(subject, own=own, progress=progress)
    except StateError as why:
        raise ConfigError(f"whatif cannot copy the state of this run: {why}") from None
    if not quiet:
        table.show(found, sys.stdout)
    return found


def _subject(context: Context, snapshots: SnapshotKeeper) -> TrialSubject:
    """The last bad step; of several in a row, the first."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != context.incidents[-1].id:
        why = why_not(context, bare_step(context))
        raise ConfigError(why or "nothing was kept of the last incident to try anything on.")
    failed = [*lead_up.failed_before, lead_up.bad]
    lead_up = lead_up.first or lead_up
    failed = [one for one in failed if one.index != lead_up.bad.index]
    incident = next(one for one in context.incidents if one.id == lead_up.incident)
    window = _window(context, snapshots, lead_up, incident)
    following = lead_up.bad.index + 1
    failed_next = any(one.step == following for one in context.incidents)
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
        failed_before=failed if _by_no_sample(incident) else [],
        failed_next=following if failed_next else None,
    )


def _by_no_sample(incident: Incident) -> bool:
    """Is neither a sample nor the batch to blame, so that any batch may fail?"""
    if incident.reading.bad_inputs or incident.origin is None:
        return False
    return not incident.origin.samples


def _window(
    context: Context, snapshots: SnapshotKeeper, lead_up: LeadUp, incident: Incident
) -> Window:
    """The steps in memory; else, once the run has gone on, those on disk."""
    later = [kept for kept in snapshots.kept.intact() if kept.step.index > lead_up.bad.index]
    others = [*lead_up.earlier, *as_window(later)]
    snapshot = lead_up.snapshot
    if snapshot is not None and not snapshot.overwritten:
        return Window(start=snapshot.state, steps=lead_up.steps, others=others)
    if _nothing_moved_since(context, lead_up, incident):
        return Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    if incident.capsule is not None and incident.run is not None:
        return window_on_disk(Path(incident.run) / incident.capsule, others)
    raise ConfigError(
        "the state before the incident is gone: call guard.whatif() sooner, or give "
        "GuardConfig(run_dir=...), so that it is kept on disk."
    )


def _nothing_moved_since(context: Context, lead_up: LeadUp, incident: Incident) -> bool:
    """Are the present weights still those that the bad step began from?"""
    decision = incident.decision
    if decision is None or decision.action not in NOTHING_MOVED or decision.rewound_to is not None:
        return False
    unmoved = context.history.committed == lead_up.committed
    return unmoved or context.step - lead_up.bad.index in (0, 1)


def window_on_disk(capsule: Path, others: list[WindowStep]) -> Window:
    """What a capsule keeps of the way to its step; at least the state before it."""
    try:
        window = read_window(capsule)
        if window is None:
            content = read_capsule(capsule)
            window = Window(start=content.saved_state(), steps=[])
    except CapsuleError as why:
        raise ConfigError(f"the state before the incident is gone from memory, and {why}") from None
    return replace(window, others=[*window.others, *others])


# --- `Policy(on_incident="whatif")`: try what helps before deciding, and do the cheapest that
# works.


MOST_TRIED = 20
"""Incidents of a run that are tried: one that fails all the time must not spend its time on it."""
DROPS_THE_STEP = ("skip", "undo", "leave_out")
APPLICABLE = ("leave out", "skip", "eps", "clip", "lr x0.5", "lr x0.1")
"""What a guard can do by itself, and take back by a rewind."""
RATES = {"lr x0.5": 0.5, "lr x0.1": 0.1}


def what_helps(
    context: Context, snapshots: SnapshotKeeper, incident: Incident, decision: Decision
) -> Decision:
    """The decision after trials: the same, or one that was seen to work. The journal says why."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != incident.id or len(context.incidents) >= MOST_TRIED:
        return decision
    if decision.action in DROPS_THE_STEP:
        return _instead_of_skipping(context, snapshots, incident, decision, lead_up)
    if decision.action == "rewind":
        # A rewind that would come to the same end: with which lower rate would it not?
        assert decision.rewound_to is not None
        snapshot = snapshots.at(decision.rewound_to)
        kept = snapshots.kept.since(decision.rewound_to)
        if snapshot is None or not kept or decision.lr_factor is not None:
            return decision
        window = Window(start=snapshot.state, steps=as_window(kept), others=lead_up.earlier)
        found = compare_candidates(
            _whatif_decision_subject(snapshots, incident, lead_up, window),
            wanted=lambda candidate: candidate.name == "nothing" or candidate.name in RATES,
        )
        best = _cheapest(found.outcomes)
        _tell(context, found, best)
        if best is None or best.name not in RATES:
            return decision
        # other weights come of a lower rate, so the steps since cannot be run again as they were
        return replace(decision, lr_factor=RATES[best.name], data="skip", reason=_why(found, best))
    return decision


def _instead_of_skipping(
    context: Context,
    snapshots: SnapshotKeeper,
    incident: Incident,
    decision: Decision,
    lead_up: LeadUp,
) -> Decision:
    """From the present weights: what keeps the bad value away in the steps that follow?"""
    # a batch that failed just before is what may come next
    others = [*lead_up.earlier, *lead_up.steps, *lead_up.failed_before]
    if not others:
        return decision
    window = Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    norms = context.history.norms
    found = compare_candidates(
        _whatif_decision_subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name in APPLICABLE,
        adapt=_without_the_step,
        usual_norm=statistics.median(norms) if norms else None,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None:
        return decision
    # what was seen to work, as far as it is another thing than what was decided
    why = _why(found, best)
    if best.name == "leave out":
        if decision.action == "leave_out":
            return replace(decision, reason=why)
        return decision
    dropped: Action = "undo" if decision.action == "undo" else "skip"
    told = replace(decision, action=dropped, left_out="the step", reason=why)
    if best.name in RATES:
        return replace(told, lr_factor=RATES[best.name])
    if best.name == "eps":
        return replace(told, new_eps=best.value)
    if best.name == "clip":
        return replace(told, new_clip=best.value)
    return told


def _without_the_step(candidate: Candidate) -> Candidate:
    """What is changed for the steps that follow; the bad one is dropped in any case."""
    if candidate.rows or candidate.micro_batches:
        return candidate
    return replace(candidate, skip=True)


def _cheapest(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    """The cheapest one that works and ends no higher than skipping does."""
    working = sorted((one for one in outcomes if one.works), key=lambda one: one.cost)
    skipped = [one for one in working if one.name == "skip"]
    for one in working:
        if not skipped or no_worse(one, skipped[0]):
            return one
    return None


def _whatif_decision_subject(
    snapshots: SnapshotKeeper, incident: Incident, lead_up: LeadUp, window: Window
) -> TrialSubject:
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
    )


def _why(found: WhatIf, best: TrialOutcome) -> str:
    failed = [one.name for one in found.outcomes if not one.works and one.cost < best.cost]
    said = f"whatif: {best.label} keeps the bad value away for {count(found.after, 'step')}"
    if failed:
        said += f"; not so {', '.join(failed)}"
    return said


def _tell(context: Context, found: WhatIf, best: TrialOutcome | None) -> None:
    said = "nothing that was tried helps" if best is None else _why(found, best)
    trials = [
        {
            "name": one.name,
            "works": one.works,
            "bad_value": one.bad_value,
            "loss": one.loss,
            "held_out": one.held_out,
        }
        for one in found.outcomes
    ]
    context.outputs.note(
        "whatif", said.removeprefix("whatif: "), step=found.step, trials=trials, steps=found.steps
    )
