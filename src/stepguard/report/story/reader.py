"""Read the journals of a run folder, once or while they are being written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from stepguard._errors import JournalError
from stepguard.journal import journal_path
from stepguard.report.story.build import build_story
from stepguard.report.story.lane import Lane, whole_lines
from stepguard.report.story.model import Story

StepsOf = Literal["one", "all"]
CHUNK = 1 << 24
_RANK = re.compile(r"journal\.rank(\d+)\.jsonl")


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


class StoryReader:
    """Reads journals that may still be written to. Whole lines only, each once."""

    def __init__(self, run: Path, rank: int | None = None, *, steps_of: StepsOf = "one") -> None:
        self.run = run
        self._asked = rank
        self._steps_of = steps_of
        self._lanes: dict[int, Lane] = {}
        self._offsets: dict[int, int] = {}
        self._story: Story | None = None

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
        return self.main_path.is_file()

    def read(self, *, torn_end: bool = False) -> bool:
        """Take in what was written since; False if that is nothing.

        `torn_end`: nothing more will come, so half a line at the end counts as torn.
        """
        fresh = False
        for rank, path in self._journals().items():
            fresh |= self._read_lane(rank, path, torn_end=torn_end)
        if fresh:
            self._story = None
        return fresh

    def story(self) -> Story:
        """The model of everything that was read so far."""
        if self._story is None:
            self._story = build_story(
                self.run, self._lanes, self._main, self.main_path, self._elsewhere()
            )
        return self._story

    def _journals(self) -> dict[int, Path]:
        """The journals there are, by rank."""
        if not self.is_folder:
            found = _RANK.fullmatch(self.run.name)
            return {int(found[1]) if found else self._asked or 0: self.run}
        journals = {}
        if (self.run / "journal.jsonl").is_file():
            journals[0] = self.run / "journal.jsonl"
        for path in sorted(self.run.glob("journal.rank*.jsonl")):
            found = _RANK.fullmatch(path.name)
            if found and path.is_file():
                journals[int(found[1])] = path
        return dict(sorted(journals.items()))

    def _elsewhere(self) -> tuple[Path, ...]:
        if not self.run.is_dir():
            return ()
        return tuple(sorted(path.parent for path in self.run.glob("*/journal.jsonl")))

    def _read_lane(self, rank: int, path: Path, *, torn_end: bool) -> bool:
        lane = self._lanes.get(rank)
        if lane is None:
            lane = self._lanes[rank] = Lane(path, rank)
        with_steps = self._steps_of == "all" or rank == self._main or not self.is_folder
        start = self._offsets.get(rank, 0)
        rest = b""
        read = 0
        try:
            with path.open("rb") as file:
                file.seek(start)
                while chunk := file.read(CHUNK):
                    read += len(chunk)
                    *lines, rest = whole_lines(rest + chunk)
                    for line in lines:
                        lane.take(line, with_steps=with_steps)
        except FileNotFoundError:
            return False
        if rest and torn_end:
            lane.take(rest, with_steps=with_steps)
            rest = b""
        self._offsets[rank] = start + read - len(rest)
        return read > len(rest) or torn_end
