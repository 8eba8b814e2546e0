"""Read the journals of a run folder, once or while they are being written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal

from stepguard._errors import JournalError
from stepguard.journal import is_running, journal_path
from stepguard.report.story.build import build_story
from stepguard.report.story.model import Lane, Run, Story, whole_lines

StepsOf = Literal["one", "all"]
CHUNK = 1 << 22
LONGEST_LINE = 1 << 23
"""Bytes of a line that is read; a longer one is none of ours, and counts as torn."""
MOST_OPTIMIZERS = 16
"""Further optimizers of a run that are read."""
HEAD = 256
"""Bytes at a journal's beginning by which it is known again."""
_RANK = re.compile(r"journal\.rank([0-9]{1,9})\.jsonl")


def read_story(run: Path, rank: int | None = None, *, steps_of: StepsOf = "one") -> Story:
    """Read a run folder, or one journal file.

    `rank` is whose steps `Run.steps` holds: by default the lowest there is. `steps_of="all"` reads
    the steps of every rank. Raises JournalError where there is no journal, or a newer one.
    """
    reader = StoryReader(run, rank, steps_of=steps_of)
    if not reader.exists():
        raise JournalError(
            f"{run} does not exist; give a run directory that holds a journal.jsonl, or the file "
            f"itself."
            if not run.exists()
            else f"{reader.main_path} does not exist; give a run directory that holds a "
            f"journal.jsonl, or the file itself."
        )
    reader.read(torn_end=True)
    return reader.story()


def story_of(lines: Iterable[bytes], path: Path = Path("journal.jsonl")) -> Story:
    """The story of the lines of one journal, as if they had been read from `path`."""
    lane = Lane(path, 0)
    for line in lines:
        lane.take(line)
    return build_story(path, {0: lane}, 0, path, ())


def is_journal(path: Path) -> bool:
    """A file of this folder. A link out of it could show anything that its reader may read."""
    if not path.is_file():
        return False
    return not path.is_symlink() or path.resolve().parent == path.parent.resolve()


