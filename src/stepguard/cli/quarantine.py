"""`stepguard quarantine DIR`: move the bad checkpoints out of the way, and only those; `--data`:
list bad samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_USAGE, ConfigError
from stepguard.cli.bad_samples import show_bad_samples

if TYPE_CHECKING:
    from stepguard.verification.quarantine import Move


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
    if undo and dry_run:
        raise ConfigError("--undo and --dry-run exclude each other.")
    if data and (undo or dry_run):
        raise ConfigError("--data only lists samples; leave out --undo and --dry-run.")
    if not data and (out is not None or unproven):
        raise ConfigError("--out and --unproven belong to --data.")
    if unproven and out is None:
        raise ConfigError("--unproven says what --out writes; give --out FILE.")
    if not folder.is_dir():
        what = "a run directory" if data else "the one that holds the checkpoints"
        raise ConfigError(f"{folder} is no folder; give {what}.")
    if data:
        show_bad_samples(folder, as_json=as_json, out=out, unproven=unproven)
        return
    raise typer.Exit(_undo(folder, as_json) if undo else _move(folder, dry_run, as_json))


def _move(folder: Path, dry_run: bool, as_json: bool) -> int:
    from stepguard.cli._checkpoint_results import Bar
    from stepguard.verification.check import check_place
    from stepguard.verification.quarantine import apply, find_places, is_bad, plan

    with Bar("verifying") as bar:
        places = find_places(folder)
        bar.plan(len(places), sum(place.size for place in places))
        found = [check_place(place, bar.advance) for place in places]
    moves = plan(folder, places, [each for each in found if is_bad(each)])
    if not dry_run:
        moves = apply(folder, moves)
    unread = [each.path for each in found if not each.ok and not is_bad(each)]
    if as_json:
        _print_json(
            {"dry_run": dry_run, "checked": len(found), "moved": moves, "not_judged": unread}
        )
    else:
        _tell(folder, moves, unread, len(found), "would be moved" if dry_run else "moved")
    return EXIT_CORRUPT if dry_run and moves else EXIT_OK


def _tell(
    folder: Path, moves: Sequence[Move], unread: Sequence[str], checked: int, word: str
) -> None:
    for move in moves:
        typer.echo(f"{word}: {folder / move.original} -> {folder / move.place}")
        for reason in move.reasons[:3]:
            typer.echo(f"    {reason}")
        if len(move.reasons) > 3:
            typer.echo(f"    and {len(move.reasons) - 3} more")
    for path in unread:
        typer.echo(f"left alone, could not be judged: {path} (stepguard verify {path} says why)")
    typer.echo(
        f"{checked} checked, {len(moves)} {word}"
        + (f"; back with: stepguard quarantine {folder} --undo" if moves else "")
    )


def _undo(folder: Path, as_json: bool) -> int:
    from stepguard.verification.quarantine import undo

    back, stays = undo(folder)
    if as_json:
        reasons = [{"move": move, "why": why} for move, why in stays]
        _print_json({"moved_back": back, "stays": reasons})
    else:
        for move in back:
            typer.echo(f"moved back: {folder / move.original}")
        for move, why in stays:
            typer.echo(f"stays in {folder / move.place}: {why}", err=True)
        if not back and not stays:
            typer.echo(f"nothing of {folder} is in quarantine")
    return EXIT_USAGE if stays else EXIT_OK


def _print_json(data: dict[str, Any]) -> None:
    from dataclasses import asdict

    from stepguard.records.codec import dumps

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return asdict(value) if hasattr(value, "__dataclass_fields__") else value

    typer.echo(dumps(plain(data)))
