"""Hearing the calls of a module without a hook on it.

`Module.__call__` looks for `_compiled_call_impl` on the instance before it runs hooks and forward,
and torch itself leaves that attribute out of pickles and copies. So a watched model is saved,
deep-copied, scripted and exported as if nobody listened, and its calls keep torch's fast path for
modules without hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from stepguard.tensors.torch_private import COMPILED_CALL


class Hearer(Protocol):
    """Told about every call of one module."""

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None: ...
    def returned(self, module: nn.Module, output: Any) -> None: ...
    def raised(self, module: nn.Module, error: Exception) -> None: ...


class HeardCall:
    """Stands where torch looks for a compiled forward, and runs what would have run without it."""

    def __init__(self, module: Any, below: Callable[..., Any] | None) -> None:
        self._module = module
        self.below = below
        """What `module.compile()` had put there."""
        self.hearers: list[Hearer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._module._call_impl(*args, **kwargs)
        module = self._called()
        run = module._call_impl if self.below is None else self.below
        if module is not self._module:
            return run(*args, **kwargs)
        for hearer in tuple(self.hearers):
            hearer.called(module, args, kwargs)
        try:
            output = run(*args, **kwargs)
        except Exception as error:
            for hearer in tuple(self.hearers):
                hearer.raised(module, error)
            raise
        for hearer in tuple(self.hearers):
            hearer.returned(module, output)
        return output

    def _called(self) -> Any:
        """The module that was called: a twin with the same attributes (a replica of DataParallel)
        must run itself.
        """
        caller = sys._getframe(2).f_locals.get("self")
        if isinstance(caller, nn.Module) and vars(caller).get(COMPILED_CALL) is self:
            return caller
        return self._module

    def __deepcopy__(self, memo: Any) -> Any:
        return None

    def __reduce__(self) -> Any:
        """For classes with a `__getstate__` of their own that does not leave this attribute out."""
        return type(None), ()


def hear_calls(module: nn.Module, hearer: Hearer) -> Callable[[], None]:
    """Start telling `hearer`; returns the call that stops it. Several may listen to one module."""
    heard = vars(module).get(COMPILED_CALL)
    if not isinstance(heard, HeardCall):
        heard = HeardCall(module, heard)
        vars(module)[COMPILED_CALL] = heard
    heard.hearers.append(hearer)
    return partial(_stop, module, heard, hearer)


def hear_again(module: nn.Module, hearer: Hearer, stop: Callable[[], None]) -> Callable[[], None]:
    """`module.compile()` has put its own there since: listen around that. Gives the call that stops
    it.
    """
    heard = vars(module).get(COMPILED_CALL)
    if isinstance(heard, HeardCall):
        return stop
    stop()
    return hear_calls(module, hearer)


def _stop(module: nn.Module, heard: HeardCall, hearer: Hearer) -> None:
    if hearer in heard.hearers:
        heard.hearers.remove(hearer)
    if heard.hearers or vars(module).get(COMPILED_CALL) is not heard:
        return  # others listen, or `module.compile()` has replaced it since
    if heard.below is None:
        del vars(module)[COMPILED_CALL]
    else:
        vars(module)[COMPILED_CALL] = heard.below