class StoryReader:
    """Reads journals that may still be written to. Whole lines only, each once."""

    def __init__(self, run: Path, rank: int | None = None, *, steps_of: StepsOf = "one") -> None:
        self.run = run
        self._asked = rank
        self._steps_of = steps_of
        self._lanes: dict[int, Lane] = {}
        self._offsets: dict[int, int] = {}
        self._heads: dict[int, tuple[int, bytes]] = {}
        """Inode and first bytes of each journal: another one at its path is read from its start."""
        self._in_long_line: set[int] = set()
        self.restarts = 0
        """How often a journal was replaced or cut while it was followed."""
        self._story: Story | None = None
        self._further: dict[Path, StoryReader] = {}
        """Readers of the folders of further optimizers of the same run."""
        self._follows_lanes = self.is_folder
        self._alive: bool | None = None
        """Does the process that started last still exist?"""

    @property
    def is_folder(self) -> bool:
        # A run folder may not exist yet, so it is told from a file by its name.
        return self.run.is_dir() or (not self.run.exists() and not self.run.suffix)

    @property
    def main_path(self) -> Path:
        """The journal whose steps are shown."""
        if not self.is_folder:
            return self.run
        return journal_path(self.run, self._main)

    @property
    def _main(self) -> int:
        if self._asked is not None:
            return self._asked
        return min(self._journals(), default=0)

    def exists(self) -> bool:
        return is_journal(self.main_path) if self.is_folder else self.run.is_file()

    def read(self, *, torn_end: bool = False) -> bool:
        """Take in what was written since; False if that is nothing.

        `torn_end`: nothing more will come, so half a line at the end counts as torn.
        """
        fresh = self._read_lanes(torn_end=torn_end)
        lane = self._lanes.get(self._main)
        process = lane.starts[-1].header.get("process") if lane and lane.starts else None
        alive = is_running(process)
        if alive is False:
            # between the two looks it may have written its end
            fresh |= self._read_lanes(torn_end=torn_end)
        fresh |= alive is not self._alive
        self._alive = alive
        if fresh:
            self._story = None
        return fresh

    def _read_lanes(self, *, torn_end: bool) -> bool:
        fresh = False
        for rank, path in self._journals().items():
            fresh |= self._read_lane(rank, path, torn_end=torn_end)
        for folder in self.run.glob("optimizer*") if self._follows_lanes else ():
            known = folder in self._further or len(self._further) >= MOST_OPTIMIZERS
            if not known and belongs_to_run_above(folder):
                further = StoryReader(folder, self._asked, steps_of=self._steps_of)
                further._follows_lanes = False
                self._further[folder] = further
        for reader in self._further.values():
            fresh |= reader.read(torn_end=torn_end)
        return fresh

    def story(self) -> Story:
        """The model of everything that was read so far."""
        if self._story is None:
            self._story = build_story(
                *(self.run, self._lanes, self._main, self.main_path, self._elsewhere()), self._alive
            )
            if self._further:
                readers = sorted(self._further.values(), key=lambda reader: reader.run)
                others: dict[str, list[Run]] = {}
                for run in [run for reader in readers for run in reader.story().runs]:
                    for name in _ids(run):
                        others.setdefault(name, []).append(run)
                runs = tuple(_with_lanes(run, others) for run in self._story.runs)
                self._story = replace(self._story, runs=runs)
        return self._story

    def _journals(self) -> dict[int, Path]:
        """The journals there are, by rank."""
        if not self.is_folder:
            found = _RANK.fullmatch(self.run.name)
            return {int(found[1]) if found else self._asked or 0: self.run}
        journals = {}
        if is_journal(self.run / "journal.jsonl"):
            journals[0] = self.run / "journal.jsonl"
        for path in sorted(self.run.glob("journal.rank*.jsonl")):
            found = _RANK.fullmatch(path.name)
            if found and is_journal(path):
                journals[int(found[1])] = path
        return dict(sorted(journals.items()))

    def _elsewhere(self) -> tuple[Path, ...]:
        if not self.run.is_dir():
            return ()
        below = {path.parent for path in self.run.glob("*/journal.jsonl")}
        return tuple(sorted(below - self._further.keys()))

    def _read_lane(self, rank: int, path: Path, *, torn_end: bool) -> bool:
        with_steps = self._steps_of == "all" or rank == self._main or not self.is_folder
        rest = b""
        read = 0
        try:
            with path.open("rb") as file:
                self._start_over_if_replaced(rank, file)
                lane = self._lanes.setdefault(rank, Lane(path, rank))
                start = self._offsets.get(rank, 0)
                file.seek(start)
                while chunk := file.read(CHUNK):
                    read += len(chunk)
                    if rank in self._in_long_line:
                        _, ended, chunk = chunk.partition(b"\n")
                        if not ended:
                            continue
                        self._in_long_line.discard(rank)
                    *lines, rest = whole_lines(rest + chunk)
                    for line in lines:
                        lane.take(line, with_steps=with_steps)
                    if len(rest) > LONGEST_LINE:
                        lane.torn += 1
                        self._in_long_line.add(rank)
                        rest = b""
        except FileNotFoundError:
            return False
        if rest and torn_end:
            lane.take(rest, with_steps=with_steps)
            rest = b""
        self._offsets[rank] = start + read - len(rest)
        return read > len(rest) or torn_end

    def _start_over_if_replaced(self, rank: int, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        head = file.read(HEAD)
        inode, known = self._heads.get(rank, (status.st_ino, b""))
        self._heads[rank] = (status.st_ino, head)
        same = inode == status.st_ino and head.startswith(known)
        if same and status.st_size >= self._offsets.get(rank, 0):
            return
        self.restarts += 1
        self._lanes.pop(rank, None)
        self._offsets.pop(rank, None)
        self._in_long_line.discard(rank)


def belongs_to_run_above(folder: Path) -> bool:
    """Does the journal in this folder say that it is of a further optimizer of one run?"""
    if folder.is_symlink():
        return False
    for path in sorted(folder.glob("journal*.jsonl")):
        if not is_journal(path):
            continue
        try:
            with path.open("rb") as lines:
                header = json.loads(lines.readline(LONGEST_LINE) or b"{}")
        except (OSError, ValueError, RecursionError):
            continue
        return isinstance(header, dict) and bool(header.get("lane"))
    return False


def _with_lanes(run: Run, others: Mapping[str, Sequence[Run]]) -> Run:
    """The run with what its further optimizers have recorded: guards of one process share an id."""
    found = {id(other): other for name in sorted(_ids(run)) for other in others.get(name, ())}
    return replace(run, further=tuple(found.values()))


def _ids(run: Run) -> set[str]:
    return {run.id, *(str(attempt.header.get("run")) for attempt in run.attempts)} - {"", "None"}
