"""`Damaged`, the one exception of the readers, and the list of problems found in one file."""

from __future__ import annotations

from collections import Counter

from stepguard.records.verification import Problem, ProblemKind, Role, Weight
from stepguard.verification import limits

LONGEST_NAME = 200
LONGEST_DETAIL = 600


def clean(text: str, longest: int) -> str:
    """Replace unprintable characters and shorten: text from a file must not control a terminal."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    if len(shown) > longest:
        return shown[: longest - 3] + "..."
    return shown


class Damaged(Exception):  # noqa: N818 (an outcome of reading, not a fault of ours)
    """Reading cannot continue; carries the kind of problem and a sentence."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class NotPickled(Damaged):
    """No unpickler gets past this byte: the file is not a pickle, or the pickle ends here."""


class ProblemList:
    """The problems of one file. Only the first of each kind are kept, the others are counted."""

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
        if self._seen[kind, severity] > limits.MOST_PER_KIND:
            return
        problem = Problem(
            file=self.file,
            kind=kind,
            tensor=None if tensor is None else clean(tensor, LONGEST_NAME),
            detail=clean(detail, LONGEST_DETAIL),
            severity=severity,
            role=role,
        )
        self._kept.append(problem)

    def add_damage(self, damage: Damaged) -> None:
        self.add(damage.kind, damage.detail)

    def all(self) -> list[Problem]:
        """Return the kept problems, and one line for each kind of which some were left out."""
        listed = list(self._kept)
        for (kind, severity), seen in self._seen.items():
            more = seen - limits.MOST_PER_KIND
            if more > 0:
                detail = f"and {more} more of this kind in this file"
                listed.append(Problem(file=self.file, kind=kind, severity=severity, detail=detail))
        return listed
