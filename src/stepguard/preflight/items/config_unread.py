"""`config.unread`: keys that nothing reads, so that changing them changes nothing."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, count, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.keys import flat
from stepguard.preflight.tracking import plain, unread


def _look(seen: Inspection) -> Seen:
    """Read by the program while it was built and run once, or named somewhere in its source (a
    training loop).
    """
    tracked = seen.place.tracked
    if tracked is None:
        raise Missing(seen.place.why_untracked)
    total = len(list(flat(plain(tracked))))
    left = unread(tracked)
    mentions = seen.project.mentions
    nowhere = [key for key in left if key.rpartition(".")[2] not in mentions]
    elsewhere = len(left) - len(nowhere)
    if not nowhere:
        return passed(
            f"{total - len(left)} of {total} keys were read, {elsewhere} are named elsewhere in "
            f"the source"
        )
    return warned(
        f"{count(len(nowhere), 'key')} of {total} not read, nor named in "
        f"{count(seen.project.files, 'source file')}: "
        f"{some(nowhere, 8)}",
        fix="Remove them, or correct their names: changing them has no effect.",
    )


ITEM = Item(id="config.unread", title="every key of the configuration is read", look=_look)
