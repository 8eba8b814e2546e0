"""Refuse to save a state that holds non-finite values: shared by all frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepguard._errors import StepguardError

SHOWN = 3
"""Tensors that a message names."""


class SaveRefused(StepguardError):  # noqa: N818 (an outcome, like TrainingHalted)
    """A save was asked for while stored tensors are non-finite. Nothing was written or deleted."""

    def __init__(self, what: str, tensors: Sequence[str]) -> None:
        super().__init__(what, tuple(tensors))
        self.what = what
        self.tensors = tuple(tensors)

    def __str__(self) -> str:
        named = ", ".join(self.tensors[:SHOWN])
        if len(self.tensors) > SHOWN:
            named += ", ..."
        return (
            f"refused to save {self.what}: non-finite stored tensors: {len(self.tensors)} "
            f"({named}); load the last good checkpoint, or close() the guard to save it as it is"
        )


def to_delete(sorted_checkpoints: Sequence[str], keep: int, protected: set[Path]) -> list[str]:
    """The oldest ones beyond `keep`, never the newest and never a protected one."""
    newest = map(Path, sorted_checkpoints[-1:])
    kept = {path.resolve() for path in (*protected, *newest)}
    others = [path for path in sorted_checkpoints if Path(path).resolve() not in kept]
    room = max(0, keep - (len(sorted_checkpoints) - len(others)))
    return others[: max(0, len(others) - room)]
