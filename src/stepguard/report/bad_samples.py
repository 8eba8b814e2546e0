"""Show the ledger of bad samples: what was lost, where it is in the data set, how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stepguard.records.bad_samples import BadSamples, Identity
from stepguard.records.codec import to_jsonable
from stepguard.records.text import printable
from stepguard.report import phrases
from stepguard.report.unbroken import middle

MOST_LISTED = 40
"""Lines of the table; `--json` has all."""
MOST_ROWS = 3
LONGEST_NAME = 32
SHORTEST_PLACE = 16
HEADINGS = ("step", "attempt", "batch", "rows", "data set", "cause", "left out", "place")
LEFT_OUT = {"sample": "the rows", "micro_batch": "the micro-batch", "step": "the step"}


@dataclass(slots=True)
class Suspect:
    """One sample of the data set and what is held against it."""

    index: Identity | None = None
    id: Identity | None = None
    times: int = 0
    proven: bool = False
    """The step was finite without it and bad with it; else it was only in a batch that was bad."""
    causes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`row 17 (id a.png)`."""
        if self.index is None:
            return f"id {self.id}"
        if self.id is None:
            return f"row {self.index}"
        return f"row {self.index} (id {self.id})"


def suspects(entries: Sequence[BadSamples]) -> list[Suspect]:
    """Samples that broke a step, or may have, by how often; not those only lost with others."""
    found: dict[tuple[Identity | None, Identity | None], Suspect] = {}
    for entry in entries:
        if entry.innocent or not entry.would_fail_again:
            continue
        for index, own in _identities(entry):
            key = (index, own if index is None else None)
            suspect = found.setdefault(key, Suspect(index, own))
            suspect.times += 1
            suspect.proven |= bool(entry.samples)
            if entry.cause not in suspect.causes:
                suspect.causes.append(entry.cause)
    return sorted(found.values(), key=lambda suspect: (not suspect.proven, -suspect.times))


def _identities(entry: BadSamples) -> list[tuple[Identity | None, Identity | None]]:
    indices = entry.indices or ()
    ids = entry.ids or ()
    if indices and len(indices) == len(ids):
        return list(zip(indices, ids, strict=True))
    if indices:
        return [(index, None) for index in indices]
    return [(None, own) for own in ids]


def totals(entries: Sequence[BadSamples]) -> dict[str, int]:
    """Samples lost, steps they were lost in, and all samples of these steps."""
    lost = 0
    steps = {}
    for entry in entries:
        lost += entry.count
        # A step that lost several micro-batches has several entries, each with all its samples.
        steps[entry.run, entry.attempt, entry.incident or entry.step, entry.rank] = entry.of
    return {"lost": lost, "steps": len(steps), "of": sum(steps.values())}


def as_json(
    run: str, entries: Sequence[BadSamples], unread: int, seen_steps: int
) -> dict[str, Any]:
    """Everything there is, for `--json`."""
    return {
        "run": run,
        "entries": [to_jsonable(entry) for entry in entries],
        "totals": {**totals(entries), "steps_seen": seen_steps},
        "samples": [asdict(suspect) for suspect in suspects(entries)],
        "unread": unread,
    }


def render_ledger(
    run: str, entries: Sequence[BadSamples], unread: int, seen_steps: int, width: int
) -> str:
    """The table, the totals, and who was lost more than once."""
    if not entries and not unread:
        return f"no samples were lost in {printable(run)}\n"
    lines = _table(entries[:MOST_LISTED], width) if entries else []
    if len(entries) > MOST_LISTED:
        lines.append(f"and {len(entries) - MOST_LISTED} more; --json lists all")
    lines += ["", _sums(entries, seen_steps), *_repeated(entries)]
    if unread:
        lines.append(
            f"{phrases.count(unread, 'line')} could not be read: a crash while writing, or a full "
            f"disk"
        )
    return "".join(line.rstrip() + "\n" for line in lines)


def _table(entries: Sequence[BadSamples], width: int) -> list[str]:
    rows = [HEADINGS, *map(_cells, entries)]
    widths = []
    for column in range(len(HEADINGS) - 1):
        widths.append(max(len(row[column]) for row in rows))
    room = width - sum(widths) - 2 * len(widths) - 1
    lines = []
    for row in rows:
        cells = [cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)]
        if room >= SHORTEST_PLACE:
            cells.append(middle(row[-1], room))
        lines.append(" " + "  ".join(cells))
    return lines


def _cells(entry: BadSamples) -> tuple[str, ...]:
    attempt = str(entry.attempt)
    if entry.rank:
        attempt += f" rank {entry.rank}"
    batch = "" if entry.batch is None else f"{entry.epoch}:{entry.batch}"
    if entry.micro_batch is not None:
        batch += f" part {entry.micro_batch + 1}"
    rows = f"all {entry.count or ''}"
    if entry.samples:
        rows = phrases.first_few(entry.samples, MOST_ROWS)
    return (
        str(entry.step),
        attempt,
        batch.strip(),
        rows.strip(),
        _names(entry),
        entry.cause,
        LEFT_OUT[entry.left_out],
        "lost with others" if entry.innocent else entry.place,
    )


def _names(entry: BadSamples) -> str:
    """`48211`, `48211 = a.png`, or `a.png`."""
    named = []
    for identity in _identities(entry):
        known = [middle(str(part), LONGEST_NAME) for part in identity if part is not None]
        named.append(" = ".join(known))
    return phrases.first_few(named, MOST_ROWS) or "-"


def _sums(entries: Sequence[BadSamples], seen_steps: int) -> str:
    sums = totals(entries)
    if not sums["of"]:
        return f"{phrases.count(sums['steps'], 'step')} lost samples; how many is not known"
    steps = phrases.count(sums["steps"], "step")
    lost = f"{phrases.count(sums['lost'], 'sample')} lost in {steps}, of {sums['of']:,} in them"
    seen = round(seen_steps * sums["of"] / sums["steps"])
    if seen > sums["of"]:
        lost += f"; {sums['lost'] / seen:.2%} of about {seen:,} seen"
    return lost


def _repeated(entries: Sequence[BadSamples]) -> list[str]:
    again = [suspect for suspect in suspects(entries) if suspect.times > 1]
    if not again:
        return []
    listed = (f"{middle(s.name, LONGEST_NAME)} {s.times} times" for s in again)
    return [f"more than once: {phrases.first_few(listed)}"]
