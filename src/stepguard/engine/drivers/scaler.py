"""The user's GradScaler: end its step without moving it, and go back to how it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import born_in_update
from stepguard.engine.protect import Protection
from stepguard.records import Reading
from stepguard.sentinel.gradients import scale_gradients
from stepguard.state.buffers import UndoCopy
from stepguard.tensors.torch_private import scaler_tensors

# --- The user's GradScaler: end its step without moving it, and go back to how it was.


RISKY = "check of risky updates"
ScalerState = tuple[torch.Tensor, torch.Tensor]
"""Scale and growth counter."""


def present_scale(context: Context) -> torch.Tensor | None:
    """Return a copy of the scale on its device; None before the scaler's first use."""
    if context.scaler is None:
        return None
    # `get_scale` would wait for the device
    scale = context.scaler._get_scale_async()
    if scale is None:
        return None
    return scale.detach().clone()


def hold_scaler(context: Context) -> None:
    """End the scaler's step without moving scale or growth: this batch never came."""
    if context.scaler is None or not context.scaling():
        return
    scale = present_scale(context)
    if scale is not None:
        # without an argument `update` would count the step as one without overflow
        context.scaler.update(new_scale=scale)


def update_scaler(context: Context) -> None:
    """End the scaler's step as the unguarded loop would."""
    if context.scaler is not None and context.scaling():
        context.scaler.update()


def scaler_copy(context: Context) -> ScalerState | None:
    """Copy scale and growth counter on the device; None where the scaler does not scale yet."""
    scaler = context.scaler
    if scaler is None or not context.scaling():
        return None
    live = scaler_tensors(scaler)
    if live is None:
        return None
    scale, growth = live
    return scale.clone(), growth.clone()


def restore_scaler(context: Context, saved: ScalerState | None) -> None:
    """Put back what `scaler_copy` returned."""
    scaler = context.scaler
    if saved is None or scaler is None:
        return
    live = scaler_tensors(scaler)
    if live is not None:
        for tensor, value in zip(live, saved, strict=True):
            tensor.copy_(value)


def scaled(context: Context, loss: torch.Tensor) -> torch.Tensor:
    """The loss to call backward on, by the user's scaler or by the static scale."""
    if context.scaler is not None and context.scaling():
        return context.scaler.scale(loss)
    if context.scales.static != 1.0:
        return loss * context.scales.static
    return loss


def unscale(context: Context) -> None:
    """Divide the scale out of the gradients."""
    if context.scaler is not None and context.scaling():
        context.scaler.unscale_(context.optimizer)
    elif context.scales.static != 1.0:
        scale_gradients(context.parameters, 1.0 / context.scales.static)


# --- An update that could make NaN of finite gradients is copied before and checked after it.


class UpdateCheck:
    """Goes with one update, from just before `optimizer.step()` to just after it."""

    def __init__(self, context: Context, protect: Protection, *, at_risk: bool = False) -> None:
        self._context = context
        self._protect = protect
        self.undo: UndoCopy | None = None
        """Everything the update may touch, from before it."""
        self._at_risk = at_risk
        """Every rank checks this update, so that all of them undo it or none does."""

    def copy_everything(self) -> None:
        """Copy what the update may touch."""
        if self.undo is None and self._protect.armed:
            with self._protect.part(RISKY):
                self.undo = UndoCopy(self._context.optimizer)

    def undone(self, reading: Reading) -> Reading | None:
        """Undo an update that made something non-finite and name it; None for a good update."""
        born: list[str] = []
        if self.undo is not None and self._protect.armed:
            with self._protect.part(RISKY):
                born = born_in_update(self._context)
        by_rank = {self._context.agreement.world_rank: born} if born else {}
        if self._at_risk:
            # whatever has failed here, the other ranks wait for this one's word
            with self._protect.region:
                by_rank = self._of_all_ranks(born)
        if not by_rank or self.undo is None:
            return None
        self.undo.restore()
        names = next(iter(by_rank.values()))
        ranks = tuple(by_rank) if self._at_risk else reading.bad_ranks
        return replace(reading, bad_state=tuple(names), state_born=True, bad_ranks=ranks)

    def _of_all_ranks(self, born: list[str]) -> dict[int, list[str]]:
        """What the update has made non-finite, by rank: all of them undo it or none does.

        All ranks know that it was at risk, so they come without meeting first.
        """
        agreement = self._context.agreement
        if not agreement.any_rank(bool(born), self._context.parameters[0].device):
            return {}
        told = agreement.together(lambda: {"born": born}, "the check of a risky update")
        found: dict[int, list[str]] = {}
        for rank, facts in zip(agreement.members, told, strict=True):
            if facts["born"]:
                found[rank] = facts["born"]
        return found


# --- Wrappers around an optimizer that do something of their own in every step.


def update_through_wrapper(context: Context) -> bool:
    """Make the update; False where the wrapper did not call the optimizer inside it."""
    assert context.outer is not None
    calls: list[bool] = []
    counting = context.optimizer.register_step_post_hook(lambda *_: calls.append(True))
    try:
        context.outer.step()
    finally:
        counting.remove()
    if not calls:
        kind = type(context.outer).__name__
        context.outputs.note("veto", f"no update: {kind} did not commit this step")
    return bool(calls)


def step_without_gradients(context: Context) -> None:
    """Call the wrapper's step with nothing to update, where the other ranks call theirs."""
    if context.outer is None:
        return
    manager = voting_manager(context.outer)
    if manager is not None:
        # no worker of this replica commits then, and torchft heals it from one that has
        manager.report_error(RuntimeError(f"stepguard refused step {context.step}"))
        context.outer.step()


def voting_manager(optimizer: Optimizer | None) -> Any:
    """The manager that a wrapper of torchft asks before it steps; None for any other optimizer."""
    manager = getattr(optimizer, "manager", None)
    votes = callable(getattr(manager, "should_commit", None))
    return manager if votes and callable(getattr(manager, "report_error", None)) else None
