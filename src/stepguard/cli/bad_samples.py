"""`stepguard quarantine --data RUN`: the samples a run left out, and a list for a sampler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepguard._errors import ConfigError, JournalError
from stepguard.cli._terminal import echo

if TYPE_CHECKING:
    from stepguard.report.bad_samples import Suspect


def show_bad_samples(run: Path, *, as_json: bool, out: Path | None, unproven: bool) -> None:
    """Print the ledger of a run, or write the samples to leave out to a file, one a line."""
    from stepguard.ledger import read_ledger
    from stepguard.records.codec import dumps
    from stepguard.report import bad_samples, screen

    if not any(run.glob("journal*.jsonl")) and not any(run.glob("bad_samples*.jsonl")):
        raise ConfigError(
            f"{run} is not a run folder: it holds neither a journal.jsonl nor a bad_samples.jsonl."
        )
    try:
        entries, unread = read_ledger(run)
    except OSError as error:
        raise JournalError(f"{error.filename or run} cannot be read: {error.strerror}.") from error
    steps = _steps_seen(run)
    if as_json:
        echo(dumps(bad_samples.as_json(str(run), entries, unread, steps)))
    else:
        stream = sys.stdout
        text = bad_samples.render_ledger(str(run), entries, unread, steps, screen.columns(stream))
        screen.put(text, stream)
    if out is not None:
        _write(out, bad_samples.suspects(entries), unproven=unproven)


def _write(path: Path, found: Sequence[Suspect], *, unproven: bool) -> None:
    lines = []
    for suspect in found:
        if suspect.proven or unproven:
            lines.append(f"{suspect.id if suspect.index is None else suspect.index}\n")
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}.") from error
    text = f"wrote {len(lines)} to {path}"
    left = len(found) - len(lines)
    if left:
        text += f"; {left} more are in bad batches, none of them proven (--unproven lists them too)"
    echo(text, err=True)


def _steps_seen(run: Path) -> int:
    """Step lines of the journals, of all ranks and attempts."""
    count = 0
    for path in run.glob("journal*.jsonl"):
        if not path.is_file():
            continue
        try:
            with path.open("rb") as lines:
                count += sum(b'"type":"step"' in line for line in lines)
        except OSError:
            continue
    return count
