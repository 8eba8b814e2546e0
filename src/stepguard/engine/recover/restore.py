"""Restore a run from a sealed checkpoint, passing over damaged ones and ones that led to a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from stepguard.engine.recover.rank_weights import (
    APART,
    SLOTS_APART,
    RankWeights,
    add_parts,
    missing_in,
    refuse_other_size,
    resume_data,
    state_of_rank,
)
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
from stepguard.sentinel.rank_agreement import ASKED, ASKED_IN_LOCK_STEP, PATIENCE
from stepguard.state.batch import tree_from_json
from stepguard.state.run_state import RunState, SavedState
from stepguard.tensors.torch_private import default_store
from stepguard.tensors.values import is_finite

# --- One checkpoint that every rank writes its part of: sealed once all have, or not at all.


WRITTEN = "written "
SEALED = "sealed "
NOT_SEALED = "not sealed: "
SHORTEST, LONGEST = 0.002, 0.25
"""Seconds between two looks into the store."""
LAST_WORD = "last"


BYTES_A_SECOND = 50e6
"""What a slow disk writes and reads back."""


def writing_time(state: SavedState) -> float:
    """Seconds after which a rank that writes such a state has failed, however slow its disk is."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
    return ASKED + size / BYTES_A_SECOND


@dataclass(frozen=True, slots=True)
class SharedSave:
    """What one rank knows of a save that all have begun."""

    context: Context
    store: Store
    folder: Path
    """Temporary; every rank writes into it."""
    step: int
    state: SavedState
    health: Health
    allowed: frozenset[str]
    """Tensors of this rank that may be non-finite."""
    on_sealed: Callable[[int, Path, Health], None]
    """Told of the checkpoint once all ranks have written it."""

    def run(self) -> Path:
        """Write this rank's part, and return when all have; StoreError on every rank otherwise."""
        own = self._written()
        self._leave_word(str(self.context.agreement.rank), own)
        if self.context.agreement.rank == 0:
            self._leave_word(LAST_WORD, self._sealed())
        said = self._word(LAST_WORD, self._deadline(2.0), "the first rank has not sealed it")
        if not said.startswith(SEALED):
            raise StoreError(said.removeprefix(NOT_SEALED))
        path = Path(said.removeprefix(SEALED))
        self.on_sealed(self.step, path, self.health)
        return path

    def _written(self) -> str:
        agreement = self.context.agreement
        tensors = self.state.tensors
        if agreement.rank:
            # what every rank holds alike is written by the first one
            apart = (f"rng/{agreement.rank}/", f"loader/{agreement.rank}/", "rank/")
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if name in self.state.parts or name.startswith(apart)
            }
        try:
            digest = self.store.write_part(
                self.folder, agreement.rank, tensors, self.state.parts, self.allowed
            )
        except Exception as fault:
            return f"{NOT_SEALED}rank {agreement.world_rank}: {fault}"
        return f"{WRITTEN}{digest}"

    def _sealed(self) -> str:
        """As the first rank: wait for all, and seal what they have written."""
        try:
            # what all ranks have written; StoreError where one has not, once all are done
            until = self._deadline(1.0)
            words = []
            # all of them first: one that is still writing would write into a folder that is gone
            for rank, member in enumerate(self.context.agreement.members):
                words.append(
                    self._word(str(rank), until, f"rank {member} has not written its part")
                )
            for said in words:
                if not said.startswith(WRITTEN):
                    raise StoreError(said.removeprefix(NOT_SEALED))
            digests = [said.removeprefix(WRITTEN) for said in words]
            path = self.store.finish(self.folder, self.step, self.state.facts, self.health, digests)
        except Exception as fault:
            self.store.drop(self.folder)
            return f"{NOT_SEALED}{fault}"
        return f"{SEALED}{path}"

    # --- words in the store of the process group

    def _key(self, name: str) -> str:
        # the name of the folder has a process and a number in it
        return f"stepguard/save/{self.folder.name}/{name}"

    def _leave_word(self, name: str, word: str) -> None:
        default_store().set(self._key(name), word)

    def _word(self, name: str, until: float, otherwise: str) -> str:
        """Wait for a word; not by `store.wait`, which keeps the main thread from the store."""
        store = default_store()
        key = self._key(name)
        pause = SHORTEST
        while not store.check([key]):
            if time.monotonic() >= until:
                return f"{NOT_SEALED}{otherwise} in time."
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST)
        word: str = store.get(key).decode()
        return word

    def _deadline(self, times: float) -> float:
        most = PATIENCE * self.context.config.ranks.timeout
        return time.monotonic() + times * min(most, writing_time(self.state))


