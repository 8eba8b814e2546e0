"""Which checkpoints a framework may delete: shared by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def to_delete(sorted_checkpoints: Sequence[str], keep: int, protected: set[Path]) -> list[str]:
    """The oldest ones beyond `keep`, never the newest and never a protected one."""
    newest = map(Path, sorted_checkpoints[-1:])
    kept = {path.resolve() for path in (*protected, *newest)}
    others = [path for path in sorted_checkpoints if Path(path).resolve() not in kept]
    room = max(0, keep - (len(sorted_checkpoints) - len(others)))
    return others[: max(0, len(others) - room)]
