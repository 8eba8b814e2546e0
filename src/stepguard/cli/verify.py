"""`stepguard verify PATH...`: are checkpoints complete, finite and unaltered? Executes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_PREFLIGHT, EXIT_USAGE, ConfigError
from stepguard.cli._terminal import echo

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
        typer.Option(
            "--lr", metavar="X", help="The learning rate of your configuration, to compare with."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Take the learning rate from this file."),
    ] = None,
) -> None:
    """Check checkpoints of any format: NaN, torn or altered files, missing shards. Runs no code
    from them.
    """
    from stepguard.cli._checkpoint_results import verified
    from stepguard.preflight.settings.rates import configured_rate
    from stepguard.verification import nothing_in

    if lr is not None and config is not None:
        raise ConfigError("--lr and --config exclude each other; give one of them.")
    if config is not None:
        lr = configured_rate(config)
    results = verified(paths, lr)
    code = _exit_code(results)
    if as_json:
        _print_json(results, ok=code == EXIT_OK)
    else:
        _print_text(results)
    for result in results:
        if not result.leaves:
            echo(f"stepguard: error: {nothing_in(result.path)}", err=True)
    raise typer.Exit(code)


def _print_text(results: Sequence[Verification]) -> None:
    """Print the results, unless no path held anything: then the errors say it all."""
    from stepguard.cli._checkpoint_results import show

    if any(result.leaves or result.problems for result in results):
        show(results)


def _print_json(results: Sequence[Verification], *, ok: bool) -> None:
    from stepguard.cli._checkpoint_results import as_plain
    from stepguard.records.codec import dumps

    echo(dumps({"ok": ok, "paths": [as_plain(result) for result in results]}))


def _exit_code(results: Sequence[Verification]) -> int:
    """Choose the exit code: corrupt comes first, and a folder without a checkpoint is an error."""
    if any(result.corrupt for result in results):
        return EXIT_CORRUPT
    if not all(result.leaves for result in results):
        return EXIT_USAGE
    if all(result.ok for result in results):
        return EXIT_OK
    return EXIT_PREFLIGHT
