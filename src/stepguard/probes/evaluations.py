"""Is the model evaluated in training mode? Several calls in a row without gradients, between two
updates, and a loss that is computed from what the model returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepguard.diagnose.case import EvaluationFacts
from stepguard.engine.context import Context
from stepguard.locate.live_trace import leave
from stepguard.locate.operands import aten, describe, storage_key
from stepguard.tensors.names import named_modules
from stepguard.tensors.torch_private import (
    TorchDispatchMode,
    dispatch_mode_stack,
    no_dispatch_modes,
    tree_flatten,
)

LOSSES = aten(
    "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits cross_entropy_loss nll_loss nll_loss_nd l1_loss"
)
"""In inference mode some of them arrive in one piece."""
IN_A_ROW = 4
"""Calls without gradients that make an evaluation. A training step makes one for the labels of a
student, an old policy or the choice of examples, rarely more."""
QUIET_STEPS = 3
"""Updates without such a call before it: what every step does is a part of the training."""
PHASES = 2
"""Evaluations with a loss after which it is a habit."""
MOST_OPERATIONS = 500
"""Followed after a call of the model; the loss is not far."""


class LossWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is made of the model's output until a loss takes it. Changes nothing."""

    def __init__(self, output: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        leaves = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor)]
        self._derived = set(map(storage_key, leaves))
        self._kept = leaves
        """Held, so that no other tensor gets their memory."""
        self._left = MOST_OPERATIONS
        self.loss = ""
        """The operation that took it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._left and not self.loss and not torch.is_grad_enabled():
            self._left -= 1
            with no_dispatch_modes():
                given = [one for one in tree_flatten(args)[0] if isinstance(one, Tensor)]
                if any(storage_key(one) in self._derived for one in given[:1]):
                    if describe(func).name in LOSSES:
                        self.loss = describe(func).name
                    results = [one for one in tree_flatten(made)[0] if isinstance(one, Tensor)]
                    self._kept += results
                    self._derived.update(map(storage_key, results))
        return made


class EvaluationObserver:
    """Notices evaluations of one guarded model."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.watching: LossWatch | None = None
        """While what the model has returned is followed."""
        self._step = -1
        """The update before which the newest call without gradients came."""
        self._calls = 0
        """Since then."""
        self._quiet = False
        self._phases = 0
        self.facts: EvaluationFacts | None = None

    def called(self, module: nn.Module) -> bool:
        """The model is called without gradients, in training mode. True: its output is wanted."""
        self.stop()
        step = self._context.step
        if step != self._step:
            self._quiet = self._step < 0 or step - self._step >= QUIET_STEPS
            self._step, self._calls = step, 0
        self._calls += 1
        wanted = self._calls == IN_A_ROW and self._quiet and self._phases < PHASES
        return wanted and not dispatch_mode_stack()

    def returned(self, output: Any) -> None:
        """What it has returned is followed until the loop does something else."""
        self.watching = LossWatch(output)
        self.watching.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """The model is called again, a backward pass begins, or the guard closes."""
        watch, self.watching = self.watching, None
        if watch is None:
            return
        leave(watch)
        if not watch.loss:
            return
        self._phases += 1
        dropout, norms = [], []
        for name, module in named_modules(self._context.roots):
            if not module.training:
                continue
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                dropout.append(name)
            elif isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
                norms.append(name)
        if self._phases == PHASES and (dropout or norms):
            self.facts = EvaluationFacts(
                step=self._step,
                calls=self._calls,
                loss=watch.loss.removeprefix("aten."),
                dropout=tuple(dropout),
                norms=tuple(norms),
            )
