"""Save sealed checkpoints: only good states, when asked, on schedule, and when the run ends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError, StateError, StoreError
from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.engine.protect import borrowing
from stepguard.engine.recover.restore import Archive, restore_checkpoint
from stepguard.engine.recover.rewind import Rewinder
from stepguard.ranks.agreement import ASKED, ASKED_IN_LOCK_STEP, RankAbsent, RankFault
from stepguard.ranks.saving import first_reason, writing_time
from stepguard.records import Incident
from stepguard.state.run_state import SavedState
from stepguard.state.snapshot import Snapshot


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
                f"NOT saved, all ranks have to call guard.save(), for {only_together}: {absent}"
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
                raise RankFault("its state is not finite, or not whole")
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
        """The state if it is whole and finite, and why it is not good; empty where it is."""
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
