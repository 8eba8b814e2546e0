"""Follow torch's Join: a rank that has no data left must not be waited for.

Inside Join such a rank only takes part in the collectives of DDP's forward and backward. It says so
in the store before, so that a rank that waits for it learns it at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from stepguard.sentinel.rank_meeting import Meeting
from stepguard.tensors.wrapping import wrap

Followed = tuple[weakref.ref[nn.Module], Meeting]
_followed: list[Followed] = []
_undo = ExitStack()


def follow_join(model: nn.Module, meeting: Meeting) -> Callable[[], None]:
    """Tell `meeting` about every Join that `model` is given to; return the call that stops it."""
    from torch.distributed.algorithms.join import Join

    if not _followed:
        wrap(_undo, Join, "__enter__", _observed_enter)
        wrap(_undo, Join, "__exit__", _observed_exit)
    entry = (weakref.ref(model), meeting)
    _followed.append(entry)
    return functools.partial(_stop, entry)


def _stop(entry: Followed) -> None:
    _followed[:] = [other for other in _followed if other is not entry]
    if not _followed:
        _undo.close()


def _meetings(join: Any) -> list[Meeting]:
    given = {id(item) for item in join._joinables}
    return [meeting for model, meeting in _followed if id(model()) in given]


def _observed_enter(original: Any) -> Any:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        for meeting in _meetings(self):
            meeting.joining = True
        return original(self)

    return enter


def _observed_exit(original: Any) -> Any:
    @functools.wraps(original)
    def leave(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        if kind is None:
            for meeting in _meetings(self):
                meeting.no_data_left()
        try:
            return original(self, kind, value, trace)
        finally:
            for meeting in _meetings(self):
                meeting.data_again()

    return leave
