"""Guard every optimizer of a process automatically, before its first step begins.

`Optimizer.__init__` is wrapped, so every optimizer is known when it is made. Its guard is built at
the first call, gradients enabled, of a module that holds its parameters: the model, in its
DistributedDataParallel or compiled wrapper, just before its first forward. Until then, and only
then, `nn.Module.__call__` is wrapped. Optimizers that this misses (parameters in no module, a
forward that is called by another name, an optimizer inside another) are guarded at their first
`optimizer.step()`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stepguard._errors import StepguardError
from stepguard.engine.context import automatic_guards, guarded
from stepguard.engine.drivers.schedule import scheduler_of
from stepguard.engine.wiring import hear_optimizers, keeps_hearing, stop_hearing
from stepguard.guard import Guard
from stepguard.records import GuardConfig
from stepguard.run.discover import parameters_of, scaler_in_use, share, trained_by
from stepguard.state.faked_collectives import distributed
from stepguard.tensors.wrapping import wrap
from stepguard.watching import watch

MOST_CALLS = 10_000
"""Module calls after which an optimizer without a model is left to its first step."""


class NotRestored(BaseException):
    """The checkpoint that was asked for cannot be loaded: the script must not start afresh.

    Not an Exception: a script that catches everything would train from the beginning.
    """


class AutomaticGuards:
    """A context manager; leaving it closes every guard and undoes every wrap.

    `restore`: load this checkpoint into every model and optimizer before its first step.
    """

    def __init__(
        self, config: GuardConfig, complain: Callable[[str], None], restore: str | None = None
    ) -> None:
        self._restore_from = restore
        self.guards: list[Guard] = []
        self.refused = 0
        """Optimizers that could not be guarded, each told with its reason."""
        self._config = config
        self._complain = complain
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._refused: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._early: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepping: list[int] = []
        self._calls = 0
        self._undo = ExitStack()
        self._call_hook: ExitStack | None = None

    def __enter__(self) -> AutomaticGuards:
        wrap(self._undo, Optimizer, "__init__", self._noticing)
        self._undo.callback(self._stop_listening)
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        # guards are made while an optimizer steps, when no hook may be added
        keeps_hearing.add(self)
        hear_optimizers()
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()
        for guard in list(self.guards):
            # The value refers to its weak key: left there, neither would ever be freed.
            automatic_guards.pop(guard.optimizer, None)
            guard.close()
        keeps_hearing.discard(self)
        stop_hearing()

    def ended_by(self, error: BaseException) -> None:
        """The script ends by this exception."""
        for guard in self.guards:
            guard.ended_by(error)

    # --- an optimizer is made ---

    def _noticing(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._known.add(optimizer)
            self._waiting.add(optimizer)
            self._calls = 0
            self._listen()

        return init

    def _listen(self) -> None:
        if self._call_hook is None:
            self._call_hook = ExitStack()
            wrap(self._call_hook, nn.Module, "__call__", self._before_call)

    def _stop_listening(self) -> None:
        if self._call_hook is not None:
            self._call_hook.close()
            self._call_hook = None

    # --- a module is called ---

    def _before_call(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._waiting and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._called(module)
            return original(module, *args, **kwargs)

        return call

    def _called(self, module: nn.Module) -> None:
        self._calls += 1
        for optimizer in list(self._waiting):
            if optimizer in guarded or self._calls > MOST_CALLS:
                self._waiting.discard(optimizer)
            elif share(module, parameters_of(optimizer)):
                self._waiting.discard(optimizer)
                if not self._shares_parameters(optimizer):
                    self._early.add(optimizer)
                    self._attach(optimizer, module)
        if not self._waiting:
            self._stop_listening()

    def _shares_parameters(self, optimizer: Optimizer) -> bool:
        """One optimizer inside another: the one that steps first is the user's."""
        ours = parameters_of(optimizer)
        others = [other for other in self._known if other is not optimizer]
        return any(ours & parameters_of(other) for other in others)

    # --- an optimizer steps ---

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A step that raised has left its optimizer in the list.
        self._after_step(optimizer, args, kwargs)
        inside_another = bool(self._stepping)
        self._stepping.append(id(optimizer))
        self._waiting.discard(optimizer)
        if optimizer in self._early:
            self._early.discard(optimizer)
            self._look_again(optimizer)
        if optimizer in guarded or inside_another:
            return
        # a new optimizer in the place of an earlier one keeps its guard
        if not any(guard.port.follow(optimizer) for guard in self.guards):
            self._attach(optimizer, None)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    def _look_again(self, optimizer: Optimizer) -> None:
        """Replace the guard of a model that was called before it was wrapped in DDP."""
        guard = next((g for g in self.guards if g.optimizer is optimizer), None)
        if guard is None or not distributed() or isinstance(guard.model, DistributedDataParallel):
            return
        if isinstance(trained_by(optimizer).model, DistributedDataParallel):
            automatic_guards.pop(optimizer)()

    # --- the guards ---

    def _attach(self, optimizer: Optimizer, called: nn.Module | None) -> None:
        if optimizer in self._refused:
            return
        try:
            trained = trained_by(optimizer, called)
            guard = watch(
                trained.model,
                optimizer,
                modules=trained.modules,
                scheduler=scheduler_of(optimizer),
                scaler=scaler_in_use(),
                config=self._config,
            )
        except Exception as fault:
            # The script must run, guarded or not.
            self._refused.add(optimizer)
            self.refused += 1
            self._complain(
                f"{type(optimizer).__name__} is not guarded: {type(fault).__name__}: {fault}"
            )
            return
        self.guards.append(guard)
        automatic_guards[optimizer] = functools.partial(self._make_way, guard)
        if self._restore_from is not None:
            self._restore(guard, self._restore_from, late=called is None)

    def _restore(self, guard: Guard, which: str, *, late: bool) -> None:
        """Load the checkpoint; `late`: gradients of the fresh weights are there already."""
        try:
            done = guard.restore(which)
        except StepguardError as fault:
            raise NotRestored(f"--restore {which}: {fault}") from fault
        if late:
            # They belong to weights that are gone: the update at hand finds nothing to do.
            guard.optimizer.zero_grad(set_to_none=True)
        if guard.rank == 0:
            self._complain(
                f"{guard.name or 'the run'} goes on after {done} steps; the script's own loop and "
                "its data begin at their start"
            )

    def _make_way(self, guard: Guard) -> None:
        """Close a guard because the user has built one for the same optimizer."""
        self.guards.remove(guard)
        guard.close()
