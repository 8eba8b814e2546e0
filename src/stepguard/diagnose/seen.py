"""Questions that several rules on healthy runs ask of the looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepguard.diagnose.case import Case
from stepguard.records.look import Look, ParameterLook

ENOUGH_LOOKS = 2
"""Looks in a row that must agree, where one alone may be the start of a run."""


def newest_look(case: Case) -> Look | None:
    """The look that a rule is asked about."""
    if not case.looks:
        return None
    return case.looks[-1]


def last_looks(case: Case, count: int = ENOUGH_LOOKS) -> tuple[Look, ...]:
    """The newest looks; none of them where there are fewer than asked for."""
    if len(case.looks) < count:
        return ()
    return case.looks[-count:]


def in_all(looks: Sequence[Look], names: Callable[[Look], set[str]]) -> list[str]:
    """Names that every one of these looks gives, in the order of the alphabet."""
    if not looks:
        return []
    common = names(looks[0])
    for look in looks[1:]:
        common &= names(look)
    return sorted(common)


def trained(look: Look) -> list[ParameterLook]:
    """Parameters that an optimizer updates and that have a gradient."""
    return [one for one in look.parameters if one.owned and one.gradient is not None]


def unchanged(looks: Sequence[Look]) -> set[str]:
    """Parameters that hold the same numbers at every one of these looks: nobody updates them."""
    found = {one.name for one in looks[-1].parameters}
    newest = {one.name: one.weight for one in looks[-1].parameters}
    for look in looks[:-1]:
        found &= {one.name for one in look.parameters if newest.get(one.name) == one.weight}
    return found


def rate_is_zero(case: Case) -> bool:
    """No learning rate of the newest step moves anything."""
    return bool(case.reading.lr) and not any(case.reading.lr)


def named(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most} more"
    return shown
