"""What a run's page takes from the files beside the journal: samples, gradients, other runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepguard._errors import JournalError
from stepguard.records import Incident
from stepguard.report.last_good_run import differences, last_good
from stepguard.report.page_document import Extras
from stepguard.report.page_gradients import gradient_heat
from stepguard.report.page_sample import samples_of
from stepguard.report.story import Run, Story, read_story

MOST_NEIGHBOURS = 12
"""Runs in the folders beside this one that are looked at for the last good one."""
LARGEST_NEIGHBOUR = 1 << 25
"""Bytes of a journal that is read only to find the last good run."""

Known = Callable[[Incident, dict[str, Any], Path], bool]
"""Fills in a card from what was read before; False where it was not."""


def page_extras(story: Story, folder: Path, known: Known | None = None) -> Extras:
    """Samples and gradients of the incidents, and the difference to the last good run."""

    def enrich(incident: Incident, card: dict[str, Any], own: Path) -> None:
        if known is None or not known(incident, card, own):
            card["samples"] = samples_of(incident, own)
            card["heat"] = gradient_heat(incident, own)

    good = last_good(story.latest, [*story.runs, *_neighbours(folder)])
    rows = None if good is None else differences(good, story.latest)
    return Extras(enrich=enrich, difference=rows)


def _neighbours(folder: Path) -> Iterator[Run]:
    """Runs in the folders beside this one, the newest first."""
    for path in _journals_beside(folder.resolve())[:MOST_NEIGHBOURS]:
        try:
            yield from read_story(path.parent).runs
        except (JournalError, OSError, ValueError):
            continue


def _journals_beside(folder: Path) -> list[Path]:
    dated = []
    for path in folder.parent.glob("*/journal.jsonl"):
        try:
            facts = path.stat()
        except OSError:
            continue
        if path.parent != folder and facts.st_size <= LARGEST_NEIGHBOUR:
            dated.append((facts.st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]
