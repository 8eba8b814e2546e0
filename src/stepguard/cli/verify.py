"""`stepguard verify PATH...`: are these checkpoints whole, finite and unaltered? Nothing in them is
executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_PREFLIGHT, EXIT_USAGE, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepguard.records.verification import Verification


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Checkpoint files or folders, or folders that hold some."
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
    lr: Annotated[
        float | None,
        typer.Option("--lr", help="The learning rate of your configuration, to compare with."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Take the learning rate from this file."),
    ] = None,
) -> None:
    """Check checkpoints of any format: NaN, torn or altered files, missing shards. Runs no code
    from them.
    """
    from stepguard.cli._checkpoint_results import as_plain, show, verified
    from stepguard.preflight.settings.rates import configured_rate
    from stepguard.records.codec import dumps
    from stepguard.verification.api import nothing_in

    if lr is not None and config is not None:
        raise ConfigError("--lr and --config exclude each other; give one of them.")
    found = verified(paths, configured_rate(config) if config is not None else lr)
    empty = [each for each in found if not each.leaves]
    if as_json:
        ok = not empty and all(each.ok for each in found)
        typer.echo(dumps({"ok": ok, "paths": [as_plain(each) for each in found]}))
    elif len(empty) < len(found) or any(each.problems for each in found):
        show(found)
    for each in empty:
        typer.echo(f"stepguard: error: {nothing_in(each.path)}", err=True)
    raise typer.Exit(_exit_code(found, empty))


def _exit_code(found: Sequence[Verification], empty: Sequence[Verification]) -> int:
    """What is corrupt comes first; a folder without a checkpoint is no success."""
    if any(each.corrupt for each in found):
        return EXIT_CORRUPT
    if empty:
        return EXIT_USAGE
    return EXIT_OK if all(each.ok for each in found) else EXIT_PREFLIGHT