# --- The checkpoint store of one guard: which checkpoints belong to this run, and what one holds.


PLACES = "places in the data"
RUN = "run"
"""Under this the first rank tells the others the name of the run."""


class Archive:
    """Writes checkpoints to one folder, and reads them."""

    def __init__(
        self, context: Context, probation: Probation, run_state: RunState, folder: Path
    ) -> None:
        config = context.config
        self._context = context
        self._probation = probation
        self._run_state = run_state
        self._rank_weights = RankWeights(context)
        self.store = Store(folder, keep=config.keep)
        self.background = Background(self.store, self._say, self._sealed)
        if context.agreement.size > 1 and context.agreement.rank == 0:
            context.agreement.tell(RUN, context.run.id)
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

    def rank_part(self, state: SavedState | None, *, compared: bool = True) -> dict[str, Any]:
        """The part of a state that only this rank has; empty in a run of one process.

        `compared`: with a digest of the rest, by which ranks see whether it is the same.
        """
        if state is None or self._context.agreement.size == 1:
            return {}
        rank = str(self._context.agreement.rank)
        prefixes = tuple(f"{kind}/" for kind in APART)
        tensors = {name: t for name, t in state.tensors.items() if name.startswith(prefixes)}
        facts = {kind: state.facts.get(kind, {}).get(rank) for kind in APART}
        summary = self._rank_weights.summary(state) if compared else ""
        if self.shared:
            # every rank writes its own
            tensors = {}
        return {"facts": facts, "tensors": tensors, "summary": summary}

    def own_weights(
        self, state: SavedState, parts: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], str]:
        """What ranks hold that rank 0 does not, by rank; or why it cannot be written. All call."""
        if len({part.get("summary") for part in parts}) == 1:
            return {}, ""
        if self.shared:
            return self._rank_weights.keep_apart(state), ""
        return self._rank_weights.collect(state)

    def complete(
        self,
        state: SavedState,
        parts: list[dict[str, Any]],
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the parts of all ranks, and the names of tensors that are non-finite on purpose."""
        add_parts(state, weights or {}, tensors=not self.shared)
        for rank, part in enumerate(part for part in parts if part):
            state.tensors.update(part["tensors"])
            for kind, facts in part["facts"].items():
                if facts is not None:
                    state.facts.setdefault(kind, {})[str(rank)] = facts
        bad = {name for name, tensor in state.tensors.items() if not is_finite(tensor)}
        state.facts["nonfinite_ok"] = sorted(self._probation.meant_nonfinite(bad))
        first = self._context.memory.first_size
        state.facts["first_size"] = None if first is None else float(first)

    def begin_shared(
        self, state: SavedState, step: int, why: str = ""
    ) -> tuple[SharedSave | None, str]:
        """Begin a save that every rank writes a part of; or say why not. All ranks call.

        `why` it is not good, here and in `offer`; empty where it is.
        """

        def begin() -> dict[str, Any]:
            if self._context.agreement.rank:
                return {}
            try:
                return {"folder": str(self.store.begin(step)), "why": ""}
            except StoreError as fault:
                return {"folder": "", "why": str(fault)}

        first = self._context.agreement.together(begin, "writing a checkpoint")[0]
        if first["why"]:
            return None, str(first["why"])
        folder = Path(first["folder"])
        allowed = frozenset(state.facts["nonfinite_ok"])
        health = self.health(why)
        where = (self._context, self.store, folder)
        return SharedSave(*where, step, state, health, allowed, self._sealed), ""

    @property
    def replicated(self) -> bool:
        """Do several ranks hold the same state, so that one of them can save it for all?"""
        return self._context.agreement.size > 1 and not self.why_not_alone()

    def why_not_alone(self) -> str:
        """What only the other ranks hold, in words; empty where all hold the same state."""
        context = self._context
        model = context.model
        if self.shared:
            return "each rank holds a part of the parameters"
        if not isinstance(model, DistributedDataParallel):
            return "nothing keeps the ranks' weights equal that the guard knows of"
        if not context.agreement.in_step_throughout or context.outer is not None:
            return "the ranks made steps of their own, so that their weights may differ"
        if type(context.optimizer).__name__ in SLOTS_APART:
            return f"each rank holds a part of the state of {type(context.optimizer).__name__}"
        if model.parameters_to_ignore:
            return f"{min(model.parameters_to_ignore)} is each rank's own"
        return ""

    def save_alone(self, state: SavedState) -> Path | None:
        """Write the state that all ranks hold alike; each of the others may add its own part."""
        own = ["random numbers"] if self._context.data.feed is None else ["random numbers", PLACES]
        model = self._context.model
        if isinstance(model, DistributedDataParallel) and not model.broadcast_buffers:
            own.append("buffers")
        self.complete(state, [])
        ranks = list(self._context.agreement.members)
        state.facts["saved_alone"] = {"ranks": ranks, "own": ", ".join(own)}
        context = self._context
        if context.agreement.rank and not context.run.resumed:
            context.run.id = context.agreement.told(RUN) or context.run.id
        path = self.save(state, missing=missing_in(state.facts))
        if context.agreement.rank:
            # the first rank is the one that writes, unless it does not come
            self.store.close()
        return path

    def add_part(self, path: Path, state: SavedState) -> None:
        """Add what only this rank has to a checkpoint that another rank has written."""
        part = self.rank_part(state, compared=False)
        rank = self._context.agreement.rank
        mine = self._rank_weights.differing(state, *self.store.contents(path))
        tensors = {**part["tensors"]}
        bad: set[str] = set()
        for name, tensor in mine["tensors"].items():
            tensors[f"rank/{rank}/{name}"] = tensor
            if not is_finite(tensor):
                bad.add(name)
        allowed = {f"rank/{rank}/{name}" for name in self._probation.meant_nonfinite(bad)}
        facts = {kind: own for kind, own in part["facts"].items() if own is not None}
        facts["ranks"] = {
            "lacks": mine["lacks"],
            "facts": mine["facts"],
            "has": sorted(mine["tensors"]),
        }
        self.store.write_part(path, rank, tensors, {}, allowed, facts)

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

    def save(self, state: SavedState, why: str = "", *, missing: str = "") -> Path | None:
        """Write a completed state now; None, and a line, where the disk refuses it."""
        step = self._context.step
        health = self.health(why, missing=missing)
        try:
            path = self.store.save(step, state.tensors, state.facts, health)
        except Exception as fault:
            self._say(f"checkpoint of step {step} NOT saved, training goes on: {fault}")
            return None
        self._sealed(step, path, health)
        return path

    def offer(self, step: int, state: SavedState, why: str = "") -> bool:
        """Write a completed state in the background; False while another one is being written."""
        return self.background.offer(step, state.tensors, state.facts, self.health(why))

    def _say(self, summary: str) -> None:
        self._context.outputs.note("checkpoint", summary)

    def _sealed(self, step: int, path: Path, health: Health) -> None:
        """Put a written checkpoint on record; people are told of what is not written only."""
        summary = (
            f"sealed {path.name}" if health.good else f"kept {path.name}, not good: {health.why}"
        )
        fields = {"step": step, "path": path.name, "good": health.good, "summary": summary}
        if health.missing:
            fields["missing"] = health.missing
        self._context.outputs.line("checkpoint", fields)


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
    opened = _open_together(context, archive, _choose(context, store, which, attempts))
    for passed in opened.passed_over:
        context.outputs.note("checkpoint", f"{passed.path} is passed over: {passed.reason}")
    # This rank's state, once every rank has found that its own fits: nothing is loaded before.
    agreement = context.agreement
    refuse_other_size(opened.tensors, opened.facts, agreement.size)
    state = state_of_rank(opened.tensors, opened.facts, agreement.rank)
    why = rewinder.snapshots.run_state.misfit(state)
    _raise_together(context, why and f"the saved state does not fit: {why}.", StateError)
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


def _open_together(context: Context, archive: Archive, which: str | Path) -> Opened:
    """Open the same checkpoint on every rank: the first one chooses. All raise, or none does.

    One that a rank finds damaged, which may read another part of it, is passed over by all.
    """
    passed: list[PassedOver] = []
    while True:
        opened, path, reason = _open_candidate(context, archive, which, passed)
        if not reason:
            assert isinstance(opened, Opened)
            return replace(opened, passed_over=opened.passed_over or tuple(passed))
        if which != LAST_GOOD or path is None:
            raise StoreError(reason)
        passed.append(PassedOver(path, reason))


def _open_candidate(
    context: Context, archive: Archive, which: str | Path, passed: Sequence[PassedOver]
) -> tuple[Opened | StoreError | None, Path | None, str]:
    """What this rank reads of the first rank's choice, its path, and why it cannot be taken.

    Reading takes time, and is done inside the exchanges: once all ranks are there, each waits for
    all of them.
    """
    agreement = context.agreement
    opened: Opened | StoreError | None = None

    def choose() -> dict[str, Any]:
        nonlocal opened
        opened = None if agreement.rank else _opened(archive, which, passed)
        if isinstance(opened, StoreError):
            return {"why": str(opened), "path": ""}
        return {"why": "", "path": "" if opened is None else str(opened.path)}

    trained = context.step != context.run.resumed_at
    patience = ASKED_IN_LOCK_STEP if trained and not agreement.rank else ASKED
    first = agreement.together(choose, WHAT, seconds=patience)[0]
    path = None if first["why"] else Path(first["path"])

    def follow() -> dict[str, Any]:
        nonlocal opened
        if path is not None and agreement.rank:
            opened = _opened(archive, path, ())
        return {"why": str(opened) if isinstance(opened, StoreError) else first["why"]}

    told = agreement.together(follow, WHAT, seconds=ASKED)
    return opened, path, _first_reason([facts["why"] for facts in told])


def _first_reason(reasons: Sequence[str]) -> str:
    """What speaks against it on the first rank where something does; named unless it is on all."""
    for rank, reason in enumerate(reasons):
        if reason:
            return reason if all(reasons) else f"rank {rank}: {reason}"
    return ""


def _opened(
    archive: Archive, which: str | Path, passed: Sequence[PassedOver]
) -> Opened | StoreError:
    """Open a checkpoint; the error is returned, for the other ranks have to hear of it first."""
    try:
        return archive.store.open(which, select=archive.select(), but_not=passed)
    except StoreError as why:
        return why


def _raise_together(context: Context, why: str, kind: type[StepguardError]) -> None:
    """Raise on all ranks what one of them has against going on."""
    told = context.agreement.together(lambda: {"why": why}, WHAT, seconds=ASKED)
    for rank, facts in enumerate(told):
        if facts["why"]:
            same = why == facts["why"] or len(told) == 1
            raise kind(facts["why"] if same else f"rank {rank}: {facts['why']}")


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
        resume_data(context, context.data.feed, state, random_numbers)
    rewinder.forget()


def _mention_newer(context: Context, store: Store, opened: Opened) -> None:
    """Tell of a newer state that is complete and finite, but was not called good."""
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
