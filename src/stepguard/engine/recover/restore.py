"""Restore a run from a sealed checkpoint, passing over damaged ones and ones that led to a stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepguard._errors import StateError, StepguardError, StoreError
from stepguard.checkpoints import Background, Entry, Health, Opened, PassedOver, Select, Store
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import scale_rates
from stepguard.engine.incident.samples import skip_lost_batches
from stepguard.engine.recover.rewind import (
    SAME_PLACE,
    PastAttempt,
    Rewinder,
    attempts_in,
    failed_starts,
    past_of,
)
from stepguard.engine.recover.snapshots import Probation, wanted_parts
from stepguard.judge.decide import budget_from
from stepguard.judge.history import history_from
from stepguard.ranks.agreement import ASKED, ASKED_IN_LOCK_STEP, PATIENCE
from stepguard.ranks.copies import SLOTS_APART
from stepguard.ranks.saving import (
    RankParts,
    SharedSave,
    first_reason,
    missing_in,
    place_in_data,
    refuse_other_size,
    state_of_rank,
    writing_time,
)
from stepguard.state.batch import tree_from_json
from stepguard.state.loader import ResumableLoader
from stepguard.state.rng import RngState
from stepguard.state.run_state import RunState, SavedState
from stepguard.tensors.values import is_finite

# --- The checkpoint store of one guard: which checkpoints belong to this run, and what one holds.


PLACES = "places in the data"
HOOKS = "extra:communication hooks/"
"""What a hook of DistributedDataParallel remembers of the gradients of its rank."""


class Archive:
    """Writes checkpoints to one folder, and reads them."""

    def __init__(
        self, context: Context, probation: Probation, run_state: RunState, folder: Path
    ) -> None:
        config = context.config
        self._context = context
        self._probation = probation
        self._run_state = run_state
        self._parts = RankParts(context.agreement, context.model, self._say)
        self.store = Store(folder, keep=config.keep)
        self.background = Background(self.store, self._say)
        context.resources.callback(self.store.close)
        context.resources.callback(self.background.close)

    @property
    def shared(self) -> bool:
        """Does every rank write its own part, because no rank holds all of the state?"""
        return self._context.sharded and self._context.agreement.size > 1

    # --- reading

    def own_good(self) -> list[Entry]:
        """Good checkpoints of this run, newest first."""
        own: list[Entry] = []
        for entry in self.store.list():
            # ranks share a folder, and only the first one knows the run's name
            ours = self._context.agreement.rank > 0 or entry.health.run == self._context.run.id
            if entry.good and ours:
                own.append(entry)
        return own

    def steps(self) -> list[int]:
        """Steps of the good checkpoints that a rewind can go back to."""
        self.background.wait()
        return sorted({e.step for e in self.own_good() if e.step <= self._context.step})

    def read(self, step: int) -> SavedState | None:
        """Read the state of that step; None, and a line, where it is damaged."""
        for entry in self.own_good():
            if entry.step != step:
                continue
            try:
                opened = self.store.open(entry.path, select=self.select())
            except StepguardError as fault:
                self._say(str(fault))
                return None
            if opened.step == step:
                rank = self._context.agreement.rank
                return state_of_rank(opened.tensors, opened.facts, rank)
            return None
        return None

    def select(self) -> Select | None:
        """Which part of every tensor this rank reads; None where it reads all of them."""
        return wanted_parts(self._context, self._run_state) if self.shared else None

    # --- writing

    def own_part(self, state: SavedState | None) -> dict[str, Any]:
        """What only this rank has of a state; empty in a run of one process."""
        return {} if state is None else self._parts.own(state)

    def write(
        self,
        step: int,
        state: SavedState,
        parts: Sequence[dict[str, Any]],
        why: str = "",
        *,
        later: bool = False,
    ) -> Path | bool | None:
        """Write a state with the parts of all ranks; `why` it is not good. All ranks call.

        Now, which returns its path, None where the disk refuses it; or `later`, in the background,
        which returns whether that has begun.
        """
        agreement = self._context.agreement
        differ = len({part.get("summary") for part in parts}) > 1
        ranks: dict[str, Any] = {}
        folder: Path | None = None
        if differ:
            # names change in the file, not in the snapshot
            state = SavedState(dict(state.tensors), dict(state.facts), state.parts)
            ranks = self._parts.keep_apart(state)
        if differ or self.shared:
            folder = agreement.from_first(lambda: self.store.begin(step))
        if ranks:
            state.facts["ranks"] = ranks
        self.complete(state, parts, tensors=folder is None)
        health = self.health(why)
        if folder is not None:
            save = SharedSave(
                agreement=agreement,
                store=self.store,
                folder=folder,
                step=step,
                state=state,
                health=health,
                seconds=min(PATIENCE * self._context.config.ranks.timeout, writing_time(state)),
            )
            job = partial(self._recorded, step, health, save.run)
        else:
            given = (step, dict(state.tensors), dict(state.facts), health)
            job = partial(self._recorded, step, health, partial(self.store.save, *given))
        if later:
            # where the first rank writes it all, the others have nothing to do
            writes = folder is not None or agreement.rank == 0
            return writes and self.background.offer_job(step, job)
        if folder is not None:
            return self._now(step, job)
        return agreement.from_first(partial(self._now, step, job))

    def _recorded(self, step: int, health: Health, save: Callable[[], Path]) -> Path:
        path = save()
        # only what is not written is reported
        summary = (
            f"sealed {path.name}" if health.good else f"kept {path.name}, not good: {health.why}"
        )
        fields = {"step": step, "path": path.name, "good": health.good, "summary": summary}
        if health.missing:
            fields["missing"] = health.missing
        self._context.outputs.line("checkpoint", fields)
        return path

    def _now(self, step: int, job: Callable[[], Path]) -> Path | None:
        try:
            return job()
        except Exception as fault:
            self._say(f"checkpoint of step {step} NOT saved, training goes on: {fault}")
            return None

    def complete(
        self, state: SavedState, parts: Sequence[dict[str, Any]], *, tensors: bool = True
    ) -> None:
        """Add the parts of all ranks, and the names of tensors that are non-finite on purpose.

        `tensors`: theirs as well; not where every rank writes its own.
        """
        for rank, part in enumerate(part for part in parts if part):
            if tensors:
                state.tensors.update(part["tensors"])
            for kind, facts in part["facts"].items():
                state.facts.setdefault(kind, {})[str(rank)] = facts
        bad = {name for name, tensor in state.tensors.items() if not is_finite(tensor)}
        state.facts["nonfinite_ok"] = sorted(self._probation.meant_nonfinite(bad))
        first = self._context.memory.first_size
        state.facts["first_size"] = None if first is None else float(first)

    # --- what all ranks hold alike: one of them can save it

    @property
    def replicated(self) -> bool:
        """Do several ranks hold the same state, so that the first can save it for all?"""
        return self._context.agreement.size > 1 and not self.why_not_alone()

    def why_not_alone(self) -> str:
        """What only the other ranks hold, in words; empty where all hold the same state."""
        context = self._context
        model = context.model
        if self.shared:
            return "each rank holds a part of the parameters"
        if not isinstance(model, DistributedDataParallel):
            return "nothing keeps the ranks' weights equal that the guard knows of"
        if context.outer is not None:
            return f"{type(context.outer).__name__} decides about the steps of each rank"
        if type(context.optimizer).__name__ in SLOTS_APART:
            return f"each rank holds a part of the state of {type(context.optimizer).__name__}"
        if model.parameters_to_ignore:
            return f"{min(model.parameters_to_ignore)} is each rank's own"
        return ""

    def save_alone(self, state: SavedState) -> Path | None:
        """Write the state that all ranks hold alike; each of the others may add its own part."""
        context = self._context
        own = ["random numbers"] if context.data.feed is None else ["random numbers", PLACES]
        if self._own_buffers():
            own.append("buffers")
        self.complete(state, [])
        ranks = list(context.agreement.members)
        state.facts["saved_alone"] = {"ranks": ranks, "own": ", ".join(own)}
        health = self.health(missing=missing_in(state.facts))
        save = partial(self.store.save, context.step, state.tensors, state.facts, health)
        return self._now(context.step, partial(self._recorded, context.step, health, save))

    def add_part(self, path: Path, state: SavedState) -> None:
        """Add what only this rank has to a checkpoint that the first rank has written."""
        rank = self._context.agreement.rank
        part = self._parts.own(state)
        tensors = dict(part["tensors"])
        hooks = {name for name in state.tensors if name.startswith(HOOKS)}
        has = sorted((self._own_buffers() | hooks) & state.tensors.keys())
        bad: set[str] = set()
        for name in has:
            tensors[f"rank/{rank}/{name}"] = state.tensors[name]
            if not is_finite(state.tensors[name]):
                bad.add(name)
        allowed = {f"rank/{rank}/{name}" for name in self._probation.meant_nonfinite(bad)}
        of_rank = {"extra": state.facts["extra"]} if hooks else {}
        facts = {**part["facts"], "ranks": {"lacks": [], "facts": of_rank, "has": has}}
        self.store.write_part(path, rank, tensors, {}, allowed, facts)

    def _own_buffers(self) -> set[str]:
        """Buffers that DistributedDataParallel does not broadcast from rank 0."""
        if getattr(self._context.model, "broadcast_buffers", True):
            return set()
        return self._parts.buffers()

    def health(self, why: str = "", *, missing: str = "") -> Health:
        """What the seal of a checkpoint says about the run; `why` the state is not good."""
        context = self._context
        return Health(
            loss=context.history.last_loss,
            level=context.history.level if context.history.losses else None,
            steps_watched=context.config.snapshots.probation,
            incidents=context.budget.total,
            good=not why,
            why=why,
            run=context.run.id,
            missing=missing,
        )

    def _say(self, summary: str) -> None:
        self._context.outputs.note("checkpoint", summary)


# --- Restore a run from a sealed checkpoint, passing over damaged ones and ones that led to a
# stop.


LAST_GOOD = "last-good"
NEWEST = "newest"
WHAT = "guard.restore()"
"""What ranks meet for, as a message about a missing one says."""


def restore_checkpoint(
    context: Context, rewinder: Rewinder, archive: Archive, which: str | Path
) -> int:
    """Load a checkpoint into the live objects; returns the optimizer steps done."""
    attempts: list[PastAttempt] = []
    if context.outputs.journal is not None:
        # the last one is this process's own
        attempts = attempts_in(context.outputs.journal.path)[:-1]
    store = archive.store
    run_state = rewinder.snapshots.run_state
    wanted = _choose(context, store, which, attempts)
    opened, state = _open_together(context, archive, run_state, wanted)
    for passed in opened.passed_over:
        context.outputs.note("checkpoint", f"{passed.path} is skipped: {passed.reason}")
    rates = _different_rates(context.optimizer, state.facts["groups"], state.tensors)
    _load(context, rewinder, state)
    context.run.id = opened.health.run or context.run.id
    skip_lost_batches(context)
    rewinder.past = past_of(attempts)
    context.outputs.note(
        "restored",
        f"restored {opened.path}: {opened.step} optimizer steps are done",
        checkpoint=opened.path.name,
        run=context.run.id,
    )
    missing = missing_in(opened.facts)
    if missing:
        context.outputs.note(
            "checkpoint", f"{opened.path.name} was saved by one rank, without: {missing}"
        )
    _mention_newer(context, store, opened)
    if rates:
        done = (
            "the checkpoint's is used; GuardConfig(resume_lr='config') applies the configured one"
        )
        if context.config.resume_lr == "config":
            # a rate of 0 cannot be scaled
            factors = [now / then if then else 1.0 for now, then in rates]
            scale_rates(context.optimizer, context.scheduler, factors)
            done = "the configured one is applied, at the same place of the schedule"
            done += " (GuardConfig.resume_lr='config')"
        said = "; ".join(
            f"group {group} is configured with lr {now:.4g} and the checkpoint brings {then:.4g}"
            for group, (now, then) in enumerate(rates)
            if not math.isclose(now, then, rel_tol=SAME_RATE)
        )
        context.outputs.note("lr_mismatch", f"{said}: {done}; see `stepguard explain SG802`")
    return context.step


def _choose(
    context: Context, store: Store, which: str | Path, attempts: list[PastAttempt]
) -> str | Path:
    """What to open: an older checkpoint, where the last good one has led to a stop repeatedly."""
    if which == NEWEST:
        newest = next(iter(store.list()), None)
        return LAST_GOOD if newest is None else newest.path
    if which != LAST_GOOD:
        return which
    good = [entry for entry in store.list() if entry.good]
    for entry in good:
        if failed_starts(attempts, entry.path.name) >= SAME_PLACE:
            continue
        if entry is good[0]:
            break
        worn = good[0].path.name
        starts = failed_starts(attempts, worn)
        instead = f"going back to {entry.path.name}, which has not"
        context.outputs.note("checkpoint", f"{worn} has led to a stop {starts} times: {instead}")
        return entry.path
    return which


def _open_together(
    context: Context, archive: Archive, run_state: RunState, which: str | Path
) -> tuple[Opened, SavedState]:
    """Open the same checkpoint on every rank: the first one chooses. All raise, or none does.

    One that a rank finds damaged, which may read another part of it, is passed over by all.
    Returned is this rank's state, once every rank has found that its own fits.
    """
    agreement = context.agreement
    passed: list[PassedOver] = []
    trained = context.step != context.run.resumed_at
    patience = ASKED_IN_LOCK_STEP if trained and not agreement.rank else ASKED
    while True:
        found: Opened | StoreError | None = None
        state = SavedState({}, {})

        # Reading takes time, and is done inside the exchanges: once all ranks are there, each waits
        # for all of them.
        def choose() -> dict[str, Any]:
            nonlocal found
            found = None if agreement.rank else _opened(archive, which, passed)
            return {"path": found.path if isinstance(found, Opened) else None}

        path = agreement.together(choose, WHAT, seconds=patience)[0]["path"]

        def follow(path: Path | None = path) -> dict[str, Any]:
            nonlocal found, state
            if path is not None and agreement.rank:
                found = _opened(archive, path, ())
            if not isinstance(found, Opened):
                return {"why": str(found or ""), "misfit": ""}
            state = state_of_rank(found.tensors, found.facts, agreement.rank)
            misfit = run_state.misfit(state)
            return {"why": "", "misfit": misfit and f"the saved state does not fit: {misfit}."}

        told = agreement.together(follow, WHAT, seconds=ASKED)
        reason = first_reason([facts["why"] for facts in told])
        if isinstance(found, Opened) and not reason:
            refuse_other_size(found.facts, agreement.size)
            misfits = [facts["misfit"] for facts in told]
            if any(misfits):
                raise StateError(misfits[agreement.rank] or first_reason(misfits))
            return replace(found, passed_over=found.passed_over or tuple(passed)), state
        if which != LAST_GOOD or path is None:
            raise StoreError(reason)
        passed.append(PassedOver(path, reason))


def _opened(
    archive: Archive, which: str | Path, passed: Sequence[PassedOver]
) -> Opened | StoreError:
    """Open a checkpoint; the error is returned, for the other ranks have to learn of it first."""
    try:
        return archive.store.open(which, select=archive.select(), but_not=passed)
    except StoreError as why:
        return why


def _load(context: Context, rewinder: Rewinder, state: SavedState) -> None:
    run_state = rewinder.snapshots.run_state
    for trouble in run_state.put_back(state):
        context.outputs.note("checkpoint", trouble)
    own = tree_from_json(state.facts["guard"], {})
    configured = context.history.configured_lr
    context.step = own["step"]
    context.scales.static = own["loss_scale"]
    context.history = history_from(own["history"])
    context.history.configured_lr = configured
    context.memory.first_size = state.facts.get("first_size", context.memory.first_size)
    # a restart by the user accepts what was lost: each attempt may lose its own share
    context.budget = replace(budget_from(own["budget"]), lost=(), consecutive=0)
    context.run.resumed = True
    context.run.resumed_at = context.step
    random_numbers = run_state.random_numbers(state)
    run_state.put_back_random_numbers(state)
    if context.data.feed is not None:
        _resume_data(context, context.data.feed, state, random_numbers)
    rewinder.forget()


def _resume_data(
    context: Context, feed: ResumableLoader, state: SavedState, random_numbers: RngState | None
) -> None:
    """Go to this rank's stored place; without one, to the place that all others share."""
    agreement = context.agreement
    stored: dict[int, Any] = {}
    for rank, place in state.facts.get("loader", {}).items():
        stored[int(rank)] = tree_from_json(place, state.tensors)
    same_ranks = len(state.facts.get("saved_alone", {}).get("ranks", ())) == agreement.size
    shared, story = place_in_data(stored, agreement.size, same_ranks=same_ranks)
    if agreement.rank in stored:
        feed.go_to(stored[agreement.rank], random_numbers)
    elif shared is not None:
        feed.go_to_number(*shared)
    if story and agreement.rank == 0:
        context.outputs.note("checkpoint", story)


