"""Open the RUN argument that the reading commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import JournalError

if TYPE_CHECKING:
    from stepguard.journal import RunRecord

GIVE = "give a run directory that holds a journal.jsonl, or the file itself"
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or a journal.jsonl itself.")
]
RankOption = Annotated[
    int, typer.Option("--rank", min=0, help="Whose journal to read, in a run on several ranks.")
]


def open_run(run: Path, rank: int = 0) -> RunRecord:
    """Read the run's journal; raises a JournalError of one line for whatever is wrong with it."""
    from stepguard.journal import read_run

    try:
        record = read_run(run, rank)
    except OSError as error:
        raise JournalError(f"{error.filename or run} cannot be read: {error.strerror}.") from error
    except (KeyError, ValueError) as error:
        # pydantic's ValidationError is a ValueError of many lines; the first says what it is about.
        first = str(error).splitlines()[0]
        raise JournalError(f"{run} holds an incident this version cannot read: {first}.") from error
    if not is_journal(record):
        raise JournalError(
            f"{record.path} is not a journal of stepguard: none of its lines can be read; {GIVE}."
        )
    return record


def is_journal(record: RunRecord) -> bool:
    """Was there a line that stepguard writes? Only a file named like a journal may be empty."""
    if record.header or record.steps or record.incidents or record.notes:
        return True
    return not record.torn and record.path.name.startswith("journal")


def folder_of(run: Path) -> Path:
    """The run directory, also where the journal file itself was given."""
    return run if run.is_dir() else run.parent
