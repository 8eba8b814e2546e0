"""`stepguard verify PATH...`: are these checkpoints whole, finite and unaltered? Nothing in them is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_PREFLIGHT, ConfigError


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Checkpoint files or folders, or folders that hold some."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    lr: Annotated[
        float | None, typer.Option("--lr", help="The learning rate of your configuration, to compare with.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Take the learning rate from this file.")
    ] = None,
) -> None:
    """Check checkpoints of any format: NaN, torn or altered files, missing shards. Runs no code from them."""
    from stepguard.cli.checking import as_plain, show, verified
    from stepguard.cli.settings_file import configured_rate
    from stepguard.records.codec import dumps

    if lr is not None and config is not None:
        raise ConfigError("--lr and --config exclude each other; give one of them.")
    found = verified(paths, configured_rate(config) if config is not None else lr)
    if as_json:
        typer.echo(dumps({"ok": all(each.ok for each in found), "paths": [as_plain(each) for each in found]}))
    else:
        show(found)
    if any(each.corrupt for each in found):
        raise typer.Exit(EXIT_CORRUPT)
    raise typer.Exit(EXIT_OK if all(each.ok for each in found) else EXIT_PREFLIGHT)
