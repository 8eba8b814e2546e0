"""The one line on stderr by which a launcher learns that the policy stopped a run, and whether a
restart can help.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, get_args

Restart = Literal["helps", "same-place", "no"]
"""`helps`: the fault was transient, or the restart passes over it. `same-place`: a restart with the
same data and settings comes to the same stop. `no`: nothing good is left to start from, or the
program itself has to be changed.
"""


def exit_line(
    *, step: int, cause: str, restart: Restart, state: str | PurePath | None = None
) -> str:
    """`stepguard: HALTED step=48 cause=SG204 restart=same-place state=runs/a/checkpoints/step-40`,
    without a newline.

    `cause` is the code of the first finding, or the kind of the verdict where nothing was found.
    `state` is where the newest good state lies; it stands last, so that a path with blanks is
    everything up to the end of the line.
    """
    if restart not in get_args(Restart):
        raise ValueError(
            f"restart={restart!r} is not known; use one of {', '.join(get_args(Restart))}."
        )
    where = _one_line(str(state)) if state is not None and str(state) else "none"
    word = "-".join(_one_line(cause).split()) or "unknown"
    return f"stepguard: HALTED step={step} cause={word} restart={restart} state={where}"


def _one_line(text: str) -> str:
    """A path may hold a newline, a line may not."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
