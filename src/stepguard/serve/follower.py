"""Tails one run for all pages that show it, and says to each what came since it last asked."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard.records import Incident
from stepguard.report.page_columns import plain_columns
from stepguard.report.page_document import (
    Extras,
    drawn_columns,
    parts,
    run_facts,
    states_of,
    story_document,
    version,
)
from stepguard.report.page_extras import page_extras
from stepguard.report.page_facts import quick_facts
from stepguard.report.story import Run, Story, StoryReader

EVERY = 0.4
"""Seconds between two looks at a journal that somebody watches."""
_NUMBER = re.compile(r"[0-9]{1,15}")
REST = 8
"""A look that took long is followed by so many times as long a rest."""


@dataclass(frozen=True, slots=True)
class PageProgress:
    """How far a page has come: which run of the folder, how many rows, which facts."""

    number: int
    rows: int
    version: str

    def __str__(self) -> str:
        return f"{self.number}:{self.rows}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> PageProgress | None:
        """What `str` wrote; None for anything else."""
        number, _, rest = text.partition(":")
        rows, _, facts = rest.partition(":")
        if not _NUMBER.fullmatch(number) or not _NUMBER.fullmatch(rows):
            return None
        return cls(int(number), int(rows), facts)


class RunFollower:
    """One run folder. Reading happens in a thread, one look at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._reader = StoryReader(folder, steps_of="all")
        self._extras = Extras()
        self._samples: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._next_look = 0.0

    async def look(self) -> Story:
        """The story up to now; a journal is read at most every `EVERY` seconds."""
        async with self._lock:
            if time.monotonic() >= self._next_look:
                began = time.monotonic()
                await asyncio.to_thread(self._read)
                now = time.monotonic()
                self._next_look = now + max(EVERY, REST * (now - began))
            return self._reader.story()

    def _read(self) -> None:
        restarts = self._reader.restarts
        if self._reader.read():
            if self._reader.restarts != restarts:
                self._samples.clear()
            story = self._reader.story()
            self._extras = page_extras(story, self.folder, self._kept)

    def _kept(self, incident: Incident, card: dict[str, Any], folder: Path) -> bool:
        """Take what an earlier look found in the incident's folder."""
        found = self._samples.setdefault(f"{folder}/{incident.rank}/{incident.id}", card)
        if found is card:
            return False
        card["samples"] = found["samples"]
        card["heat"] = found["heat"]
        return True

    async def document(self, events: str) -> dict[str, Any]:
        """The whole page's document, with the address of what comes after it."""
        story = await self.look()
        document = await asyncio.to_thread(story_document, story, self.name, self._extras)
        return {**document, "live": {"events": f"{events}?journal={self._reader.restarts}"}}

    async def since(
        self, place: PageProgress, journal: str, lane: int = 0
    ) -> tuple[PageProgress, dict[str, Any]] | None:
        """What came since to one optimizer of the run; None if nothing did.

        The page has to be made anew, and gets nothing, for a new run, for another optimizer, and
        where a journal was replaced: `journal` is which one the page shows.
        """
        story = await self.look()
        lanes = story.latest.lanes
        run = lanes[lane] if lane < len(lanes) else lanes[0]
        now = PageProgress(run.number, len(run.steps), version(run, len(lanes)))
        if journal != str(self._reader.restarts):
            return now, {}
        if now == place:
            return None
        others = place.version.rpartition("-")[2] not in ("", str(len(lanes)))
        if now.number != place.number or now.rows < place.rows or others:
            return now, {}
        return now, await asyncio.to_thread(self._message, story.latest, run, place, now)

    def _message(
        self, whole: Run, run: Run, place: PageProgress, now: PageProgress
    ) -> dict[str, Any]:
        names = drawn_columns(run.steps)
        message: dict[str, Any] = {
            "from": place.rows,
            "count": now.rows - place.rows,
            "columns": plain_columns(run.steps, names, states_of(run), place.rows),
            "always": quick_facts(run, whole),
        }
        if now.version != place.version or not place.rows:
            message["parts"] = parts(run)
            message["facts"] = run_facts(run, self.name, self._extras, whole)
        return message
