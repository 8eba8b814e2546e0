"""`watch`: the loop stays as it is, and the guard reads and vetoes inside `optimizer.step()`.

A pre-hook on the optimizer reads the gradients and, if they are bad, hides them, so that the update
has nothing to do; a post-hook gives them back and undoes what the update did all the same. The loss
and the pre-clip norm are overheard (sentinel/torch_patches).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from stepguard.detect.judge import alarming
from stepguard.engine import step_end
from stepguard.engine.context import Context
from stepguard.engine.drivers.closure import (
    Repeated,
    calls_of_step,
    evaluates_again,
    inner_optimizer,
    needs_closure,
    wrapped_once,
)
from stepguard.engine.drivers.fused import found_inf, read_later
from stepguard.engine.drivers.fused_watch import LateWatching
from stepguard.engine.incident.closer_look import born_in_update, stored_trouble
from stepguard.engine.incident.outlier_step import keep_out_outliers
from stepguard.engine.protect import Shield
from stepguard.engine.reader import Pending, count_labels
from stepguard.engine.recover.snapshots import Recovery
from stepguard.engine.transaction import FINITE_KINDS, let_through
from stepguard.engine.watch.shared_backward import Watching
from stepguard.engine.wiring import Wiring
from stepguard.records import Incident, Reading
from stepguard.records.verdict import OK
from stepguard.sentinel.risky_update import risky_update
from stepguard.sentinel.torch_patches import Update, inside_backward, listen
from stepguard.state.step import LossFn, Step, unwrapped
from stepguard.state.undo import UndoCopy

IN_BACKWARD = (
    "its optimizer steps inside the backward pass: a guard for each parameter would keep "
    "the whole model"
)


class Watcher(LateWatching):
    """Hooks of one guard on one optimizer, and its ear at the taps."""

    def __init__(
        self, context: Context, shield: Shield, recovery: Recovery, wiring: Wiring
    ) -> None:
        super().__init__(context, shield, recovery, wiring)
        self._stepping = 0
        """Calls of the optimizer's step that are running: one that calls `super().step()` runs the
        hooks twice.
        """
        self._follows = False
        """One that has already been refused this step was why."""
        self._with: Watching | None = None
        """Another optimizer of the same backward pass, whose incident this update is dropped for.
        """
        optimizer, resources = context.optimizer, context.resources
        resources.callback(self.capture.close)
        resources.callback(listen(self))
        resources.callback(self.arming.close)
        outside: Any = torch.compiler.disable  # of the graph, where `optimizer.step` is compiled
        resources.callback(optimizer.register_step_pre_hook(outside(self._before_step)).remove)
        resources.callback(optimizer.register_step_post_hook(outside(self._after_step)).remove)
        inner = inner_optimizer(optimizer)
        if inner is not None:
            resources.callback(inner.register_step_pre_hook(outside(self._before_inner)).remove)
            resources.callback(inner.register_step_post_hook(outside(self._after_inner)).remove)

    # --- taps
    # --------------------------------------------------------------------------------------------------

    def begin_micro(self, loss_fn: LossFn, batch: Any) -> None:
        """A framework is about to run one micro-batch; the calls of the model need not be
        remembered then.
        """
        self.capture.off = True
        self.shield.call(None, self.threshold.root_called)
        self.shield.spare(None, self.micro.add, loss_fn, batch)
        self.heard.labels = self.shield.spare(None, count_labels, batch, self.context)

    def before_backward(self, root: Tensor) -> None:
        if not self._listening:
            return
        with self.arming.paused():
            self.shield.call(None, self.reader.start)
            self.shield.call(None, self.heard.before_backward, root)
        self.shield.spare(None, self.arming.before_backward, root)

    def after_backward(self, root: Tensor, *, failed: bool) -> None:
        if not self._listening:
            return
        if failed and (self.capture.calls or not self.micro.first):
            self.raised(sys.exc_info()[1])
        ours = self.shield.call(False, self.heard.after_backward, failed=failed)
        self.wiring.backward(ours)
        self.shield.spare(None, self.arming.after_backward, ours=ours)
        if ours:
            self.peers.concerned()

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        self.shield.call(None, self.heard.after_norm, tensors, norm)

    def after_load(self) -> None:
        self.shield.call(None, self.context.buffers.remember)

    def around_update(self, scaler: GradScaler, update: Update, new_scale: Any) -> None:
        if scaler is not self.context.scaler or not self.context.scaling() or new_scale is not None:
            update(new_scale)
        elif self.heard.losses:
            self._scaler_skipped(update)
        else:
            update(step_end.present_scale(self.context) if self.hold.scaler else None)
            self.hold.scaler = False

    def before_scaled_step(self, scaler: GradScaler, optimizer: Any) -> None:
        """The loop has a scaler that nobody handed over: without it the loss and the gradients
        carry its factor.
        """
        context = self.context
        if context.scaler is None and optimizer is context.optimizer and scaler.is_enabled():
            self.shield.call(None, self._adopt, scaler)

    def _adopt(self, scaler: GradScaler) -> None:
        self.context.scaler = self.recovery.whole.scaler = scaler
        self.heard.divide(scaler._get_scale_async())

    def averages_nothing(self, average: AveragedModel, model: Any) -> bool:
        """An average of this model has taken in these very weights already: its loop does not know
        of the veto.
        """
        if not isinstance(model, nn.Module) or unwrapped(model) is not self.peers.root:
            return False
        if self._late is None and self.dropped and self._averaged.get(average) == self._commits:
            return True
        self._averaged[average] = self._commits
        return False

    # --- hooks
    # -------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._stepping and calls_of_step(optimizer) < 2:
            self._stepping = 0  # the last one ended in an exception
        self._stepping += 1
        return None if self._stepping > 1 else self._before(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._stepping -= 1
        if not self._stepping:
            self._after(optimizer)

    def _before_inner(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The optimizer inside steps by itself: SAM's `second_step`, which calls no `step` of its
        own.
        """
        return None if self._stepping else self._before(optimizer, args, kwargs)

    def _after_inner(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._stepping:
            self._after(optimizer)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._hidden.hidden:
            # an exception of the optimizer's own ended that step: nothing has been put back yet
            self._vetoed()
        self._begin()
        if inside_backward():
            self.recovery.do_without(IN_BACKWARD)
        if self.recovery.due():  # the root module was not called, only its methods or its children
            self.shield.spare(None, self.recovery.before_update)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self.peers.is_dropped or (closure is None and self._rewound()):
            self._refuse()
        elif closure is None:
            self.check()
        if closure is None:
            return None
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return (
            args[0],
            _nothing if self.vetoing else self._checked(optimizer, closure),
            *args[2:],
        ), rest

    def _checked(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, with a look at what each evaluation leaves."""
        if needs_closure(optimizer):
            self._undo = self.shield.spare(None, UndoCopy, optimizer)
            return Repeated(self, closure)
        if not evaluates_again(optimizer):
            return wrapped_once(closure, self.check)
        if self.heard.losses and self._bad_already():
            return _nothing
        self._undo = self._undo or self.shield.spare(None, UndoCopy, optimizer)
        return Repeated(self, closure, again=True)

    def _after(self, optimizer: Optimizer) -> None:
        self._hidden.give_back()
        theirs = found_inf(optimizer) if not self.shield.armed else None
        if theirs is not None and bool(theirs):
            return  # disarmed, and the scaler has told the kernel to do nothing
        if self._own_flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
            self._own_flag = False
        if self._late is not None:
            self._issued(self._late)
        elif self.vetoing:
            self._vetoed()
        else:
            self._committed()

    def _bad_already(self) -> bool:
        """It moves along the gradients that are there before it evaluates anything, so they are
        looked at first.
        """
        self.check()
        return self.vetoing

    # --- the parts of a step
    # -----------------------------------------------------------------------------------

    def check(self, *, again: bool = False) -> None:
        """Gradients are there and nothing has been updated yet. `again`: a further evaluation of
        the same step.
        """
        self._end_trace()
        late = read_later(self.context)
        peers = [] if again else self.peers.due()
        pending = self.shield.call(None, self._issue_with, peers)
        if pending is None:
            refused = self.context.agreement.stay(self.context.step, self.context.parameters)
            if refused and not self.context.scaling():  # a scaler refuses by itself
                self._refuse()
            return
        self.wiring.update(pending.norm)
        if late:
            self.shield.call(None, self._flag, pending)
            return
        reading = self.shield.call(None, self.reader.complete, pending)
        if reading is None:
            return
        hurt = self.shield.call(None, self._hurt, peers, reading)
        if hurt is None:
            self._judge(self._step(reading), reading, again=again)
        self._decide_together(peers, pending, hurt)
        if not self.vetoing and self._undo is None:
            known = (self.context.optimizer, self.context.lr_ceiling, reading.least_norm)
            self._hidden.give_back_later(self.shield.spare(None, keep_out_outliers, self.context))
            risky = self.shield.spare(False, risky_update, *known)
            self._undo = (
                self.shield.spare(None, UndoCopy, self.context.optimizer) if risky else None
            )

    def _issue_with(self, peers: list[Watching]) -> Pending:
        self.reader.start()
        others = self.peers.norm_of_others(peers)
        pending = self.reader.issue(self.heard.losses, self.heard.norm(), others)
        self.peers.norm = pending.norm.total if pending.norm is not None else None
        return pending

    def _hurt(self, peers: list[Watching], reading: Reading) -> Watcher | None:
        """The one whose weights are damaged, where a step is bad and this guard's own are not: it
        knows what to do.
        """
        if not peers or not alarming(reading) or stored_trouble(self.context):
            return None
        return next(
            (p for p in peers if isinstance(p, Watcher) and stored_trouble(p.context)), None
        )

    def _decide_together(
        self, peers: list[Watching], pending: Pending, hurt: Watcher | None
    ) -> None:
        """What one optimizer of a backward pass finds bad is dropped by all."""
        if self.vetoing:
            for peer in peers:
                peer.peers.drop(counts=True)
            return
        if not pending.others_bad and hurt is None:
            return
        asked = [hurt] if hurt is not None else peers
        self._with = next(
            (peer for peer in asked if isinstance(peer, Watcher) and peer.found_bad()), None
        )
        for peer in peers if self._with is not None else ():
            if peer is not self._with:
                peer.peers.drop(counts=True)
        self._follows = self._with is None and self.peers.refused_before()
        if self._with is not None or self._follows:
            self._refuse()

    def found_bad(self) -> bool:
        """Asked by another optimizer before this one steps: does its own reading veto the update?"""
        self._begin()
        self._end_trace()
        pending = self.shield.call(None, self._issue)
        reading = (
            self.shield.call(None, self.reader.complete, pending) if pending is not None else None
        )
        if reading is not None:
            self._judge(self._step(reading), reading, hide=False)
        return self.vetoing

    def _refuse(self) -> None:
        """Not for a reason of this optimizer's own."""
        self._hidden.hide(self._undo)
        self.vetoing = True

    def _judge(
        self, step: Step, reading: Reading, *, again: bool = False, hide: bool = True
    ) -> None:
        reading, verdict = self._assess(step, reading)
        if again and verdict.kind in FINITE_KINDS:
            verdict = OK  # along a line search: such losses say nothing about the run
        if not again or verdict.bad:
            self._reading = reading
        if verdict.severity == "note":
            self.shield.spare(None, self.pipeline.note, reading, verdict)
        if verdict.bad:
            if hide:
                self._hidden.hide(self._undo)
            if verdict.kind not in FINITE_KINDS:
                self.shield.always(
                    None, self.restore_buffers
                )  # before the replay, which starts from what is there
            self._incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
            self.vetoing = not let_through(verdict, self._incident)
            if not self.vetoing:
                self._hidden.release()

    def _vetoed(self) -> None:
        incident, peer, dropped = self._incident, self._with, self.peers.is_dropped
        self.dropped, self._with = True, None
        left = [
            self.shield.always("", self._hidden.put_back),
            self.shield.always("", self.restore_buffers),
        ]
        incident = self._told(incident, "; ".join(words for words in left if words))
        self._book(self._step(self._reading), self._reading, went_through=False)
        if dropped or peer is not None or self._follows:
            self.recovery.say(
                "veto",
                "update dropped: another optimizer of the same backward pass found a bad step",
            )
        self._follows = False
        self._end_step(counts=not dropped or self.peers.counts)
        self._apply(incident, hold=True)
        self._timeline = self.context.budget.rewinds
        if isinstance(peer, Watcher):
            peer._vetoed()
            peer.peers.drop(counts=False)  # its own call of step is still to come

    def _told(self, incident: Incident | None, left: str) -> Incident | None:
        """What could not be put back is said in the report, where there is one."""
        if left and (incident is None or incident.decision is None):
            self.recovery.say("veto", f"the update was vetoed, but {left}")
        if not left or incident is None or incident.decision is None:
            return incident
        return replace(incident, decision=replace(incident.decision, not_restored=left))

    def _committed(self) -> None:
        context, reading, step = self.context, self._reading, self._step(self._reading)
        born = (
            self.shield.spare([], born_in_update, context)
            if self._undo is not None and reading is not None
            else []
        )
        if born and self._undo is not None and reading is not None:
            self._undo.restore()
            reading = replace(reading, bad_state=tuple(born), state_born=True)
            reading, verdict = self._assess(step, reading)
            self._reading = reading
            self._incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
            self._vetoed()
            return
        self.dropped = False
        self.shield.call(None, self.reader.after_update)
        self._book(step, reading, went_through=True)
        self._end_step()

    def finish(self) -> None:
        """The loop is over: nothing else takes back what it did after a vetoed last update."""
        self.settle()
        self.shield.call(None, self.hold.take_back)

    # --- veto
    # --------------------------------------------------------------------------------------------------

    def _scaler_skipped(self, update: Update) -> None:
        """The scaler skipped by itself: the optimizer's hooks were never called."""
        self._begin()
        self._end_trace()
        pending = self.shield.call(None, self._issue)
        reading = (
            self.shield.call(None, self.reader.complete, pending) if pending is not None else None
        )
        if reading is not None:
            self._judge(self._step(reading), reading, hide=False)
        if not self.vetoing:
            update(None)
            self._book(self._step(reading), reading, went_through=False)
            self._end_step()
            self.hold.scaler_skipped()
            return
        try:
            self._vetoed()
        finally:
            update(step_end.present_scale(self.context))
            self.hold.scaler = False


def _nothing() -> None:
    """In the place of a closure that must not be evaluated: the update is refused."""
