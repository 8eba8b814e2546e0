"""`check`: every item against one subject, and the state the run would start in."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path

from stepguard._errors import ConfigError, StepguardError
from stepguard.preflight.answers import Missing, Pointless, Seen
from stepguard.preflight.data.facts import Progress
from stepguard.preflight.inspection import Inspection, Place
from stepguard.preflight.item import Item
from stepguard.preflight.items import ITEMS, LAST
from stepguard.preflight.status import alignment, status_facts
from stepguard.preflight.subject import Subject
from stepguard.records.preflight import Outcome, Preflight


def check(
    subject: Subject,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    target: str = "",
    place: Place | None = None,
    progress: Progress | None = None,
) -> Preflight:
    """Look at everything the subject has. `only` and `skip` take ids or patterns such as `data.*`.

    The subject's objects are left bit for bit as they were. Raises ConfigError for a subject that
    cannot be used.
    """
    if place is None:
        place = Place(
            Path.cwd(), why_untracked="wrap the configuration in stepguard.preflight.Tracked"
        )
    inspection = Inspection(subject, place, progress)
    chosen = selected(tuple(only), tuple(skip))
    by_id = {
        item.id: _looked(item, inspection)
        for item in sorted(chosen, key=lambda item: item.id in LAST)
    }
    outcomes = tuple(by_id[item.id] for item in chosen)
    if not any(
        item.id.startswith("precision.") for item in chosen
    ):  # no probe that nobody asked for
        return Preflight(
            target=target, outcomes=outcomes, alignment_why=("precision was not looked at",)
        )
    aligned, why = alignment(inspection)
    return Preflight(
        target=target,
        outcomes=outcomes,
        facts=status_facts(inspection),
        alignment=aligned,
        alignment_why=why,
    )


def selected(only: tuple[str, ...], skip: tuple[str, ...]) -> list[Item]:
    """The items these patterns leave; a pattern that matches none is a mistake."""
    for pattern in (*only, *skip):
        if not any(_matches(item, pattern) for item in ITEMS):
            sections = sorted({item.id.partition(".")[0] for item in ITEMS})
            raise ConfigError(
                f"{pattern!r} is no item; use an id such as 'lr.config', or one of "
                f"{', '.join(sections)}."
            )
    wanted = [
        item for item in ITEMS if not only or any(_matches(item, pattern) for pattern in only)
    ]
    return [item for item in wanted if not any(_matches(item, pattern) for pattern in skip)]


def _matches(item: Item, pattern: str) -> bool:
    return item.id.partition(".")[0] == pattern or fnmatch.fnmatchcase(item.id, pattern)


def _looked(item: Item, inspection: Inspection) -> Outcome:
    try:
        seen = item.look(inspection)
    except Missing as missing:
        seen = Seen("not_checked", (str(missing),))
    except Pointless as why:
        seen = Seen("not_applicable", (str(why),))
    except StepguardError:
        raise
    except Exception as fault:  # one item that cannot cope with an object must not hide the others
        said = (
            f"this check itself failed: {type(fault).__name__}: "
            f"{' '.join(str(fault).split())[:160]}"
        )
        seen = Seen("warn", (said,), f"Leave it out with --skip {item.id}, and report it.")
    return Outcome(
        id=item.id, title=item.title, status=seen.status, evidence=seen.evidence, fix=seen.fix
    )
