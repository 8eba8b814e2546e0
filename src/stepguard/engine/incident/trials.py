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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stepguard.diagnose import RunFacts, diagnose
from stepguard.diagnose.source_line import import_of, name_operands
from stepguard.locate.find_origin import search
from stepguard.locate.origins import origin_of
from stepguard.locate.replay import LocateBudget, Replayer, ReplayError, replaying
from stepguard.locate.source import SEEN, PatchError, difference, edited, with_files
from stepguard.records import Edit, Finding, Incident, Remedy, Statement
from stepguard.sentinel.gradients import gradient_norm
from stepguard.state.batch import Step
from stepguard.tensors.names import names_by_id
from stepguard.tensors.values import HALVES

# --- Run the bad step with each code fix before it is offered.


FINITE = "tried on this step: loss and gradients finite"
MODEL_FINITE = "tried on the model's part of this step: outputs and gradients finite"
NO_LOSS = "the loss expression cannot be replayed (compute it with guard.loss(loss_fn, batch))"
NO_TIME = "running the step once more would exceed locate_budget"
NOT_BEYOND = "not verified beyond this step"
NONE_MENDS = (
    "Change this line by hand: the changes that stepguard knows were tried and do not fix "
    "this step; `stepguard explain {code}` shows the usual fixes"
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
"""Largest change of a healthy value that a value-changing fix may make."""


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
        with replaying(step, budget) as replayer:
            replayer.any_gradient = step.model_only
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
        return "a trial runs forward and backward, not the update"
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
            # The remedy of a step that is finite with it. Raises _NoFixError if it is no mend.
            loss = self._loss_once_finite(draft)
            usual = max(map(abs, self._facts.losses), default=math.inf)
            if remedy.safety != "safe" and abs(loss or 0.0) > FAR_ABOVE * max(usual, 1.0):
                # finite, but a bound of ours that leaves such a loss mends nothing
                raise _NoFixError
            told = MODEL_FINITE if self._replayer.step.model_only else FINITE
            changed = self._changed(draft, loss)
            if changed > 0.0:
                if remedy.safety == "safe" or changed > MOST_CHANGE:
                    raise _NoFixError
                told += f"; healthy values change by up to {changed:.2g}"
            mended = draft.finished(told, loss)
            # A bound of ours is arbitrary, and it takes the gradient away from what is beyond it.
            name = "" if remedy.safety == "safe" else self._moved_too_far()
            if name:
                told += f", but `{name}` would move by more than its own size: {NOT_BEYOND}"
                mended = replace(mended, tried=told, proven=False)
            return mended
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

    def _moved_too_far(self) -> str:
        """A parameter that the gradients of the mended step would throw far off; else empty.

        Only for plain gradient descent, whose update is the rate times the gradient.
        """
        step = self._replayer.step
        if not isinstance(step.optimizer, torch.optim.SGD):
            return ""
        clip = step.clip_norm or math.inf
        names = names_by_id(self._replayer.parameters.items())
        for group in step.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    continue
                moves = float(group["lr"]) * min(float(parameter.grad.norm()), clip)
                size = max(float(parameter.detach().norm()), math.sqrt(parameter.numel()))
                if moves > size:
                    return names.get(id(parameter), "")
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
        origin = name_operands(origin_of(found, traced, replayer.step))
        loss = 0.0 if traced.ran.loss_finite else math.nan
        reading = replace(
            self._incident.reading,
            loss=loss,
            micro_losses=(),
            grads_finite=not traced.ran.bad_gradients,
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
