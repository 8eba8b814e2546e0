"""`stepguard quarantine DIR`: move bad checkpoints away; with `--data`, list bad samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_USAGE, ConfigError
from stepguard.cli._terminal import echo
from stepguard.cli.bad_samples import show_bad_samples

if TYPE_CHECKING:
    from stepguard.records.verification import Verification
    from stepguard.verification.format_entry import CheckpointFiles
    from stepguard.verification.quarantine import Move

MOST_REASONS = 3
"""Reasons shown for one checkpoint; `--json` has all."""


def quarantine(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder with checkpoints, at any depth; with --data a run folder."
        ),
    ],
    undo: Annotated[
        bool, typer.Option("--undo", help="Put back everything that was moved.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be moved, move nothing.")
    ] = False,
    data: Annotated[
        bool,
        typer.Option(
            "--data", help="List the samples that the run in DIR went on without; move nothing."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="With --data: write their indices or ids to FILE, one a line.",
        ),
    ] = None,
    unproven: Annotated[
        bool,
        typer.Option(
            "--unproven", help="With --out: also samples of bad batches in which none is proven."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Move corrupt checkpoints to DIR/quarantine, with a list of reasons; good ones are never
    touched.
    """
    _refuse_contradictions(undo=undo, dry_run=dry_run, data=data, out=out, unproven=unproven)
    if not folder.is_dir():
        what = "a run directory" if data else "the one that holds the checkpoints"
        raise ConfigError(f"{folder} is not a folder; give {what}.")
    if data:
        show_bad_samples(folder, as_json=as_json, out=out, unproven=unproven)
    elif undo:
        raise typer.Exit(_undo(folder, as_json))
    else:
        raise typer.Exit(_move(folder, dry_run, as_json))


def _refuse_contradictions(
    *, undo: bool, dry_run: bool, data: bool, out: Path | None, unproven: bool
) -> None:
    if undo and dry_run:
        raise ConfigError("--undo and --dry-run exclude each other.")
    if data:
        if undo or dry_run:
            raise ConfigError("--data only lists samples; leave out --undo and --dry-run.")
    elif unproven or out is not None:
        raise ConfigError("--out and --unproven belong to --data.")
    if unproven and out is None:
        raise ConfigError("--unproven says what --out writes; give --out FILE.")


def _move(folder: Path, dry_run: bool, as_json: bool) -> int:
    from stepguard.verification.quarantine import apply, checkpoints_below, is_bad, plan

    checkpoints = checkpoints_below(folder)
    results = _check_all(checkpoints)
    moves = plan(folder, checkpoints, filter(is_bad, results))
    word = "would be moved"
    if not dry_run:
        moves = apply(folder, moves)
        word = "moved"
    unread = [result.path for result in results if not result.ok and not is_bad(result)]
    checked = len(results)
    if as_json:
        _print_json({"dry_run": dry_run, "checked": checked, "moved": moves, "not_judged": unread})
    else:
        _print_text(folder, checked, moves, unread, word)
    return EXIT_CORRUPT if dry_run and moves else EXIT_OK


def _check_all(checkpoints: Sequence[CheckpointFiles]) -> list[Verification]:
    from stepguard.cli._checkpoint_results import Bar
    from stepguard.verification import check_checkpoint

    with Bar("verifying") as bar:
        bar.plan(len(checkpoints), sum(checkpoint.size for checkpoint in checkpoints))
        return [check_checkpoint(checkpoint, bar.advance) for checkpoint in checkpoints]


def _print_text(
    folder: Path, checked: int, moves: Sequence[Move], unread: Sequence[str], word: str
) -> None:
    for move in moves:
        echo(f"{word}: {folder / move.original} -> {folder / move.place}")
        for reason in move.reasons[:MOST_REASONS]:
            echo(f"    {reason}")
        more = len(move.reasons) - MOST_REASONS
        if more > 0:
            echo(f"    and {more} more")

    for path in unread:
        echo(f"left alone, could not be judged: {path} (stepguard verify {path} says why)")
    line = f"{checked} checked, {len(moves)} {word}"
    if moves:
        line += f"; back with: stepguard quarantine {folder} --undo"
    echo(line)


def _undo(folder: Path, as_json: bool) -> int:
    from stepguard.verification.quarantine import undo

    back, stays = undo(folder)
    if as_json:
        reasons = [{"move": move, "why": why} for move, why in stays]
        _print_json({"moved_back": back, "stays": reasons})
        return EXIT_USAGE if stays else EXIT_OK
    for move in back:
        echo(f"moved back: {folder / move.original}")
    for move, why in stays:
        echo(f"stays in {folder / move.place}: {why}", err=True)
    if not back and not stays:
        echo(f"nothing of {folder} is in quarantine")
    return EXIT_USAGE if stays else EXIT_OK


def _print_json(data: dict[str, Any]) -> None:
    from stepguard.records.codec import dumps

    echo(dumps(_plain(data)))


def _plain(value: Any) -> Any:
    """Turn dataclasses inside lists and dicts into dicts."""
    from dataclasses import asdict, is_dataclass

    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value
