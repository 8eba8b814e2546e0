"""`labels.truncated`: answers that were cut off at the maximal length."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, count, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.labels_empty import labels_of


def _look(seen: Inspection) -> Seen:
    labels = labels_of(seen)
    if labels.total == labels.examples:
        raise Pointless("the targets are single classes, not sequences")
    if not labels.masked:
        raise Pointless("every token counts: packed text has no end that could be cut off")
    setting, eos = seen.number("max_length"), _eos(seen)
    if setting is None and labels.shortest == labels.longest:
        raise Pointless(
            f"all examples are {labels.longest} long, and no max_length is configured to compare "
            f"with"
        )
    limit = int(setting) if setting is not None else labels.longest
    cut = [
        end for end in labels.cuts if end.length >= limit and (eos is None or end.last_token != eos)
    ]
    lengths = f"lengths {labels.shortest} to {labels.longest}, limit {limit}"
    if setting is None and eos is None:
        lengths += (
            " (the longest; name max_length and eos_token_id in the configuration to be exact)"
        )
        cut = cut if len(cut) > 1 else []
    if not cut:
        return passed(f"no answer ends at the limit; {lengths}")
    end = f"without the end token {eos}" if eos is not None else "to the last token"
    return warned(
        f"{count(len(cut), 'answer')} of {labels.examples:,} run into the limit {end}: "
        f"{some([part.name for part in cut], 8)}",
        lengths,
        fix="Raise the maximal length, or leave out what is longer: a cut answer teaches to stop "
        "nowhere.",
    )


def _eos(seen: Inspection) -> int | None:
    found = seen.number("eos")
    own = getattr(getattr(seen.subject.model, "config", None), "eos_token_id", None)
    return int(found) if found is not None else own if isinstance(own, int) else None


ITEM = Item(id="labels.truncated", title="answers are not cut off", look=_look)
