"""Restore a run from a sealed checkpoint, passing over damaged ones and ones that led to a stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stepguard._errors import StateError, StepguardError, StoreError
from stepguard.checkpoints import Opened, PassedOver, Store
from stepguard.detect.history import history_from
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import scale_rates
from stepguard.engine.incident.lost_samples import skip_lost_batches
from stepguard.engine.recover.checkpoint_archive import Archive
from stepguard.engine.recover.past_attempts import (
    SAME_PLACE,
    PastAttempt,
    attempts_in,
    failed_starts,
    past_of,
)
from stepguard.engine.recover.rank_weights import missing_in, refuse_other_size, state_of_rank
from stepguard.engine.recover.resumed_data import resume_data
from stepguard.engine.recover.rewind import Rewinder
from stepguard.policy.budget import budget_from
from stepguard.sentinel.rank_agreement import ASKED, ASKED_IN_LOCK_STEP
from stepguard.state.run_state import SavedState
from stepguard.state.tree_json import tree_from_json

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
    state = _state_that_fits(context, rewinder, opened)
    difference = compare_rates(context.optimizer, state.facts["groups"], state.tensors)
    _load(context, rewinder, state)
    context.run_id = opened.health.run or context.run_id
    skip_lost_batches(context)
    rewinder.past = past_of(attempts)
    context.outputs.note(
        "restored",
        f"restored {opened.path}: {opened.step} optimizer steps are done",
        checkpoint=opened.path.name,
        run=context.run_id,
    )
    missing = missing_in(opened.facts)
    if missing:
        context.outputs.note(
            "checkpoint", f"{opened.path.name} was saved by one rank, without: {missing}"
        )
    _mention_newer(context, store, opened)
    if difference is not None:
        applied = context.config.resume_lr == "config"
        if applied:
            scale_rates(context.optimizer, context.scheduler, difference.factors)
        context.outputs.note("lr_mismatch", difference.story(applied=applied))
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

    trained = context.step != context.resumed_at
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


def _state_that_fits(context: Context, rewinder: Rewinder, opened: Opened) -> SavedState:
    """This rank's state, once every rank has found that its own fits: nothing is loaded before."""
    agreement = context.agreement
    refuse_other_size(opened.tensors, opened.facts, agreement.size)
    state = state_of_rank(opened.tensors, opened.facts, agreement.rank)
    why = rewinder.snapshots.run_state.misfit(state)
    _raise_together(context, why and f"the saved state does not fit: {why}.", StateError)
    return state


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
    context.loss_scale = own["loss_scale"]
    context.history = history_from(own["history"])
    context.history.configured_lr = configured
    context.first_size = state.facts.get("first_size", context.first_size)
    # a restart by the user accepts what was lost: each attempt may lose its own share
    context.budget = replace(budget_from(own["budget"]), lost=(), consecutive=0)
    context.resumed = True
    context.resumed_at = context.step
    random_numbers = run_state.random_numbers(state)
    run_state.put_back_random_numbers(state)
    if context.feed is not None:
        resume_data(context, context.feed, state, random_numbers)
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


@dataclass(frozen=True, slots=True)
class RateDifference:
    """For each group, what is configured now and what the restored state brings."""

    configured: tuple[float, ...]
    restored: tuple[float, ...]

    @property
    def factors(self) -> list[float]:
        """What the restored rates have to be multiplied by."""
        factors: list[float] = []
        for configured, restored in zip(self.configured, self.restored, strict=True):
            # a rate of 0 cannot be scaled
            factors.append(configured / restored if restored else 1.0)
        return factors

    def groups(self) -> list[int]:
        """The groups whose rates differ."""
        pairs = zip(self.configured, self.restored, strict=True)
        return [g for g, (c, r) in enumerate(pairs) if not math.isclose(c, r, rel_tol=1e-6)]

    def story(self, *, applied: bool) -> str:
        said: list[str] = []
        for group in self.groups():
            rates = f"lr {self.configured[group]:.4g} and the checkpoint brings"
            said.append(f"group {group} is configured with {rates} {self.restored[group]:.4g}")
        done = (
            "the checkpoint's is used; GuardConfig(resume_lr='config') applies the configured one"
        )
        if applied:
            done = (
                "the configured one is applied, at the same place of the schedule "
                "(GuardConfig.resume_lr='config')"
            )
        return f"{'; '.join(said)}: {done}; see `stepguard explain SG802`"


def compare_rates(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> RateDifference | None:
    """Compare rates before the state is put back: where a schedule runs, those it starts from."""
    if len(saved) != len(optimizer.param_groups):
        return None
    settings = [tree_from_json(group["settings"], tensors) for group in saved]
    found = RateDifference(
        configured=tuple(_base_rate(group) for group in optimizer.param_groups),
        restored=tuple(_base_rate(group) for group in settings),
    )
    return found if found.groups() else None


def _base_rate(group: Mapping[str, Any]) -> float:
    """The rate a group starts from; 0 for an optimizer that finds its own step size."""
    rate = group.get("initial_lr", group.get("lr"))
    return 0.0 if rate is None else float(rate)
