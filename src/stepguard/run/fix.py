"""Write the fix of an incident as a change of the user's files, proven by running the step."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepguard._errors import CapsuleError
from stepguard.diagnose.source_line import import_of
from stepguard.records import Edit, Incident, Remedy
from stepguard.run.replay import Confirm, replay
from stepguard.run.whatif import capsule_of
from stepguard.state.atomic import write_file
from stepguard.state.importing import inside


@dataclass(slots=True, kw_only=True)
class ProvenFix:
    """A change that was seen to mend the step."""

    incident: Incident
    """The incident as the replay found it: before the change."""
    remedy: Remedy
    code: str
    """Of the finding that it answers."""
    files: dict[Path, tuple[str, str]] = field(default_factory=dict)
    """Each file as it is, and as it is to be."""

    @property
    def diff(self) -> str:
        """The change as a unified diff, for `git apply` or `patch -p1`."""
        parts: list[str] = []
        for path, (old, new) in self.files.items():
            name = path.relative_to(Path.cwd()).as_posix()
            parts += difflib.unified_diff(
                old.splitlines(keepends=True),
                new.splitlines(keepends=True),
                f"a/{name}",
                f"b/{name}",
            )
        return "".join(parts)

    def apply(self) -> list[Path]:
        """Write the files. Raises CapsuleError if one has changed since the step was run."""
        for path, (old, _) in self.files.items():
            if _read(path) != old:
                raise CapsuleError(f"{path} has changed since the step was run; run this again.")
        for path, (_, new) in self.files.items():
            mode = path.stat().st_mode
            write_file(path, new.encode())
            path.chmod(mode)
        return list(self.files)


def fix(
    path: str | Path,
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    confirm: Confirm = lambda command: False,
) -> ProvenFix:
    """Replay the capsule and return the fix that mends its step. Raises CapsuleError.

    Of a run, the first incident of its last chain for which the run itself has found a fix, else
    the first of all.
    """
    folder, _ = capsule_of(Path(path), _has_fix)
    incident = replay(folder, build=build, script=script, confirm=confirm)
    if incident.origin is None or not incident.origin.reproduced:
        raise CapsuleError(f"{folder} is not reproduced here: there is nothing to prove a fix on.")
    untried = ""
    for finding in incident.findings[:1]:
        for remedy in finding.remedies:
            if remedy.proven:
                found = ProvenFix(incident=incident, remedy=remedy, code=finding.code)
                found.files = _changed_files(remedy)
                return found
            untried = untried or remedy.tried or remedy.title
    raise CapsuleError(
        f"no change of your own lines is known to mend {folder}: {untried or 'no cause was found'}."
    )


def _has_fix(incident: Incident) -> bool:
    return any(remedy.proven for one in incident.findings[:1] for remedy in one.remedies)


def _changed_files(remedy: Remedy) -> dict[Path, tuple[str, str]]:
    files: dict[Path, tuple[str, str]] = {}
    for name in dict.fromkeys(edit.file for edit in remedy.edits):
        if not Path(name).is_file():
            raise CapsuleError(f"{name} is not a file: change the cell by hand: {remedy.snippet}")
        path = inside(Path(name), name, CapsuleError)
        old = _read(path)
        files[path] = (old, _changed(path, old, remedy, name))
    return files


def _changed(path: Path, text: str, remedy: Remedy, name: str) -> str:
    lines = text.splitlines(keepends=True)
    newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    edits = [edit for edit in remedy.edits if edit.file == name]
    for edit in sorted(edits, key=lambda one: one.line, reverse=True):
        _replace(path, lines, edit, newline)
    place, known = _after_imports("".join(lines))
    needs = tuple(name for name in remedy.needs if name not in known)
    if needs:
        lines.insert(place, import_of(needs) + newline)
    return "".join(lines)


def _replace(path: Path, lines: list[str], edit: Edit, newline: str) -> None:
    first = edit.line - 1
    last = first + len(edit.old)
    if tuple(line.rstrip("\r\n") for line in lines[first:last]) != edit.old:
        raise CapsuleError(f"{path} has changed since it was loaded; run this again.")
    lines[first:last] = [line + newline for line in edit.new]


def _after_imports(text: str) -> tuple[int, set[str]]:
    """The line before which one more import can stand, and what is imported of ours already."""
    place = 0
    known: set[str] = set()
    for position, node in enumerate(ast.parse(text).body):
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        docstring = position == 0 and isinstance(node, ast.Expr)
        if not imports and not docstring:
            break
        place = node.end_lineno or node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "stepguard.numerics":
            known |= {name.name for name in node.names if name.asname is None}
    return place, known


def _read(path: Path) -> str:
    # bytes, so that the ends of lines stay what they are
    return path.read_bytes().decode()
