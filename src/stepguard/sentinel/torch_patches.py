"""Seeing the loss and the pre-clip norm of a loop that stays as it is.

A few torch functions are wrapped while at least one guard watches, and put back when the last one
closes: `Tensor.backward`, whose root is the loss; the norm inside `clip_grad_norm_`, which clipping
has to compute anyway; `Module.load_state_dict`, after which remembered buffers are old;
`GradScaler.step`, which shows the scaler nobody handed over, and `GradScaler.update`, the only call
a loop makes when the scaler skipped; and `AveragedModel.update_parameters`, which has nothing to
average after a vetoed update. Nothing is installed on the user's objects, so copies, pickles and
compiled graphs never carry a hook of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel

from stepguard.tensors.torch_private import CLIP_NORM


class Listener(Protocol):
    """Told about every backward and every clipping in the process; decides for itself what concerns
    it.
    """

    def before_backward(self, root: Tensor) -> None: ...
    def after_backward(self, root: Tensor, *, failed: bool) -> None: ...
    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None: ...
    def after_load(self) -> None: ...
    def around_update(self, scaler: GradScaler, update: Update, new_scale: Any) -> None: ...
    def before_scaled_step(self, scaler: GradScaler, optimizer: Any) -> None: ...
    def averages_nothing(self, average: AveragedModel, model: Any) -> bool: ...


Update = Callable[[Any], None]


_listeners: list[Listener] = []
_undo = ExitStack()
_backwards = [0, 0]
"""Backward passes begun in this process, and those that are running now."""


def backwards() -> int:
    """Number of the last backward pass: what stepped since belongs to it."""
    return _backwards[0]


def inside_backward() -> bool:
    return _backwards[1] > 0


def listen(listener: Listener) -> Callable[[], None]:
    """Start telling `listener`; returns the call that stops it."""
    if not _listeners:
        _install()
    _listeners.append(listener)
    return functools.partial(_stop, listener)


def _stop(listener: Listener) -> None:
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            _undo.close()


def _install() -> None:
    _wrap(torch.Tensor, "backward", _tapped_backward)
    _wrap(torch.nn.Module, "load_state_dict", _tapped_load)
    _wrap(GradScaler, "update", _tapped_update)
    _wrap(GradScaler, "step", _tapped_scaled_step)
    _wrap(AveragedModel, "update_parameters", _tapped_average)
    # Without it the guard takes its own norm.
    if hasattr(clip_grad, CLIP_NORM):
        _wrap(clip_grad, CLIP_NORM, _tapped_norm)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    # Put back in any case, unlike tensors.wrapping.wrap: a wrapper of ours that stayed below one
    # of another library would tell every listener twice after the next install.
    _undo.callback(setattr, owner, name, original)
    setattr(owner, name, make(original))


def _tapped_backward(original: Any) -> Any:
    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(_listeners):
            listener.before_backward(self)
        failed = True
        _backwards[0] += 1
        _backwards[1] += 1
        try:
            out = original(self, *args, **kwargs)
            failed = False
        finally:
            _backwards[1] -= 1
            for listener in tuple(_listeners):
                listener.after_backward(self, failed=failed)
        return out

    return backward


def _tapped_load(original: Any) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        for listener in tuple(_listeners):
            listener.after_load()
        return out

    return load_state_dict


def _tapped_update(original: Any) -> Any:
    @functools.wraps(original)
    def update(self: GradScaler, new_scale: Any = None) -> None:
        call: Update = functools.partial(original, self)
        for listener in tuple(_listeners):
            call = functools.partial(listener.around_update, self, call)
        call(new_scale)

    return update


def _tapped_scaled_step(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(_listeners):
            listener.before_scaled_step(self, optimizer)
        return original(self, optimizer, *args, **kwargs)

    return step


def _tapped_average(original: Any) -> Any:
    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: Any) -> Any:
        said = [
            listener.averages_nothing(self, model) for listener in tuple(_listeners)
        ]  # every one is told
        return None if any(said) else original(self, model)

    return update_parameters


def _tapped_norm(original: Any) -> Any:
    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        held = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm: Tensor = original(held, norm_type, *args, **kwargs)
        if float(norm_type) == 2.0:
            for listener in tuple(_listeners):
                listener.after_norm(held, norm)
        return norm

    return total_norm
