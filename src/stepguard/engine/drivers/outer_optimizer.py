"""Wrappers around an optimizer that do something of their own in every step.

PostLocalSGDOptimizer averages weights with the other ranks, torchft asks all replicas whether they
commit. A rank that vetoes a step alone still has to call them, or the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stepguard.engine.context import Context
from stepguard.engine.watch.gradient_veto import GradientVeto


def step_without_gradients(context: Context) -> None:
    """Call the wrapper's step with nothing to update, where the other ranks call theirs."""
    if context.outer is None or not context.agreement.apart:
        return
    with _hidden_gradients(context):
        context.outer.step()


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
