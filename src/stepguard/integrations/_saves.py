"""Refusing to save a state that holds non-finite values, in words that every framework's guard
uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepguard._errors import StepguardError

SHOWN = 3
"""Tensors that a message names."""


class SaveRefused(StepguardError):  # noqa: N818 (an outcome, like TrainingHalted)
    """A save was asked for while stored tensors are non-finite. Nothing was written and nothing
    deleted.
    """

    def __init__(self, what: str, tensors: Sequence[str]) -> None:
        super().__init__(what, tuple(tensors))
        self.what, self.tensors = what, tuple(tensors)

    def __str__(self) -> str:
        named = ", ".join(self.tensors[:SHOWN]) + (", ..." if len(self.tensors) > SHOWN else "")
        return (
            f"refused to save {self.what}: non-finite stored tensors: {len(self.tensors)} "
            f"({named}); load the last good checkpoint, or close() the guard to save it as it is"
        )


def to_delete(sorted_checkpoints: Sequence[str], keep: int, protected: set[Path]) -> list[str]:
    """The oldest ones beyond `keep`, never the newest and never a protected one."""
    safe = {path.resolve() for path in protected} | {
        Path(path).resolve() for path in sorted_checkpoints[-1:]
    }
    spare = [path for path in sorted_checkpoints if Path(path).resolve() not in safe]
    held = len(sorted_checkpoints) - len(spare)
    return spare[: max(0, len(spare) - max(0, keep - held))]
