"""Sealed checkpoints: saved only when good, restored over damaged ones, and taken by themselves
where asked for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError, StepguardError
from stepguard.checkpoints import Background, Entry, Health, Opened, Store
from stepguard.detect.history import history_from
from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.engine.incident.lost_samples import honour_ledger
from stepguard.engine.interception import borrowing
from stepguard.engine.recover.past_attempts import (
    SAME_PLACE,
    Attempt,
    attempts_in,
    failed_starts,
    past_of,
)
from stepguard.engine.recover.resume_lr import compare_rates, scale_rates
from stepguard.engine.recover.snapshots import Recovery
from stepguard.policy.budget import budget_from
from stepguard.records import Incident
from stepguard.state.run_state import SavedState, StateError
from stepguard.state.snapshot import Snapshot
from stepguard.state.tree_json import put_together
from stepguard.tensors.values import is_finite

RANKED = ("rng", "loader")
"""Facts that every rank has its own of."""

LAST_GOOD, NEWEST = "last-good", "newest"


class Saving:
    """Owns the store of one guard. One of the duties between two steps."""

    def __init__(self, context: Context, recovery: Recovery) -> None:
        config = context.config
        self._context, self._recovery = context, recovery
        self._store: Store | None = None
        self._pending: Snapshot | int | None = None
        """The checkpoint that waits for its probation: the snapshot, or its step where this rank
        has none.
        """
        self._lent: Snapshot | None = None
        self._seen = -1
        recovery.after_commit.append(self.committed)
        recovery.after_rewind.append(self.rewound)
        recovery.before_stop.append(self.stopping)
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

    # --- by hand
    # -----------------------------------------------------------------------------------------------

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
        refused = [
            f"rank {r}: {t['why']}" if len(told) > 1 else t["why"]
            for r, t in enumerate(told)
            if t["why"]
        ]
        if refused or state is None:
            self._say(f"NOT saved, the state is not good: {refused[0].removesuffix('.')}")
            return None
        return self._written(store, state, told)

    def _written(self, store: Store, state: SavedState, told: list[dict[str, Any]]) -> Path | None:
        """Rank 0 writes, everybody learns where."""
        context = self._context

        def write() -> dict[str, Any]:
            if context.agreement.rank:
                return {}
            self._complete(state, told)
            try:
                return {
                    "path": str(
                        store.save(context.step, state.tensors, state.facts, self._health())
                    )
                }
            except Exception as fault:
                self._say(f"checkpoint of step {context.step} NOT saved, training goes on: {fault}")
                return {"path": None}

        path = context.agreement.together(write)[0]["path"]
        return Path(path) if path is not None else None

    def _why_not(self) -> str:
        """What speaks against the present state, in words; empty when it is good."""
        context = self._context
        history = context.history
        bad = stored_trouble(context)
        if bad:
            return f"{bad[0]} is not finite"
        hurt = self._recovery.hurt_at
        if hurt is not None and context.step - hurt <= context.config.probation:
            return (
                f"the weights were hurt at step {hurt} and have not been good for "
                f"{context.config.probation} steps"
            )
        if self._recovery.ruined:
            reached = f"{history.best:.6g} was reached before step {history.ruined_at}"
            return (
                f"the loss has risen to {history.level:.6g}, {reached} "
                f"(GuardConfig(anomalies='off') judges no losses)"
            )
        return ""

    def restore(self, which: str | Path) -> int:
        """Load a checkpoint; damaged ones are passed over and named. Returns the optimizer steps
        done.
        """
        store = self._needed("guard.restore()")
        self._background.wait()
        context = self._context
        attempts = self._attempts()
        opened = self._opened(store, self._not_the_same_wall(store, which, attempts))
        for passed in opened.passed_over:
            self._say(f"{passed.path} is passed over: {passed.reason}")
        difference = compare_rates(context.optimizer, opened.facts["groups"], opened.tensors)
        self._put_in(SavedState(opened.tensors, opened.facts))
        context.run_id = opened.health.run or context.run_id
        honour_ledger(context)
        self._recovery.past = past_of(attempts)
        self._recovery.say(
            "restored",
            f"restored {opened.path}: {opened.step} optimizer steps are done",
            checkpoint=opened.path.name,
            run=context.run_id,
        )
        self._tell_newer(store, opened)
        if difference is not None:
            applied = context.config.resume_lr == "config"
            if applied:
                scale_rates(context.optimizer, context.scheduler, difference.factors)
            self._say(difference.story(applied=applied), kind="lr_mismatch")
        return context.step

    def _attempts(self) -> list[Attempt]:
        journal = self._context.journal
        return attempts_in(journal.path)[:-1] if journal is not None else []

    def _not_the_same_wall(
        self, store: Store, which: str | Path, attempts: list[Attempt]
    ) -> str | Path:
        """An older checkpoint, where the last good one has led to a stop again and again."""
        if which == NEWEST:
            newest = next(iter(store.list()), None)
            return newest.path if newest is not None else LAST_GOOD
        if which != LAST_GOOD:
            return which
        good = [entry for entry in store.list() if entry.good]
        fresh = [entry for entry in good if failed_starts(attempts, entry.path.name) < SAME_PLACE]
        if not fresh or fresh[0] is good[0]:
            return which
        worn = good[0].path.name
        starts = failed_starts(attempts, worn)
        self._say(
            f"{worn} has led to a stop {starts} times: going back to {fresh[0].path.name}, which "
            f"has not"
        )
        return fresh[0].path

    def _tell_newer(self, store: Store, opened: Opened) -> None:
        """A newer state that is whole and finite is not taken silently, and not passed over
        silently either.
        """
        newer = [entry for entry in store.list() if not entry.good and entry.step > opened.step]
        if newer:
            level = (
                f", loss {newer[0].health.level:.6g}" if newer[0].health.level is not None else ""
            )
            self._say(
                f"{newer[0].path.name} is newer, whole and finite{level}, and not called good "
                f"because the run had lost "
                f"what it learned; guard.restore('newest') takes it"
            )

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

    def _put_in(self, state: SavedState) -> None:
        context, recovery = self._context, self._recovery
        for trouble in recovery.whole.put_back(state):
            self._say(trouble)
        own = put_together(state.facts["guard"], {})
        configured = context.history.configured_lr
        context.step, context.loss_scale = own["step"], own["loss_scale"]
        context.history = history_from(own["history"])
        context.history.configured_lr = configured
        # whoever starts the run again accepts what was lost: each attempt may lose its own share
        context.budget = replace(budget_from(own["budget"]), lost=(), consecutive=0)
        context.resumed = True
        random_numbers = recovery.whole.random_numbers(state)
        recovery.whole.put_back_random_numbers(state)
        position = state.facts.get("loader", {}).get(str(context.agreement.rank))
        if context.feed is not None and position is not None:
            context.feed.go_to(put_together(position, state.tensors), random_numbers)
        self._pending = None
        recovery.forget()

    # --- for going back
    # ----------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the good checkpoints on disk."""
        assert self._store is not None
        self._background.wait()
        return sorted({e.step for e in self._own_good() if e.step <= self._context.step})

    def _own_good(self) -> list[Entry]:
        """Good checkpoints of this run. Ranks share a folder, and the first one knows the run's
        name.
        """
        assert self._store is not None
        entries = [entry for entry in self._store.list() if entry.good]
        if self._context.agreement.rank:
            return entries
        return [entry for entry in entries if entry.health.run == self._context.run_id]

    def read(self, step: int) -> SavedState | None:
        """The state of that step; None, and a line, where it is damaged."""
        assert self._store is not None
        entry = next((e for e in self._own_good() if e.step == step), None)
        try:
            opened = self._store.open(entry.path) if entry is not None else None
        except StepguardError as fault:
            self._say(str(fault))
            return None
        return (
            SavedState(opened.tensors, opened.facts)
            if opened is not None and opened.step == step
            else None
        )

    # --- by itself
    # ---------------------------------------------------------------------------------------------

    def due(self) -> bool:
        every, step = self._context.config.checkpoint_every, self._context.step
        if self._store is None or every is None or step == self._seen:
            return False
        return step > 0 and step % every == 0 and self._pending is None

    def do(self) -> None:
        """A checkpoint is due: its snapshot is written once it has proved good. One at a time, so
        memory is bounded.
        """
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
        """A state that is whole and finite is written; `last-good` names it only if it is good."""
        snapshot = pending if isinstance(pending, Snapshot) else None
        if snapshot is not None:
            snapshot.lent = False
        kept = snapshot is not None and self._recovery.worth_keeping(snapshot)
        good = kept and snapshot is not None and snapshot.standing == "good"
        state = snapshot.state if snapshot is not None and kept else None
        told = self._context.agreement.together(
            lambda: {"kept": kept, "good": good, "own": self._own(state)}
        )
        if not all(t["kept"] for t in told):
            self._say(
                f"the state of step {_step(pending)} has not proved good: no checkpoint of it"
            )
        elif self._context.agreement.rank == 0 and snapshot is not None:
            self._complete(snapshot.state, told)
            health = replace(self._health(), good=all(t["good"] for t in told))
            snapshot.lent = self._background.offer(
                snapshot.step, snapshot.state.tensors, snapshot.state.facts, health
            )
            self._lent = snapshot if snapshot.lent else None

    def rewound(self) -> None:
        """States that the run has gone back from are not saved."""
        if self._pending is not None and _step(self._pending) > self._context.step:
            self._pending = None

    def stopping(self, incident: Incident) -> Path | None:
        """The policy stops the run: its newest good state goes to disk, so that a new start goes on
        from there.
        """
        if self._store is None:
            return None
        saved = None
        try:
            if self._context.agreement.size == 1:
                saved = self._save_newest_good()
        except Exception as fault:
            self._say(f"nothing saved at the stop: {fault}")
        return saved or next((entry.path for entry in self._own_good()), None)

    def leave(self) -> Path | None:
        """The process is about to end: save what is good. With several ranks only what is under way
        is finished.
        """
        if self._store is None:
            return None
        self._background.wait()
        if self._context.agreement.size > 1:
            self._say("several ranks are not saved at a signal; the last good checkpoint stays")
            return None
        return self._save_newest_good()

    def _save_newest_good(self) -> Path | None:
        self._background.wait()
        saved, good = self.save(), self._recovery.ring.good()
        if saved is None and good:
            self._complete(good[0].state, [])
            self._background.offer(
                good[0].step, good[0].state.tensors, good[0].state.facts, self._health()
            )
            saved = self._background.wait()
        return saved

    # --- what goes into a file
    # ---------------------------------------------------------------------------------

    def _own(self, state: SavedState | None) -> dict[str, Any]:
        """The part of a state that only this rank has."""
        if state is None or self._context.agreement.size == 1:
            return {}
        rank = str(self._context.agreement.rank)
        tensors = {
            name: t
            for name, t in state.tensors.items()
            if name.startswith(tuple(f"{k}/" for k in RANKED))
        }
        return {
            "facts": {kind: state.facts.get(kind, {}).get(rank) for kind in RANKED},
            "tensors": tensors,
        }

    def _complete(self, state: SavedState, told: list[dict[str, Any]]) -> None:
        for rank, own in enumerate(t["own"] for t in told if t["own"]):
            state.tensors.update(own["tensors"])
            for kind, facts in own["facts"].items():
                if facts is not None:
                    state.facts.setdefault(kind, {})[str(rank)] = facts
        bad = {name for name, tensor in state.tensors.items() if not is_finite(tensor)}
        state.facts["nonfinite_ok"] = sorted(self._recovery.meant_nonfinite(bad))

    def _health(self) -> Health:
        history = self._context.history
        return Health(
            loss=history.last_loss,
            level=history.level if history.losses else None,
            steps_watched=self._context.config.probation,
            incidents=self._context.budget.total,
            good=True,
            run=self._context.run_id,
        )

    def _needed(self, what: str) -> Store:
        if self._store is None:
            raise ConfigError(f"{what} needs a folder; give GuardConfig(run_dir=...).")
        return self._store

    def _say(self, summary: str, kind: str = "checkpoint") -> None:
        self._recovery.say(kind, summary)


def _step(pending: Snapshot | int) -> int:
    return pending.step if isinstance(pending, Snapshot) else pending
