"""`launcher.agrees`: accumulation and process count of the launcher against configuration and
framework object.
"""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    launcher, facts = seen.launcher, seen.around.facts
    if not launcher:
        raise Missing("give --launcher FILE, or start the check the way the run is started")
    said: list[str] = []
    bad: list[str] = []
    accumulation, setting = (
        launcher.number("gradient_accumulation_steps"),
        seen.setting("accumulation"),
    )
    configured = seen.number("accumulation")
    if accumulation is not None and configured is not None:
        text = f"{launcher.said('gradient_accumulation_steps')}, configured {setting}"
        (said if accumulation == configured else bad).append(text)
    for name in ("gradient_accumulation_steps", "num_processes"):
        asked, real = launcher.number(name), facts.get(name)
        if asked is not None and isinstance(real, int):
            text = f"{launcher.said(name)}, the object in the program has {real}"
            (said if asked == real else bad).append(text)
    if bad:
        return failed(
            *bad, fix="Leave the value to one place, or set both alike; the program's own wins."
        )
    shown = ", ".join(launcher.said(name) for name in launcher.values)
    return passed(*(said or [f"nothing contradicts {shown}"]))


ITEM = Item(id="launcher.agrees", title="launcher and program agree", look=_look)
