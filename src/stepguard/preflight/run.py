"""`check`: every item against one subject, and the state the run would start in."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path

from stepguard._errors import ConfigError, StepguardError
from stepguard.preflight.answers import Answer, NotApplicable, NotGiven, one_line
from stepguard.preflight.data.facts import Progress
from stepguard.preflight.inspection import Inspection, Invocation
from stepguard.preflight.item import Item
from stepguard.preflight.items import ITEMS
from stepguard.preflight.status import alignment, status_facts
from stepguard.preflight.subject import Subject
from stepguard.records.preflight import Outcome, Preflight


def check(
    subject: Subject,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    target: str = "",
    invocation: Invocation | None = None,
    progress: Progress | None = None,
) -> Preflight:
    """Check everything the subject has. `only` and `skip` take ids or patterns such as `data.*`.

    The subject's objects are left bit for bit as they were. Raises ConfigError for a subject that
    cannot be used.
    """
    if invocation is None:
        invocation = Invocation(
            Path.cwd(), why_untracked="wrap the configuration in stepguard.preflight.Tracked"
        )
    inspection = Inspection(subject, invocation, progress)
    chosen = selected(tuple(only), tuple(skip))
    answered = {}
    for item in sorted(chosen, key=lambda item: item.last):
        answered[item.id] = run_item(item, inspection)
    outcomes = tuple(answered[item.id] for item in chosen)
    # The probe runs the model: not for a check that leaves precision out.
    if not any(item.id.startswith("precision.") for item in chosen):
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
        if not any(_matches(item, (pattern,)) for item in ITEMS):
            sections = sorted({item.id.partition(".")[0] for item in ITEMS})
            raise ConfigError(
                f"{pattern!r} is not an item; use an id such as 'lr.config', or one of "
                f"{', '.join(sections)}."
            )
    wanted = list(ITEMS)
    if only:
        wanted = [item for item in ITEMS if _matches(item, only)]
    return [item for item in wanted if not _matches(item, skip)]


def _matches(item: Item, patterns: tuple[str, ...]) -> bool:
    section = item.id.partition(".")[0]
    return any(p == section or fnmatch.fnmatchcase(item.id, p) for p in patterns)


def run_item(item: Item, inspection: Inspection) -> Outcome:
    """Run one item. Its own exception is a warning, so that it does not hide the other items."""
    try:
        answer = item.look(inspection)
    except NotGiven as missing:
        answer = Answer("not_checked", (str(missing),))
    except NotApplicable as why:
        answer = Answer("not_applicable", (str(why),))
    except StepguardError:
        raise
    except Exception as fault:
        said = f"this check itself failed: {one_line(fault, 160)}"
        answer = Answer("warn", (said,), f"Leave it out with --skip {item.id}, and report it.")
    return Outcome(
        id=item.id,
        title=item.title,
        status=answer.status,
        evidence=answer.evidence,
        fix=answer.fix,
    )
