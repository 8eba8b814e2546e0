"""Sealed checkpoints: saved only when good, restored over damaged ones, and taken by themselves where asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError, StepguardError
from stepguard.detect.history import history_from
from stepguard.engine.context import Context
from stepguard.engine.examine import stored_trouble
from stepguard.engine.intercept import borrowing
from stepguard.engine.rates import compare_rates, scale_rates
from stepguard.engine.recovery import Recovery
from stepguard.policy import Budget
from stepguard.sentinel.gradients import finite
from stepguard.state.plain import put_together
from stepguard.state.snapshot import Snapshot
from stepguard.state.store import Background, Health, Opened, Store
from stepguard.state.whole import State, StateError

RANKED = ("rng", "loader")
"""Facts that every rank has its own of."""

AGAIN = (
    "no later one has proved good since, and the same start tends to end in the same place; "
    "see `stepguard report` for what went wrong, or restore an older one by its path"
)


class Saving:
    """Owns the store of one guard. One of the duties between two steps."""

    def __init__(self, context: Context, recovery: Recovery) -> None:
        config = context.config
        self._context, self._recovery = context, recovery
        self._store: Store | None = None
        self._pending: Snapshot | int | None = None
        """The checkpoint that waits for its probation: the snapshot, or its step where this rank has none."""
        self._lent: Snapshot | None = None
        self._seen = -1
        recovery.after_commit.append(self.committed)
        recovery.after_rewind.append(self.rewound)
        if config.run_dir is not None and not borrowing():
            folder = Path(config.run_dir) / "checkpoints"
            self._store = Store(folder, keep=config.keep, keep_every=config.keep_every)
            self._background = Background(self._store, self._say)
            context.resources.callback(self._store.close)
            context.resources.callback(self._background.close)
            recovery.planning.archive = self

    @property
    def has_store(self) -> bool:
        return self._store is not None

    # --- by hand -----------------------------------------------------------------------------------------------

    def save(self) -> Path | None:
        """The present state, now; None where it is not good."""
        store = self._needed("guard.save()")
        self._background.wait()
        why, state = self._why_not(), None
        if not why:
            try:
                state = self._recovery.present()
            except StateError as fault:
                why = str(fault)
        told = self._context.agreement.together(lambda: {"why": why, "own": self._own(state)})
        refused = [f"rank {r}: {t['why']}" if len(told) > 1 else t["why"] for r, t in enumerate(told) if t["why"]]
        if refused or state is None:
            self._say(f"NOT saved, the state is not good: {refused[0].removesuffix('.')}")
            return None
        return self._written(store, state, told)

    def _written(self, store: Store, state: State, told: list[dict[str, Any]]) -> Path | None:
        """Rank 0 writes, everybody learns where."""
        context = self._context

        def write() -> dict[str, Any]:
            if context.agreement.rank:
                return {}
            self._complete(state, told)
            try:
                return {"path": str(store.save(context.step, state.tensors, state.facts, self._health()))}
            except Exception as fault:
                self._say(f"checkpoint of step {context.step} NOT saved, training goes on: {fault}")
                return {"path": None}

        path = context.agreement.together(write)[0]["path"]
        return Path(path) if path is not None else None

    def _why_not(self) -> str:
        """What speaks against the present state, in words; empty when it is good."""
        context, history = self._context, self._context.history
        bad = stored_trouble(context)
        if bad:
            return f"{bad[0]} is not finite"
        hurt = self._recovery.hurt_at
        if hurt is not None and context.step - hurt <= context.config.probation:
            return f"the weights were hurt at step {hurt} and have not been good for {context.config.probation} steps"
        if history.jumped_lately(context.step):
            return f"the learning rate jumped at step {history.jumped_at}"
        limit = history.limit
        if limit is not None and history.level > limit:
            return f"the loss has risen to {history.level:.6g}, up to {limit:.6g} is usual"
        return ""

    def restore(self, which: str | Path) -> int:
        """Load a checkpoint; damaged ones are passed over and named. Returns the optimizer steps done."""
        store = self._needed("guard.restore()")
        self._background.wait()
        opened = self._opened(store, which)
        for passed in opened.passed_over:
            self._say(f"{passed.path} is passed over: {passed.reason}")
        context = self._context
        difference = compare_rates(context.optimizer, opened.facts["groups"], opened.tensors)
        self._put_in(State(opened.tensors, opened.facts))
        before = self._starts_from(opened.path.name)
        self._say(f"restored {opened.path}: {opened.step} optimizer steps are done", kind="restored")
        if before:
            self._say(f"this is start {before + 1} from {opened.path.name}: {AGAIN}")
        if difference is not None:
            applied = context.config.resume_lr == "config"
            if applied:
                scale_rates(context.optimizer, context.scheduler, difference.factors)
            self._say(difference.story(applied=applied), kind="lr_mismatch")
        return context.step

    def _starts_from(self, name: str) -> int:
        """How often this run has been started from that checkpoint already."""
        journal = self._context.journal
        if journal is None:
            return 0
        with journal.path.open("rb") as lines:
            return sum(b'"kind":"restored"' in line and f"/{name}:".encode() in line for line in lines)

    def _opened(self, store: Store, which: str | Path) -> Opened:
        """The same checkpoint on every rank: the first one chooses."""
        agreement = self._context.agreement
        chosen: list[Opened] = []

        def look() -> dict[str, Any]:
            if agreement.rank == 0:
                chosen.append(store.open(which))
            return {"path": str(chosen[0].path)} if chosen else {}

        path = agreement.together(look)[0]["path"]
        if agreement.rank:
            chosen.append(store.open(Path(path)))
        return chosen[0]

    def _put_in(self, state: State) -> None:
        context, recovery = self._context, self._recovery
        for trouble in recovery.whole.put_back(state):
            self._say(trouble)
        own = put_together(state.facts["guard"], {})
        configured = context.history.configured_lr
        context.step, context.loss_scale = own["step"], own["loss_scale"]
        context.history = history_from(own["history"])
        context.history.configured_lr = configured
        context.budget = Budget(**{**own["budget"], "recent": tuple(own["budget"]["recent"])})
        context.resumed = True
        random_numbers = recovery.whole.random_numbers(state)
        recovery.whole.put_back_random_numbers(state)
        position = state.facts.get("loader", {}).get(str(context.agreement.rank))
        if context.feed is not None and position is not None:
            context.feed.go_to(put_together(position, state.tensors), random_numbers)
        self._pending = None
        recovery.forget()

    # --- for going back ----------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the good checkpoints on disk."""
        assert self._store is not None
        self._background.wait()
        return sorted({e.step for e in self._store.list() if e.health.good and e.step <= self._context.step})

    def read(self, step: int) -> State | None:
        """The state of that step; None, and a line, where it is damaged."""
        assert self._store is not None
        entry = next((e for e in self._store.list() if e.step == step and e.health.good), None)
        try:
            opened = self._store.open(entry.path) if entry is not None else None
        except StepguardError as fault:
            self._say(str(fault))
            return None
        return State(opened.tensors, opened.facts) if opened is not None and opened.step == step else None

    # --- by itself ---------------------------------------------------------------------------------------------

    def due(self) -> bool:
        every, step = self._context.config.checkpoint_every, self._context.step
        if self._store is None or every is None or step == self._seen:
            return False
        return step > 0 and step % every == 0 and self._pending is None

    def do(self) -> None:
        """A checkpoint is due: its snapshot is written once it has proved good. One at a time, so memory is bounded."""
        self._seen = self._context.step
        snapshot = self._recovery.at(self._seen) or self._recovery.take(must=True)
        if snapshot is not None:
            snapshot.lent = True
        elif self._context.agreement.size == 1:
            self.save()  # no memory for a copy: the state as it is, while training waits
            return
        self._pending = snapshot if snapshot is not None else self._seen

    def committed(self, done: int) -> None:
        """So many steps are done: is a pending checkpoint past its probation?"""
        if self._lent is not None and self._background.idle():
            self._lent.lent, self._lent = False, None
        pending = self._pending
        if pending is None:
            return
        started = max(_step(pending), self._recovery.incident_at + 1)
        if done - started >= self._context.config.probation:
            self._pending = None
            self._write(pending)

    def _write(self, pending: Snapshot | int) -> None:
        if isinstance(pending, Snapshot):
            pending.lent = False
        snapshot = pending if isinstance(pending, Snapshot) and pending.standing == "good" else None
        state = snapshot.state if snapshot is not None else None
        told = self._context.agreement.together(lambda: {"good": state is not None, "own": self._own(state)})
        if not all(t["good"] for t in told):
            self._say(f"the state of step {_step(pending)} has not proved good: no checkpoint of it")
        elif self._context.agreement.rank == 0 and snapshot is not None:
            self._complete(snapshot.state, told)
            snapshot.lent = self._background.offer(
                snapshot.step, snapshot.state.tensors, snapshot.state.facts, self._health()
            )
            self._lent = snapshot if snapshot.lent else None

    def rewound(self) -> None:
        """States that the run has gone back from are not saved."""
        if self._pending is not None and _step(self._pending) > self._context.step:
            self._pending = None

    def leave(self) -> Path | None:
        """The process is about to end: save what is good. With several ranks only what is under way is finished."""
        if self._store is None:
            return None
        self._background.wait()
        if self._context.agreement.size > 1:
            self._say("several ranks are not saved at a signal; the last good checkpoint stays")
            return None
        saved, good = self.save(), self._recovery.ring.good()
        if saved is None and good:
            self._complete(good[0].state, [])
            self._background.offer(good[0].step, good[0].state.tensors, good[0].state.facts, self._health())
            saved = self._background.wait()
        return saved

    # --- what goes into a file ---------------------------------------------------------------------------------

    def _own(self, state: State | None) -> dict[str, Any]:
        """The part of a state that only this rank has."""
        if state is None or self._context.agreement.size == 1:
            return {}
        rank = str(self._context.agreement.rank)
        tensors = {name: t for name, t in state.tensors.items() if name.startswith(tuple(f"{k}/" for k in RANKED))}
        return {"facts": {kind: state.facts.get(kind, {}).get(rank) for kind in RANKED}, "tensors": tensors}

    def _complete(self, state: State, told: list[dict[str, Any]]) -> None:
        for rank, own in enumerate(t["own"] for t in told if t["own"]):
            state.tensors.update(own["tensors"])
            for kind, facts in own["facts"].items():
                if facts is not None:
                    state.facts.setdefault(kind, {})[str(rank)] = facts
        bad = {name for name, tensor in state.tensors.items() if not finite(tensor)}
        state.facts["nonfinite_ok"] = sorted(self._recovery.meant_nonfinite(bad))

    def _health(self) -> Health:
        history = self._context.history
        return Health(
            loss=history.last_loss,
            level=history.level if history.losses else None,
            steps_watched=self._context.config.probation,
            incidents=self._context.budget.total,
            good=True,
        )

    def _needed(self, what: str) -> Store:
        if self._store is None:
            raise ConfigError(f"{what} needs a folder; give GuardConfig(run_dir=...).")
        return self._store

    def _say(self, summary: str, kind: str = "checkpoint") -> None:
        self._recovery.say(kind, summary)


def _step(pending: Snapshot | int) -> int:
    return pending.step if isinstance(pending, Snapshot) else pending
