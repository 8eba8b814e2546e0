"""Save sealed checkpoints: only good states, when asked, on schedule, and when the run ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepguard._errors import ConfigError, StateError, StepguardError, StoreError
from stepguard.checkpoints import Background, Entry, Health, Opened, PassedOver, Select, Store
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import scale_rates
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.engine.incident.samples import skip_lost_batches
from stepguard.engine.protect import borrowing
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
from stepguard.ranks.agreement import ASKED, ASKED_IN_LOCK_STEP, PATIENCE, RankAbsent, RankFault
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
from stepguard.records import Incident
from stepguard.state.batch import tree_from_json
from stepguard.state.loader import ResumableLoader
from stepguard.state.rng import RngState
from stepguard.state.run_state import RunState, SavedState
from stepguard.state.snapshot import Snapshot
from stepguard.tensors.values import is_finite

# --- Go on from a checkpoint: find it, fill the run with it, and say what was passed over.

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
            self._say(f"checkpoint of step {step} NOT saved, training continues: {fault}")
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
        f"restored {opened.path}: optimizer steps done: {opened.step}",
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
            "the checkpoint's rate is used; GuardConfig(resume_lr='config') applies the "
            "configured one"
        )
        if context.config.resume_lr == "config":
            # a rate of 0 cannot be scaled
            factors = [now / then if then else 1.0 for now, then in rates]
            scale_rates(context.optimizer, context.scheduler, factors)
            done = "the configured rate is applied, at the same position of the schedule"
            done += " (GuardConfig.resume_lr='config')"
        said = "; ".join(
            f"group {group} is configured with lr {now:.4g}, but the checkpoint has {then:.4g}"
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
            f"{entry.path.name} is newer, complete and finite, and not good: "
            f"{entry.health.why}; guard.restore('newest') loads it",
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


class Checkpoints:
    """Saves and restores for one guard. One of the duties between two steps."""

    def __init__(self, context: Context, rewinder: Rewinder) -> None:
        self._context = context
        self._rewinder = rewinder
        self._snapshots = rewinder.snapshots
        self._archive: Archive | None = None
        self._pending: Snapshot | int | None = None
        """The checkpoint on probation: its snapshot, or its step where this rank has none."""
        self._lent: Snapshot | None = None
        """The snapshot that is being written."""
        self._asked: Counter[int] = Counter()
        """How often a state of this step was to be saved by one rank for all."""
        self._told = ""
        """Under which name this rank has published where the last one is."""
        self._seen = -1
        """The last step at which a checkpoint was due."""
        rewinder.after_rewind.append(self.rewound)
        rewinder.before_stop.append(self.stopping)
        run_dir = context.config.run_dir
        if run_dir is not None and not borrowing():
            folder = Path(run_dir) / "checkpoints"
            self._archive = Archive(
                context, rewinder.probation, rewinder.snapshots.run_state, folder
            )
            rewinder.planner.archive = self._archive

    @property
    def has_store(self) -> bool:
        return self._archive is not None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._archive is not None:
            self._archive.background.wait()

    # --- when asked

    def save(self, *, kept: bool = False) -> Path | None:
        """Save the present state now; None, and a line, where it is not good.

        `kept`: a finite state that is not good is sealed as such.
        """
        archive = self._needed("guard.save()")
        archive.background.wait()
        doubt = self._doubt()
        state, why = self._present("" if kept else doubt)
        way_out = " (Probes(anomalies='off') turns the check of losses off)" if doubt else ""
        refusal = "NOT saved, the state is not good: {}" + way_out
        if archive.replicated:
            if state is None:
                self._refuse(refusal.format(why.removesuffix(".")))
                return None
            return self._save_replica(archive, state)
        agreement = self._context.agreement
        try:
            told = agreement.together(
                lambda: {"why": why, "own": archive.own_part(state)},
                "guard.save()",
                # the others come to the first rank, which may be late: it evaluates, or logs
                seconds=ASKED if agreement.rank else ASKED_IN_LOCK_STEP,
            )
            refused = first_reason([facts["why"] for facts in told])
            if refused or state is None:
                self._refuse(refusal.format(refused.removesuffix(".")))
                return None
            parts = [facts["own"] for facts in told]
            path = archive.write(self._context.step, state, parts, doubt)
            return path if isinstance(path, Path) else None
        except RankAbsent as absent:
            only_together = archive.why_not_alone()
            self._refuse(
                f"NOT saved, all ranks have to call guard.save(), because {only_together}: {absent}"
            )
        except RankFault as fault:
            self._refuse(f"NOT saved, the ranks could not agree: {fault}")
        return None

    def _present(self, why: str) -> tuple[SavedState | None, str]:
        """The present state, or why it is not saved; `why` is what speaks against it."""
        bad = stored_trouble(self._context)
        if bad:
            return None, f"{bad[0]} is not finite"
        if why:
            return None, why
        try:
            return self._snapshots.present(), ""
        except StateError as fault:
            return None, str(fault)

    def _save_replica(self, archive: Archive, state: SavedState) -> Path | None:
        """The first rank writes what all hold alike, and waits for nobody; others add their own."""
        agreement = self._context.agreement
        step = self._context.step
        self._asked[step] += 1
        about = f"saved/{step}/{self._asked[step]}"
        if agreement.rank == 0:
            path = archive.save_alone(state)
            if self._told and not self._told.startswith(f"saved/{step}/"):
                # every rank has finished that step, or had no question about it
                agreement.tell(self._told, "")
            self._told = about
            # a space: the empty text would take back what was never said
            agreement.tell(about, str(path or " "))
            return path
        word = agreement.word_of(about, writing_time(state))
        if not word:
            self._refuse("NOT saved: the first rank has not written the shared state")
            return None
        path = Path(word)
        try:
            archive.add_part(path, state)
        except Exception as fault:
            self._say(
                f"{path.name} is saved without what only rank {agreement.world_rank} holds: {fault}"
            )
        return path

    def _doubt(self) -> str:
        """What speaks against the present state, if it is finite; empty when it is good."""
        context = self._context
        hurt = self._rewinder.probation.hurt_at
        probation = context.config.snapshots.probation
        if hurt is not None and context.step - hurt <= probation:
            since = f"have not been good for {probation} steps"
            return f"the weights were damaged at step {hurt} and {since}"
        why = self._rewinder.probation.divergence()
        return f"the run has diverged: {why}" if why else ""

    def restore(self, which: str | Path) -> int:
        """Load a checkpoint and return the optimizer steps done; damaged ones are passed over."""
        archive = self._needed("guard.restore()")
        archive.background.wait()
        try:
            done = restore_checkpoint(self._context, self._rewinder, archive, which)
        except RankFault as fault:
            raise StoreError(f"not restored, the ranks could not agree: {fault}") from fault
        self._pending = None
        return done

    def _needed(self, what: str) -> Archive:
        if self._archive is None:
            raise ConfigError(f"{what} needs a folder; give GuardConfig(run_dir=...).")
        return self._archive

    # --- on schedule

    def due(self) -> bool:
        every = self._context.config.checkpoint_every
        step = self._context.step
        if self._archive is None or every is None or step == self._seen:
            return False
        # one at a time, so that the memory it takes is bounded
        return step > 0 and step % every == 0 and self._pending is None

    def do(self) -> None:
        """Begin a checkpoint: its snapshot is written once it has proved good."""
        self._seen = self._context.step
        snapshot = self._snapshots.at(self._seen) or self._snapshots.take(must=True)
        if snapshot is None and self._context.agreement.size == 1:
            # no memory for a copy: the state as it is, while training waits
            self.save(kept=True)
            return
        self._pending = self._seen
        if snapshot is not None:
            snapshot.lent = True
            self._pending = snapshot
        if self.committed not in self._rewinder.after_commit:
            self._rewinder.after_commit.append(self.committed)

    def committed(self, done: int) -> None:
        """Write the pending checkpoint if its probation ends after `done` steps."""
        if self._lent is not None and self._archive is not None and self._archive.background.idle():
            self._lent.lent = False
            self._lent = None
        pending = self._pending
        if pending is None:
            if self._lent is None:
                self._rewinder.after_commit.remove(self.committed)
            return
        started = max(_step(pending), self._rewinder.probation.incident_at + 1)
        if done - started >= self._context.config.snapshots.probation:
            self._pending = None
            self._write(pending)

    def _write(self, pending: Snapshot | int) -> None:
        """Write a state that is complete and finite; `last-good` names it only if it is good."""
        archive = self._archive
        assert archive is not None
        step = _step(pending)
        state, why = self._proved(pending)

        def own() -> dict[str, Any]:
            # a rank that still writes the one before cannot begin another
            idle = archive.background.idle()
            part = archive.own_part(state)
            return {"kept": state is not None, "why": why, "idle": idle, "own": part}

        try:
            told = self._context.agreement.together(own, "a checkpoint")
            if state is None or not all(facts["kept"] for facts in told):
                raise RankFault("its state is not finite or not complete")
            if not all(facts["idle"] for facts in told):
                archive.background.left_out()
                return
            parts = [facts["own"] for facts in told]
            doubt = first_reason([facts["why"] for facts in told])
            begun = archive.write(step, state, parts, doubt, later=True)
        except (RankFault, StoreError) as fault:
            self._refuse(f"no checkpoint of step {step}: {fault}", step)
            return
        if begun and isinstance(pending, Snapshot):
            # its memory is not used again before it is written
            pending.lent = True
            self._lent = pending

    def _proved(self, pending: Snapshot | int) -> tuple[SavedState | None, str]:
        """The state if it is complete and finite, and why it is not good; empty where it is."""
        if not isinstance(pending, Snapshot):
            return None, ""
        pending.lent = False
        state = pending.state if self._rewinder.probation.sound(pending) else None
        if pending.standing == "good":
            return state, ""
        if pending.memory["diverged"]:
            return state, f"the run has diverged: {pending.memory['diverged']}"
        return state, "an incident showed damaged weights"

    def rewound(self) -> None:
        """Drop a pending checkpoint that the run has gone back from."""
        if self._pending is not None and _step(self._pending) > self._context.step:
            self._pending = None

    # --- when the run ends

    def stopping(self, incident: Incident) -> Path | None:
        """The policy stops the run: save its newest good state, so that a restart begins there."""
        archive = self._archive
        if archive is None:
            return None
        saved = None
        try:
            if self._context.agreement.size == 1:
                saved = self._save_newest_good(archive)
        except Exception as fault:
            self._say(f"nothing saved at the stop: {fault}")
        if saved is not None:
            return saved
        return next((entry.path for entry in archive.own_good()), None)

    def leave(self, *, together: bool) -> Path | None:
        """A signal ends the process: save what is good.

        `together`: all ranks are here. Otherwise only what has begun is finished.
        """
        archive = self._archive
        if archive is None:
            return None
        archive.background.wait()
        if self._context.agreement.size == 1:
            return self._save_newest_good(archive)
        if together:
            return self.save()
        self._say("the ranks did not reach the same step: nothing is saved, last-good is kept")
        return None

    def _save_newest_good(self, archive: Archive) -> Path | None:
        archive.background.wait()
        saved = self.save()
        good = self._snapshots.ring.good()
        if saved is not None or not good:
            return saved
        archive.write(good[0].step, good[0].state, [{}], later=True)
        return archive.background.wait()

    def _say(self, summary: str) -> None:
        self._context.outputs.note("checkpoint", summary)

    def _refuse(self, summary: str, step: int | None = None) -> None:
        """Say that there is no checkpoint of this step; without one, of the present step."""
        refused = self._context.step if step is None else step
        self._context.outputs.note("checkpoint", summary, refused=refused)


def _step(pending: Snapshot | int) -> int:
    if isinstance(pending, Snapshot):
        return pending.step
    return pending
