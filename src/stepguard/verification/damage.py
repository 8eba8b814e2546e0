"""The one exception of the readers, and the notes they take: what is wrong becomes a Problem, never
a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stepguard.records.verification import Problem, ProblemKind, Role, Weight
from stepguard.verification import limits

LONGEST_NAME, LONGEST_DETAIL = 200, 600


def clean(text: str, longest: int) -> str:
    """Names come from the file: nothing in them may move a cursor, and none may fill the screen."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


class Damaged(Exception):  # noqa: N818 (an outcome of reading, not a fault of ours)
    """Reading cannot go on; says the kind of problem and what was seen."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class Notes:
    """The problems of one file. Of each kind only the first are kept, the others are counted."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._kept: list[Problem] = []
        self._seen: Counter[tuple[ProblemKind, Weight]] = Counter()

    def add(
        self,
        kind: ProblemKind,
        detail: str,
        *,
        tensor: str | None = None,
        severity: Weight = "error",
        role: Role | None = None,
    ) -> None:
        self._seen[kind, severity] += 1
        if self._seen[kind, severity] <= limits.MOST_PER_KIND:
            name = None if tensor is None else clean(tensor, LONGEST_NAME)
            text = clean(detail, LONGEST_DETAIL)
            problem = Problem(
                file=self.file, kind=kind, tensor=name, detail=text, severity=severity, role=role
            )
            self._kept.append(problem)

    def damaged(self, damage: Damaged) -> None:
        self.add(damage.kind, damage.detail)

    def problems(self) -> list[Problem]:
        more = [
            Problem(
                file=self.file,
                kind=kind,
                severity=severity,
                detail=f"and {seen - limits.MOST_PER_KIND} more of this kind in this file",
            )
            for (kind, severity), seen in self._seen.items()
            if seen > limits.MOST_PER_KIND
        ]
        return [*self._kept, *more]


def listed(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
