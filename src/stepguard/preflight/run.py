"""`check`: every item against one subject, and the state the run would start in."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable
from pathlib import Path

from stepguard._errors import ConfigError, StepguardError
from stepguard.preflight.answers import Answer, NotApplicable, NotGiven, one_line
from stepguard.preflight.data.facts import Progress
from stepguard.preflight.inspection import CheckContext, Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items import ITEMS
from stepguard.preflight.project import is_own_source
from stepguard.preflight.status import alignment, status_facts
from stepguard.preflight.subject import Subject
from stepguard.records.preflight import Outcome, Preflight


def check(
    subject: Subject,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    target: str = "",
    context: CheckContext | None = None,
    progress: Progress | None = None,
) -> Preflight:
    """Check everything the subject has. `only` and `skip` take ids or patterns such as `data.*`.

    The subject's objects are left bit for bit as they were. Raises ConfigError for a subject that
    cannot be used.
    """
    if context is None:
        context = CheckContext(
            Path.cwd(),
            script=_running_script(),
            why_untracked="wrap the configuration in stepguard.preflight.Tracked",
        )
    inspection = Inspection(subject, context, progress)
    chosen = selected(tuple(only), tuple(skip))
    answered = {}
    for item in sorted(chosen, key=lambda item: item.last):
        answered[item.id] = run_item(item, inspection)
    outcomes = tuple(answered[item.id] for item in chosen)
    # The probe runs the model: not for a check that leaves precision out.
    if not fnmatch.filter(answered, "precision.*"):
        return Preflight(
            target=target, outcomes=outcomes, alignment_why=("precision was not checked",)
        )
    aligned, why = alignment(inspection)
    return Preflight(
        target=target,
        outcomes=outcomes,
        facts=status_facts(inspection),
        alignment=aligned,
        alignment_why=why,
    )


def _running_script() -> Path | None:
    """The program that asks for its own check, if it was started from below this folder."""
    started = getattr(sys.modules.get("__main__"), "__file__", None)
    if started is None or not is_own_source(Path(started), Path.cwd()):
        return None
    return Path(started)


def selected(only: tuple[str, ...], skip: tuple[str, ...]) -> list[Item]:
    """The items these patterns leave; a pattern that matches none is a mistake."""
    chosen = _matching(only or ("*",)) - _matching(skip)
    return [item for item in ITEMS if item.id in chosen]


def _matching(patterns: tuple[str, ...]) -> set[str]:
    """Ids that are meant by an id, a section or a pattern."""
    found: set[str] = set()
    ids = [item.id for item in ITEMS]
    for pattern in patterns:
        matches = {*fnmatch.filter(ids, pattern), *fnmatch.filter(ids, f"{pattern}.*")}
        if not matches:
            sections = sorted({item.partition(".")[0] for item in ids})
            raise ConfigError(
                f"{pattern!r} is not an item; use an id such as 'lr.config', or one of "
                f"{', '.join(sections)}."
            )
        found |= matches
    return found


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
