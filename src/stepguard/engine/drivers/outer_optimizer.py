"""Wrappers around an optimizer that do something of their own in every step.

PostLocalSGDOptimizer averages weights with the other ranks, torchft asks its workers whether they
commit. A rank that vetoes a step alone still has to call them, or the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from stepguard.engine.context import Context
from stepguard.engine.watch.gradient_veto import GradientVeto


def update(context: Context) -> bool:
    """Make the update; False where the wrapper did not call the optimizer inside it."""
    if context.outer is None:
        context.optimizer.step()
        return True
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
    elif context.agreement.apart:
        with _hidden_gradients(context):
            context.outer.step()


def voting_manager(optimizer: Optimizer | None) -> Any:
    """The manager that a wrapper of torchft asks before it steps; None for any other optimizer."""
    manager = getattr(optimizer, "manager", None)
    votes = callable(getattr(manager, "should_commit", None))
    return manager if votes and callable(getattr(manager, "report_error", None)) else None


@contextmanager
def _hidden_gradients(context: Context) -> Iterator[None]:
    """Hide the gradients from the optimizer inside only: an averager wants to see them."""
    veto = GradientVeto(context)
    optimizer = context.optimizer
    before = optimizer.register_step_pre_hook(lambda *_: veto.hide())
    after = optimizer.register_step_post_hook(lambda *_: _end(veto))
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _end(veto: GradientVeto) -> None:
    veto.give_back()
    veto.put_back()