def _mention_newer(context: Context, store: Store, opened: Opened) -> None:
    """Report a newer state that is complete and finite, but was not called good."""
    for entry in store.list():
        if entry.good or entry.step <= opened.step:
            continue
        context.outputs.note(
            "checkpoint",
            f"{entry.path.name} is newer, whole and finite, and not good: {entry.health.why}; "
            f"guard.restore('newest') takes it",
        )
        return


# --- the learning rate of the checkpoint against the one this program configures


SAME_RATE = 1e-6


def _different_rates(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> list[tuple[float, float]]:
    """The configured and the restored rate of each group; empty where they are the same.

    Asked before the state is put back. Where a schedule runs, those it starts from.
    """
    if len(saved) != len(optimizer.param_groups):
        return []
    rates = []
    for group, state in zip(optimizer.param_groups, saved, strict=True):
        settings = tree_from_json(state["settings"], tensors)
        rates.append((_base_rate(group), _base_rate(settings)))
    if all(math.isclose(now, then, rel_tol=SAME_RATE) for now, then in rates):
        return []
    return rates


def _base_rate(group: Mapping[str, Any]) -> float:
    """The rate a group starts from; 0 for an optimizer that finds its own step size."""
    rate = group.get("initial_lr", group.get("lr"))
    return 0.0 if rate is None else float(rate)
