"""Save sealed checkpoints: only good states, when asked, on schedule, and when the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError, StateError, StoreError
from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.engine.protect import borrowing
from stepguard.engine.recover.restore import Archive, restore_checkpoint, writing_time
from stepguard.engine.recover.rewind import Rewinder
from stepguard.records import Incident
from stepguard.sentinel.rank_agreement import ASKED, ASKED_IN_LOCK_STEP, RankAbsent, RankFault
from stepguard.state.run_state import SavedState
from stepguard.state.snapshot import Snapshot

SAVE = "guard.save()"


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
        self._seen = -1
        """The last step at which a checkpoint was due."""
        rewinder.after_commit.append(self.committed)
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
        state: SavedState | None = None
        bad = stored_trouble(self._context)
        doubt = self._doubt()
        why = f"{bad[0]} is not finite" if bad else "" if kept else doubt
        if not why:
            try:
                state = self._snapshots.present()
            except StateError as fault:
                why = str(fault)
        agreement = self._context.agreement
        if archive.replicated:
            if state is None:
                self._refuse_bad(why, doubt)
                return None
            return self._save_replica(archive, state)
        try:
            told = agreement.together(
                lambda: {"why": why, "own": archive.rank_part(state)},
                SAVE,
                # the others come to the first rank, which may be late: it evaluates, or logs
                seconds=ASKED if agreement.rank else ASKED_IN_LOCK_STEP,
            )
        except RankAbsent as absent:
            only_together = archive.why_not_alone()
            self._refuse(
                f"NOT saved, all ranks have to call guard.save(), for {only_together}: {absent}"
            )
            return None
        except RankFault as fault:
            self._refuse(f"NOT saved, the ranks could not agree: {fault}")
            return None
        refused = _first_refusal(told)
        if refused or state is None:
            self._refuse_bad(refused, doubt)
            return None
        parts = [facts["own"] for facts in told]
        weights, why = archive.own_weights(state, parts)
        if why:
            self._refuse(f"NOT saved: {why}")
            return None
        return self._write_now(archive, state, parts, weights, doubt)

    def _save_replica(self, archive: Archive, state: SavedState) -> Path | None:
        """Save what all ranks hold alike. One rank is enough; others that come add their own."""
        step = self._context.step
        word, wrote = self._context.agreement.by_one(
            SAVE, lambda: str(archive.save_alone(state) or ""), writing_time(state)
        )
        if wrote or word:
            path = Path(word) if word else None
        else:
            # the process that holds the store may have ended once it had written
            path = next((each.path for each in archive.store.list() if each.step == step), None)
        if path is None and not wrote:
            self._refuse("NOT saved: the rank that writes what all hold has not written it")
        if path is not None and not wrote:
            try:
                archive.add_part(path, state)
            except Exception as fault:
                rank = self._context.agreement.world_rank
                self._say(f"{path.name} is saved without what only rank {rank} holds: {fault}")
        return path

    def _refuse_bad(self, why: str, doubt: str) -> None:
        way_out = " (Probes(anomalies='off') judges no losses)" if doubt else ""
        self._refuse(f"NOT saved, the state is not good: {why.removesuffix('.')}{way_out}")

    def _write_now(
        self,
        archive: Archive,
        state: SavedState,
        parts: list[dict[str, Any]],
        weights: dict[str, Any],
        doubt: str,
    ) -> Path | None:
        """Rank 0 writes, or every rank its part, and every rank learns where."""
        if archive.shared:
            archive.complete(state, parts, weights)
            step = self._context.step
            save, why = archive.begin_shared(state, step)
            try:
                if save is not None:
                    return save.run()
            except Exception as fault:
                why = str(fault)
            self._say(f"checkpoint of step {step} NOT saved, training goes on: {why}")
            return None

        def write() -> dict[str, Any]:
            if self._context.agreement.rank:
                return {}
            archive.complete(state, parts, weights)
            path = archive.save(state, doubt)
            return {"path": None if path is None else str(path)}

        path = self._context.agreement.together(write, "writing", seconds=ASKED)[0]["path"]
        return None if path is None else Path(path)

    def _doubt(self) -> str:
        """What speaks against the present state, if it is finite; empty when it is good."""
        context = self._context
        hurt = self._rewinder.probation.hurt_at
        probation = context.config.snapshots.probation
        if hurt is not None and context.step - hurt <= probation:
            since = f"have not been good for {probation} steps"
            return f"the weights were hurt at step {hurt} and {since}"
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
        if snapshot is None:
            self._pending = self._seen
            return
        snapshot.lent = True
        self._pending = snapshot

    def committed(self, done: int) -> None:
        """Write the pending checkpoint if its probation ends after `done` steps."""
        if self._lent is not None and self._archive is not None and self._archive.background.idle():
            self._lent.lent = False
            self._lent = None
        pending = self._pending
        if pending is None:
            return
        started = max(_step(pending), self._rewinder.probation.incident_at + 1)
        if done - started >= self._context.config.snapshots.probation:
            self._pending = None
            self._write(pending)

    def _write(self, pending: Snapshot | int) -> None:
        """Write a state that is complete and finite; `last-good` names it only if it is good."""
        archive = self._archive
        assert archive is not None
        if not isinstance(pending, Snapshot):
            state = None
        else:
            pending.lent = False
            state = pending.state if self._rewinder.probation.sound(pending) else None
        told = self._told_by_all(archive, pending, state)
        if not told:
            return
        if state is None or not all(facts["kept"] for facts in told):
            step = _step(pending)
            self._refuse(
                f"the state of step {step} is not finite, or not whole: no checkpoint of it", step
            )
            return
        assert isinstance(pending, Snapshot)
        if archive.shared and not all(facts["idle"] for facts in told):
            archive.background.left_out()
            return
        self._complete_and_lend(archive, pending, told)

    def _complete_and_lend(
        self, archive: Archive, pending: Snapshot, told: list[dict[str, Any]]
    ) -> None:
        """Add what other ranks have of their own, and have the first rank write it all."""
        parts = [facts["own"] for facts in told]
        state = pending.state
        if archive.shared:
            # what only this rank holds gets another name in the file, not in the snapshot
            state = SavedState(dict(state.tensors), dict(state.facts), state.parts)
        weights, why = archive.own_weights(state, parts)
        if why:
            self._refuse(f"no checkpoint of step {pending.step}: {why}", pending.step)
            return
        why = _first_refusal(told)
        if archive.shared:
            archive.complete(state, parts, weights)
            # have the shards of a snapshot written by all ranks; `why`: it is not good
            save, refused = archive.begin_shared(state, pending.step, why)
            if save is None:
                self._refuse(f"no checkpoint of step {pending.step}: {refused}", pending.step)
                return
            self._lend(pending, archive.background.offer_job(pending.step, save.run))
        elif self._context.agreement.rank == 0:
            archive.complete(pending.state, parts, weights)
            self._lend(pending, archive.offer(pending.step, pending.state, why))

    def _lend(self, snapshot: Snapshot, is_taken: bool) -> None:
        """Do not use the memory of a snapshot again before it is written."""
        if is_taken:
            snapshot.lent = True
            self._lent = snapshot
        # else an earlier one is still being written, and stays lent until it is

    def _told_by_all(
        self, archive: Archive, pending: Snapshot | int, state: SavedState | None
    ) -> list[dict[str, Any]]:
        """What every rank has of this checkpoint; nothing, and a line, where not all came."""
        why = ""
        if isinstance(pending, Snapshot) and pending.standing != "good":
            why = "an incident found the weights hurt"
            if pending.memory["diverged"]:
                why = f"the run has diverged: {pending.memory['diverged']}"

        def own() -> dict[str, Any]:
            kept = state is not None
            # a rank that still writes the one before cannot begin another
            idle = archive.background.idle()
            return {"kept": kept, "why": why, "idle": idle, "own": archive.rank_part(state)}

        try:
            return self._context.agreement.together(own, "a checkpoint")
        except RankAbsent as absent:
            self._refuse(f"no checkpoint of step {_step(pending)}: {absent}", _step(pending))
            return []

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
        self._say("the ranks have not come to the same step: nothing is saved, last-good is kept")
        return None

    def _save_newest_good(self, archive: Archive) -> Path | None:
        archive.background.wait()
        saved = self.save()
        good = self._snapshots.ring.good()
        if saved is not None or not good:
            return saved
        archive.complete(good[0].state, [])
        archive.offer(good[0].step, good[0].state)
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


def _first_refusal(told: list[dict[str, Any]]) -> str:
    """Why the first rank that refuses does so, naming it where there are several; else empty."""
    for rank, facts in enumerate(told):
        if facts["why"]:
            return f"rank {rank}: {facts['why']}" if len(told) > 1 else str(facts["why"])
    return ""
