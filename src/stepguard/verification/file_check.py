"""Check one file: parse it by its format, read every value once, judge the values."""

from __future__ import annotations

from pathlib import Path

from stepguard.records.verification import Role
from stepguard.verification import file_formats, roles
from stepguard.verification.bounded_file import FileSlice, open_file
from stepguard.verification.damage import Damaged, ProblemList
from stepguard.verification.file_layout import FileLayout
from stepguard.verification.format_entry import Progress, Read
from stepguard.verification.scan import scan
from stepguard.verification.value_rules import judge


def parse(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
    """Fill the layout with the reader of the format that the first bytes show."""
    entry = file_formats.format_of(source, layout.path)
    layout.format = entry.name
    entry.read(source, layout, role)


def check_file(
    path: Path,
    progress: Progress,
    *,
    read: Read | None = None,
    allowed: frozenset[str] = frozenset(),
) -> FileLayout:
    """Check a file; what is wrong with it is in the result, never raised.

    `read` is used instead of the reader of its format; tensors in `allowed` may be non-finite.
    """
    layout = FileLayout(path, "unknown", 0, ProblemList(str(path)))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(count)

    try:
        with open_file(path) as source:
            layout.size = source.size
            try:
                (read or parse)(source, layout, roles.of_file(path.name))
                layout.complete = True
            except Damaged as damage:
                layout.problems.add_damage(damage)
            # also after damage: what was understood up to there is worth reading
            scan(source, layout, advance)
    except Damaged as damage:
        layout.problems.add_damage(damage)
    judge(layout, allowed)
    # bytes between the tensors were not read; the bar counts the whole file
    progress(max(0, layout.size - done))
    return layout
