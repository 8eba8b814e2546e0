"""`stepguard quarantine DIR`: move bad checkpoints away; with `--data`, list bad samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_PREFLIGHT, EXIT_USAGE, ConfigError
from stepguard.cli._results import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepguard.records.checks import Verification
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepguard.cli.runs import show_bad_samples

if TYPE_CHECKING:
    from stepguard.records.checks import Verification
    from stepguard.verification.quarantine import Move
    from stepguard.verification.scan import CheckpointFiles
import sys

if TYPE_CHECKING:
    from stepguard.records.incident import Examination


# --- `stepguard verify PATH...`: are checkpoints complete, finite and unaltered? Executes
# nothing.


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
    from stepguard.check.settings import configured_rate
    from stepguard.cli._results import verified
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
    from stepguard.cli._results import show

    if any(result.leaves or result.problems for result in results):
        show(results)


def _print_json(results: Sequence[Verification], *, ok: bool) -> None:
    from stepguard.cli._results import as_plain
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


# --- `stepguard quarantine DIR`: move bad checkpoints away; with `--data`, list bad samples.


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
        _quarantine_print_json(
            {"dry_run": dry_run, "checked": checked, "moved": moves, "not_judged": unread}
        )
    else:
        _quarantine_print_text(folder, checked, moves, unread, word)
    return EXIT_CORRUPT if dry_run and moves else EXIT_OK


def _check_all(checkpoints: Sequence[CheckpointFiles]) -> list[Verification]:
    from stepguard.cli._results import Bar
    from stepguard.verification import check_checkpoint

    with Bar("verifying") as bar:
        bar.plan(len(checkpoints), sum(checkpoint.size for checkpoint in checkpoints))
        return [check_checkpoint(checkpoint, bar.advance) for checkpoint in checkpoints]


def _quarantine_print_text(
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
        _quarantine_print_json({"moved_back": back, "stays": reasons})
        return EXIT_USAGE if stays else EXIT_OK
    for move in back:
        echo(f"moved back: {folder / move.original}")
    for move, why in stays:
        echo(f"stays in {folder / move.place}: {why}", err=True)
    if not back and not stays:
        echo(f"nothing of {folder} is in quarantine")
    return EXIT_USAGE if stays else EXIT_OK


def _quarantine_print_json(data: dict[str, Any]) -> None:
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


# --- `stepguard doctor DIR`: examine a run that will not train.


EXITS = {"corrupt": EXIT_CORRUPT, "failed": EXIT_PREFLIGHT}


def doctor(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The run's folder, or that of its checkpoints."),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="JSON, TOML, YAML or Python (read, not run)."
        ),
    ] = None,
    build: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function that returns the model, or (model, inputs)."
        ),
    ] = None,
    watch: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Show values of this name, such as '*gate*'."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Examine a run that will not train: its journal, capsules and checkpoints, and the exact next
    commands.
    """
    from stepguard.check.doctor import examine
    from stepguard.cli._results import Bar
    from stepguard.report.checks import journal_section

    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the one that holds the run's checkpoints."
        )
    if build is not None and build.count(":") != 1:
        raise ConfigError(f"--build {build!r} must look like 'package.module:function'.")
    with Bar("verifying") as bar:
        found = examine(
            folder,
            config=config,
            build=build,
            watch=watch or [],
            plan=bar.plan,
            progress=bar.advance,
            journal=journal_section(folder),
        )
    if all(section.status == "not checked" for section in found.sections[:-1]):
        raise ConfigError(
            f"nothing to examine in {folder}: it holds neither a journal nor a checkpoint. Give "
            "the folder of the run, or --config FILE, or --build MODULE:FUNCTION."
        )
    _show(found, as_json=as_json)
    raise typer.Exit(EXITS.get(found.status, EXIT_OK))


def _show(found: Examination, *, as_json: bool) -> None:
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import screen
    from stepguard.report.checks import render_examination

    if as_json:
        echo(dumps({"status": found.status, **to_plain(found)}))
        return
    out = sys.stdout
    text = render_examination(
        found,
        width=screen.columns(out),
        colour=screen.wants_colour(out),
        unicode=screen.takes_unicode(out),
    )
    screen.put(text, out)
