"""Observe the loss and the pre-clip norm of a loop that stays as it is.

A few torch functions are wrapped while at least one guard watches, and put back when the last one
closes: `Tensor.backward` and `torch.autograd.backward`, whose root is the loss; the norm inside
`clip_grad_norm_`, which clipping has to compute anyway; `Module.load_state_dict`, after which
remembered buffers are old; `GradScaler.scale`, whose product may overflow where the loss does not;
`GradScaler.step`, which shows a scaler that was not handed over, and `GradScaler.update`, the only
call a loop makes when the scaler skipped; and `AveragedModel.update_parameters`, which has nothing
to average after a vetoed update. Nothing is installed on the user's objects, so copies, pickles and
compiled graphs never carry a hook of ours.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from stepguard.tensors.names import wrap
from stepguard.tensors.torch_private import CLIP_NORM, current_autograd_node

Update = Callable[[Any], None]


class Listener(Protocol):
    """Receives every backward and every clipping in the process, whosever they are."""

    def before_backward(self, root: Tensor) -> None: ...
    def after_backward(self, root: Tensor, *, failed: bool) -> None: ...
    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None: ...
    def after_load(self) -> None: ...
    def around_update(self, scaler: GradScaler, update: Update, new_scale: Any) -> None: ...
    def before_scaled_step(self, scaler: GradScaler, optimizer: Any) -> None: ...
    def averages_nothing(self, average: AveragedModel, model: Any) -> bool: ...


class _Backwards:
    begun = 0
    """Backward passes begun in this process."""
    running = 0


_listeners: list[weakref.ref[Listener]] = []
"""Weak: a watched optimizer holds its listener by its hooks, and both may go while others stay."""
_undo = ExitStack()
last_loads: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Names that the last `load_state_dict` of a module did not fill, and did not use."""
_before_scaling: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What a scaler returned, while it lives, and the loss it was made of."""


def backwards() -> int:
    """Return the number of the last backward pass: an update since then belongs to it."""
    return _Backwards.begun


def inside_backward() -> bool:
    """True while a backward pass runs."""
    return _Backwards.running > 0


def unscaled(root: Tensor) -> Tensor | None:
    """Return the loss that a scaler multiplied to get `root`; None where it did not."""
    found: Tensor | None = _before_scaling.get(root)  # type: ignore[no-untyped-call]
    return found


def listen(listener: Listener) -> Callable[[], None]:
    """Start telling `listener`; return the call that stops it."""
    if not _listeners:
        _patch(torch.Tensor, "backward", _observed_backward)
        _patch(torch.autograd, "backward", _observed_autograd_backward)
        _patch(torch.nn.Module, "load_state_dict", _observed_load)
        _patch(GradScaler, "scale", _observed_scale)
        _patch(GradScaler, "update", _observed_update)
        _patch(GradScaler, "step", _observed_scaled_step)
        _patch(AveragedModel, "update_parameters", _observed_average)
        # Without it the guard takes its own norm.
        if hasattr(clip_grad, CLIP_NORM):
            _patch(clip_grad, CLIP_NORM, _observed_norm)
    reference = weakref.ref(listener, _stop)
    _listeners.append(reference)
    return functools.partial(_stop, reference)


def _stop(reference: weakref.ref[Listener]) -> None:
    if reference not in _listeners:
        return
    _listeners.remove(reference)
    if not _listeners:
        _undo.close()


def _told() -> list[Listener]:
    """A copy: a listener may stop listening while it is called."""
    found: list[Listener] = []
    for reference in _listeners:
        listener = reference()
        if listener is not None:
            found.append(listener)
    return found


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    # Put back in any case, unlike tensors.wrapping.wrap: a wrapper of ours that stayed below one
    # of another library would tell every listener twice after the next install.
    _undo.callback(setattr, owner, name, original)
    setattr(owner, name, make(original))


def _observed_backward(original: Any) -> Any:
    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for listener in _told():
            listener.before_backward(self)
        failed = True
        _Backwards.begun += 1
        _Backwards.running += 1
        try:
            out = original(self, *args, **kwargs)
            failed = False
        finally:
            _Backwards.running -= 1
            for listener in _told():
                listener.after_backward(self, failed=failed)
        return out

    return backward


def _observed_autograd_backward(original: Any) -> Any:
    from_roots = _observed_backward(original)

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        root = tensors
        if isinstance(tensors, list | tuple) and len(tensors) == 1:
            root = tensors[0]
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # Tensor.backward and reentrant checkpoints call this too; a guard's replay is not a step.
        nested = inside_backward() or current_autograd_node() is not None
        if nested or caller.startswith("stepguard.") or not isinstance(root, Tensor):
            return original(tensors, *args, **kwargs)
        return from_roots(root, *args, **kwargs)

    return backward


def _observed_load(original: Any) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        unfilled = tuple(getattr(out, "missing_keys", ()))
        unused = tuple(getattr(out, "unexpected_keys", ()))
        last_loads[self] = (unfilled, unused)
        for listener in _told():
            listener.after_load()
        return out

    return load_state_dict


def observe_loads(undo: ExitStack) -> None:
    """Keep what loads leave unfilled, also before the first guard."""
    wrap(undo, torch.nn.Module, "load_state_dict", _observed_load)


def _observed_scale(original: Any) -> Any:
    @functools.wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if isinstance(scaled, Tensor) and scaled is not outputs:
            _before_scaling[scaled] = outputs.detach()
        return scaled

    return scale


def _observed_update(original: Any) -> Any:
    @functools.wraps(original)
    def update(self: GradScaler, new_scale: Any = None) -> None:
        call: Update = functools.partial(original, self)
        for listener in _told():
            call = functools.partial(listener.around_update, self, call)
        call(new_scale)

    return update


def _observed_scaled_step(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in _told():
            listener.before_scaled_step(self, optimizer)
        return original(self, optimizer, *args, **kwargs)

    return step


def _observed_average(original: Any) -> Any:
    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: Any) -> Any:
        # A list, not a generator: every listener counts the averages.
        answers = [listener.averages_nothing(self, model) for listener in _told()]
        if any(answers):
            return None
        return original(self, model)

    return update_parameters


def _observed_norm(original: Any) -> Any:
    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        # A list: an iterator would be used up by the norm itself.
        held = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm: Tensor = original(held, norm_type, *args, **kwargs)
        if float(norm_type) == 2.0:
            for listener in _told():
                listener.after_norm(held, norm)
        return norm

    return total_norm
