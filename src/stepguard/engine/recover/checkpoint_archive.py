"""The checkpoint store of one guard: which checkpoints belong to this run, and what one holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from stepguard._errors import StepguardError
from stepguard.checkpoints import Background, Entry, Health, Select, Store
from stepguard.engine.context import Context
from stepguard.engine.recover.peer_healing import SLOTS_APART
from stepguard.engine.recover.probation import Probation
from stepguard.engine.recover.rank_weights import (
    APART,
    RankWeights,
    add_parts,
    missing_in,
    state_of_rank,
)
from stepguard.engine.recover.shared_save import SharedSave, begin_together
from stepguard.engine.recover.wanted_parts import wanted_parts
from stepguard.state.run_state import RunState, SavedState
from stepguard.tensors.values import is_finite

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
        self.store = Store(folder, keep=config.keep, keep_every=config.keep_every)
        self.background = Background(self.store, self._say, self._sealed)
        if context.agreement.size > 1 and context.agreement.rank == 0:
            context.agreement.tell(RUN, context.run_id)
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
            ours = self._context.agreement.rank > 0 or entry.health.run == self._context.run_id
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
        first = self._context.first_size
        state.facts["first_size"] = None if first is None else float(first)

    def begin_shared(
        self, state: SavedState, step: int, why: str = ""
    ) -> tuple[SharedSave | None, str]:
        """Begin a save that every rank writes a part of; or say why not. All ranks call.

        `why` it is not good, here and in `offer`; empty where it is.
        """
        folder, refused = begin_together(self._context, self.store, step)
        if folder is None:
            return None, refused
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
        own = ["random numbers"] if self._context.feed is None else ["random numbers", PLACES]
        model = self._context.model
        if isinstance(model, DistributedDataParallel) and not model.broadcast_buffers:
            own.append("buffers")
        self.complete(state, [])
        ranks = list(self._context.agreement.members)
        state.facts["saved_alone"] = {"ranks": ranks, "own": ", ".join(own)}
        context = self._context
        if context.agreement.rank and not context.resumed:
            context.run_id = context.agreement.told(RUN) or context.run_id
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
            steps_watched=context.config.probation,
            incidents=context.budget.total,
            good=not why,
            why=why,
            run=context.run_id,
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
