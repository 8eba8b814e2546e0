"""`watch`: the loop stays as it is, and the guard reads and vetoes inside `optimizer.step()`.

A pre-hook on the optimizer reads the gradients and, if they are bad, hides them, so that the update
has nothing to do; a post-hook gives them back and undoes what the update did all the same. The loss
and the pre-clip norm are observed through patched torch functions (sentinel/torch_patches).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from stepguard.engine.context import Context
from stepguard.engine.drivers.closure import CheckedClosure, checked_once
from stepguard.engine.drivers.judged_step import JudgedStep
from stepguard.engine.drivers.optimizer_kinds import (
    calls_of_step,
    evaluates_again,
    found_inf,
    inner_optimizer,
    needs_closure,
)
from stepguard.engine.drivers.scaler import present_scale
from stepguard.engine.drivers.update_check import UpdateCheck
from stepguard.engine.protect import Protection
from stepguard.engine.reader import count_labels
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.watch.schedule_rollback import ScheduleRollback
from stepguard.engine.wiring import Wiring, owners
from stepguard.sentinel.torch_patches import Update, inside_backward, listen
from stepguard.state.step import LossFn, total_loss, unwrapped

IN_BACKWARD = (
    "its optimizer steps inside the backward pass: a guard for each parameter would keep "
    "the whole model"
)


class WatchDriver(JudgedStep):
    """Optimizer hooks of one guard; also gets the calls of patched torch functions."""

    def __init__(
        self, context: Context, protect: Protection, rewinder: Rewinder, wiring: Wiring
    ) -> None:
        super().__init__(context, protect, rewinder, wiring)
        self._stepping = 0
        """Running calls of `step`: one that calls `super().step()` runs the hooks twice."""
        resources = context.resources
        resources.callback(self.model_calls.close)
        resources.callback(listen(self))
        resources.callback(self.tracing.close)
        self._hooks = ExitStack()
        resources.callback(lambda: self._hooks.close())
        self._hook_optimizer()
        wiring.adopt = self.adopt

    def adopt(self, optimizer: Optimizer) -> None:
        """Guard this optimizer, which is about to step, in the place of the one before."""
        self._begin()
        context = self.context
        before = context.optimizer
        context.adopt(optimizer)
        owners[optimizer] = owners.pop(before)
        snapshots = self.rewinder.snapshots
        snapshots.run_state.adopt(optimizer, context.scheduler)
        snapshots.kept.broken(context.step)
        self.rollback = ScheduleRollback(context)
        self._check = UpdateCheck(context, self.protect)
        self._stepping = 0
        self._hooks.close()
        self._hook_optimizer()

    def _hook_optimizer(self) -> None:
        optimizer = self.context.optimizer
        self._hook(optimizer, self._before_step, self._after_step)
        inner = inner_optimizer(optimizer)
        if inner is not None:
            self._hook(inner, self._before_inner, self._after_inner)

    def _hook(self, optimizer: Optimizer, before: Any, after: Any) -> None:
        # where `optimizer.step` is compiled, hooks must stay out of the graph
        outside: Any = torch.compiler.disable
        self._hooks.callback(optimizer.register_step_pre_hook(outside(before)).remove)
        self._hooks.callback(optimizer.register_step_post_hook(outside(after)).remove)

    # --- calls of patched torch functions -------------------------------------------------------

    def begin_micro(self, loss_fn: LossFn, batch: Any) -> None:
        """A framework is about to run one micro-batch; calls of the model are not kept then."""
        self.model_calls.off = True
        self._add_micro(loss_fn, batch)

    def loss_of(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """Run the forward of one micro-batch for the loop, which calls backward on it itself.

        Calls of the model are kept as well: the loop may add something to the loss.
        """
        self._add_micro(loss_fn, batch)
        try:
            loss = total_loss(loss_fn(batch))
        except Exception as error:
            self.raised(error)
            raise
        self.micro_batches.hand_out(loss)
        return loss

    def _add_micro(self, loss_fn: LossFn, batch: Any) -> None:
        if not self.protect.armed:
            return
        with self.protect.region:
            self.boundary.root_called()
        with self.protect.part("micro-batches of the framework"):
            self.micro_batches.add(loss_fn, batch)
            self.observed.labels = count_labels(batch, self.context)

    def before_backward(self, root: Tensor) -> None:
        if not self._listening or not self.protect.armed:
            return
        with self.protect.region, self.tracing.paused(), self.looks.paused():
            self.reader.start()
            self.observed.before_backward(root)
            self.micro_batches.heard(root)
        self.looks.loss_seen(root)
        with self.protect.part("live tracing"):
            self.tracing.before_backward(root)

    def after_backward(self, root: Tensor, *, failed: bool) -> None:
        if not self._listening:
            return
        if failed and (self.model_calls.calls or not self.micro_batches.first):
            self.raised(sys.exc_info()[1])
        if not self.protect.armed:
            return
        ours = False
        with self.protect.region, self.looks.paused():
            ours = self.observed.after_backward(failed=failed)
        self.looks.backward_over()
        self.wiring.backward(ours)
        with self.protect.part("live tracing"):
            self.tracing.after_backward(ours=ours)
        if ours:
            self.shared.got_gradients()

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        if self.protect.armed:
            with self.protect.region, self.looks.paused():
                self.observed.after_norm(tensors, norm)

    def after_load(self) -> None:
        if self.protect.armed:
            with self.protect.region:
                self.context.buffers.remember()

    def around_update(self, scaler: GradScaler, update: Update, new_scale: Any) -> None:
        ours = scaler is self.context.scaler and self.context.scaling()
        if not ours or new_scale is not None:
            update(new_scale)
        elif self.observed.losses:
            self._scaler_skipped(update)
        else:
            update(present_scale(self.context) if self.rollback.scaler else None)
            self.rollback.scaler = False

    def before_scaled_step(self, scaler: GradScaler, optimizer: Any) -> None:
        """Adopt a scaler that was not handed over: loss and gradients carry its factor."""
        context = self.context
        if context.scaler is not None or optimizer is not context.optimizer:
            return
        if scaler.is_enabled() and self.protect.armed:
            with self.protect.region:
                context.scaler = scaler
                self.rewinder.snapshots.run_state.scaler = scaler
                self.observed.divide(scaler._get_scale_async())

    def averages_nothing(self, average: AveragedModel, model: Any) -> bool:
        """Has this average taken in these weights already? Its loop does not know of vetoes."""
        if not isinstance(model, nn.Module) or unwrapped(model) is not self.shared.root:
            return False
        last_vetoed = self._fused is None and self.dropped
        if last_vetoed and self._averaged.get(average) == self._commits:
            return True
        self._averaged[average] = self._commits
        return False

    # --- optimizer hooks ------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._stepping and calls_of_step(optimizer) < 2:
            self._stepping = 0  # the last one ended in an exception
        self._stepping += 1
        if self._stepping > 1:
            return None
        return self._before(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._stepping -= 1
        if not self._stepping:
            self._after(optimizer)

    def _before_inner(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The inner optimizer steps by itself: SAM's `second_step` calls no `step` of its own."""
        if self._stepping:
            return None
        return self._before(optimizer, args, kwargs)

    def _after_inner(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._stepping:
            self._after(optimizer)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Check the gradients; returns other arguments for `step` where it has a closure."""
        self._before_update()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            # gradients from before a rewind belong to weights that are gone
            if self.shared.is_dropped or self._rewound():
                self._refuse()
            else:
                self.check()
            return None
        if self.shared.is_dropped:
            self._refuse()
        checked = _nothing if self.vetoing else self._checked(optimizer, closure)
        rest = dict(kwargs)
        rest.pop("closure", None)
        return (args[0], checked, *args[2:]), rest

    def _before_update(self) -> None:
        """Close the last step, and take the snapshot that no call of the model has prompted."""
        if self._veto.hidden:
            # an exception of the optimizer ended that step: nothing has been put back yet
            self._vetoed()
        self._begin()
        if inside_backward():
            self.rewinder.snapshots.turn_off(IN_BACKWARD)
        if self.protect.armed and self.rewinder.snapshots.due():
            # the root module was not called, only its methods or its children
            with self.protect.part("snapshots and checkpoints"):
                self.rewinder.snapshots.before_update()

    def _checked(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, with a check of what each evaluation leaves."""
        if needs_closure(optimizer):
            self._check.copy_everything()
            return CheckedClosure(self, closure)
        if not evaluates_again(optimizer):
            return checked_once(closure, self.check)
        if self.observed.losses:
            # SAM moves along the gradients that are there before it evaluates anything
            self.check()
            if self.vetoing:
                return _nothing
        self._check.copy_everything()
        return CheckedClosure(self, closure, again=True)

    def _after(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or had nothing to do."""
        self._veto.give_back()
        theirs = found_inf(optimizer) if not self.protect.armed else None
        if theirs is not None and bool(theirs):
            return  # disarmed, and the scaler has told the kernel to do nothing
        if self._own_flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
            self._own_flag = False
        if self._fused is not None:
            self._issued(self._fused)
        elif self.vetoing:
            self._vetoed()
        else:
            self._committed()

    def _scaler_skipped(self, update: Update) -> None:
        """The scaler skipped by itself: the optimizer's hooks were never called."""
        reading = self._judge_unreached()
        if not self.vetoing:
            update(None)
            self._close_books(self._step(reading), reading, committed=False)
            self._end_step()
            self.rollback.scaler_skipped()
            return
        try:
            self._vetoed()
        finally:
            update(present_scale(self.context))
            self.rollback.scaler = False

    def finish(self) -> None:
        """The loop is over: take back what it did after a vetoed last update."""
        self.settle()
        self._take_back_schedule()


def _nothing() -> None:
    """In the place of a closure that must not be evaluated: the update is refused."""
