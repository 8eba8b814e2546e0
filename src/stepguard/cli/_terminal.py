"""What commands have in common at the terminal: clean lines, and a question before code is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from stepguard.records.text import printable

YesOption = Annotated[
    bool,
    typer.Option(
        "--yes", help="Run what the capsule names without asking, whoever made the capsule."
    ),
]


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """`typer.echo` of text in which nothing can control the terminal."""
    typer.echo(printable(text), err=err, nl=nl)


def confirm_code(yes: bool) -> Callable[[str], bool]:
    """Print what a capsule of somebody else would run, and ask; no terminal means no."""

    def confirmed(command: str) -> bool:
        echo(
            "stepguard: this capsule was not made by you, on this machine, in this folder. "
            f"Replaying it runs: {command}",
            err=True,
        )
        if yes:
            return True
        return sys.stdin.isatty() and typer.confirm("Run it?", err=True)

    return confirmed
