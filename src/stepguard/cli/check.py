"""Commands that examine: `verify`, `quarantine` and `doctor` checkpoints, of which they execute
nothing; `check` a run before it starts; `selftest` the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from stepguard._errors import (
    EXIT_CORRUPT,
    EXIT_OK,
    EXIT_PREFLIGHT,
    EXIT_USAGE,
    ConfigError,
    JournalError,
)
from stepguard.cli._results import (
    Bar,
    JsonOption,
    as_plain,
    echo,
    echo_json,
    exclude,
    refuse_no_function,
    show,
    verified,
)

if TYPE_CHECKING:
    from stepguard.report.checks import Suspect

Progress = Callable[[int, int | None], None]


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Checkpoint files or folders, or folders that hold some."
        ),
    ],
    as_json: JsonOption = False,
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
    from stepguard.check.verify import nothing_in
    from stepguard.report.checks import render_results

    exclude(lr=lr is not None, config=config)
    if config is not None:
        lr = configured_rate(config)
    results = verified(paths, lr)
    # Corrupt comes first, and a folder without a checkpoint is an error.
    code = EXIT_PREFLIGHT
    if any(result.corrupt for result in results):
        code = EXIT_CORRUPT
    elif not all(result.leaves for result in results):
        code = EXIT_USAGE
    elif all(result.ok for result in results):
        code = EXIT_OK
    if as_json:
        echo_json({"ok": code == EXIT_OK, "paths": [as_plain(result) for result in results]})
    elif any(result.leaves or result.problems for result in results):
        show(render_results, results)
    for result in results:
        if not result.leaves:
            echo(f"stepguard: error: {nothing_in(result.path)}", err=True)
    raise typer.Exit(code)


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
    undo: Annotated[bool, typer.Option("--undo", help="Move everything back.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be moved, and move nothing.")
    ] = False,
    data: Annotated[
        bool,
        typer.Option("--data", help="List the samples that the run in DIR dropped; move nothing."),
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
    as_json: JsonOption = False,
) -> None:
    """Move corrupt checkpoints to DIR/quarantine, with a list of reasons; good ones are never
    touched.
    """
    exclude(undo=undo, dry_run=dry_run, data=data)
    if (unproven or out is not None) and not data:
        raise ConfigError("--out and --unproven need --data.")
    if unproven and out is None:
        raise ConfigError("--unproven needs --out; give --out FILE.")
    if not folder.is_dir():
        what = "a run directory" if data else "the one that holds the checkpoints"
        raise ConfigError(f"{folder} is not a folder; give {what}.")
    if data:
        _show_bad_samples(folder, as_json=as_json, out=out, unproven=unproven)
    elif undo:
        raise typer.Exit(_undo(folder, as_json))
    else:
        raise typer.Exit(_move(folder, dry_run, as_json))


def _move(folder: Path, dry_run: bool, as_json: bool) -> int:
    from stepguard.check.quarantine import Move, apply, checkpoints_below, is_bad, plan
    from stepguard.check.verify import check_checkpoint

    checkpoints = checkpoints_below(folder)
    with Bar("verifying") as bar:
        bar.plan(len(checkpoints), sum(checkpoint.size for checkpoint in checkpoints))
        results = [check_checkpoint(checkpoint, bar.advance) for checkpoint in checkpoints]
    moves = plan(folder, checkpoints, filter(is_bad, results))
    word = "would be moved"
    if not dry_run:
        moves = apply(folder, moves)
        word = "moved"
    unread = [result.path for result in results if not result.ok and not is_bad(result)]
    code = EXIT_OK
    if dry_run and moves:
        code = EXIT_CORRUPT
    if as_json:
        moved = list(map(Move._asdict, moves))
        facts = {"dry_run": dry_run, "checked": len(results), "moved": moved, "not_judged": unread}
        echo_json(facts)
        return code
    for move in moves:
        echo(f"{word}: {folder / move.original} -> {folder / move.place}")
        for reason in move.reasons[:MOST_REASONS]:
            echo(f"    {reason}")
        if len(move.reasons) > MOST_REASONS:
            echo(f"    and {len(move.reasons) - MOST_REASONS} more")
    for path in unread:
        echo(
            f"not moved, because it could not be judged: {path} (stepguard verify {path} shows why)"
        )
    line = f"{len(results)} checked, {len(moves)} {word}"
    if moves:
        line += f"; undo with: stepguard quarantine {folder} --undo"
    echo(line)
    return code


def _undo(folder: Path, as_json: bool) -> int:
    from stepguard.check.quarantine import undo

    back, stays = undo(folder)
    code = EXIT_OK
    if stays:
        code = EXIT_USAGE
    if as_json:
        reasons = [{"move": move._asdict(), "why": why} for move, why in stays]
        echo_json({"moved_back": [move._asdict() for move in back], "stays": reasons})
        return code
    for move in back:
        echo(f"moved back: {folder / move.original}")
    for move, why in stays:
        echo(f"stays in {folder / move.place}: {why}", err=True)
    if not back and not stays:
        echo(f"no checkpoint of {folder} is in quarantine")
    return code


def _show_bad_samples(run: Path, *, as_json: bool, out: Path | None, unproven: bool) -> None:
    """Print the ledger of a run, or write the samples to leave out to a file, one a line."""
    from stepguard.ledger import read_ledger
    from stepguard.report import checks, screen

    journals = [path for path in run.glob("journal*.jsonl") if path.is_file()]
    if not journals and not any(run.glob("bad_samples*.jsonl")):
        raise ConfigError(
            f"{run} is not a run folder: it holds neither a journal.jsonl nor a bad_samples.jsonl."
        )
    try:
        entries, unread = read_ledger(run)
    except OSError as error:
        raise JournalError(f"{error.filename or run} cannot be read: {error.strerror}.") from error
    # Step lines of all attempts, in the journal of each rank.
    steps = [0]
    for path in journals:
        with suppress(OSError), path.open("rb") as lines:
            steps.append(sum(b'"type":"step"' in line for line in lines))
    if as_json:
        echo_json(checks.as_json(str(run), entries, unread, max(steps)))
    else:
        stream = sys.stdout
        text = checks.render_ledger(str(run), entries, unread, sum(steps), screen.columns(stream))
        screen.put(text, stream)
    if out is not None:
        _write_samples(checks.suspects(entries), out, unproven=unproven)


def _write_samples(found: Sequence[Suspect], out: Path, *, unproven: bool) -> None:
    names = []
    for suspect in found:
        if suspect.proven or unproven:
            names.append(f"{suspect.id if suspect.index is None else suspect.index}\n")
    try:
        out.write_text("".join(names), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}.") from error
    text = f"wrote {len(names)} to {out}"
    left = len(found) - len(names)
    if left:
        text += f"; {left} more are in bad batches, none of them proven (--unproven lists them too)"
    echo(text, err=True)


# --- `stepguard doctor DIR`: examine a run that will not train.


def doctor(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The run's folder, or the folder of its checkpoints."),
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
        typer.Option(metavar="PATTERN", help="Show values of this name, such as `*gate*`."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Examine a run that will not train: its journal, capsules and checkpoints, and the exact next
    commands.
    """
    from stepguard.check.doctor import examine
    from stepguard.records.codec import to_plain
    from stepguard.report.checks import journal_section, render_examination

    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the one that holds the run's checkpoints."
        )
    refuse_no_function(build=build)
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
    if as_json:
        echo_json({"status": found.status, **to_plain(found)})
    else:
        show(render_examination, found, unicode=True)
    exits = {"corrupt": EXIT_CORRUPT, "failed": EXIT_PREFLIGHT}
    raise typer.Exit(exits.get(found.status, EXIT_OK))


# --- `stepguard check TARGET`: the preflight, before a run costs anything.


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="`module:function` that returns (model, optimizer, loss_fn) or more; a "
            "configuration file (json, toml, yaml, py); or a data file or folder.",
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Configuration, given to the function.")
    ] = None,
    launcher: Annotated[
        Path | None, typer.Option(metavar="FILE", help="accelerate's yaml or json.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File or folder to scan.")
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Validation data; shares no example with --data."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="What the run would resume from.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where checkpoints will go.")
    ] = None,
    watch: Annotated[
        list[str],
        typer.Option(metavar="PATTERN=LIMIT", help="Largest magnitude of matching tensors."),
    ] = [],  # noqa: B006 (typer copies it)
    label_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key of the targets in an example.")
    ] = None,
    ignore_index: Annotated[
        int | None, typer.Option(metavar="N", help="Target value that does not count (-100).")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Scan at most this many examples.")
    ] = None,
    only: Annotated[
        list[str], typer.Option(metavar="ITEM", help="Check this id, section or pattern only.")
    ] = [],  # noqa: B006
    skip: Annotated[
        list[str], typer.Option(metavar="ITEM", help="Skip this id, section or pattern.")
    ] = [],  # noqa: B006
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail as well.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run before it starts: precision, learning rate, labels, data, disk. Exit code 5 if it
    fails.
    """
    from stepguard.check import preflight
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import screen
    from stepguard.report.checks import paint_preflight

    # A misspelt item is an error before anything is built.
    preflight.selected(only, skip)
    with ExitStack() as stack:
        if as_json:
            # What the program prints must not get into the JSON.
            stack.enter_context(redirect_stdout(sys.stderr))
        subject = preflight.resolve(
            target,
            config,
            launcher,
            data=data,
            validation=validation,
            checkpoint=checkpoint,
            run_dir=run_dir,
            watch=_limits(watch),
            label_key=label_key,
            ignore_index=ignore_index,
            examples=examples,
        )
        # A guard that the build function returned has hooks, and perhaps a journal.
        if hasattr(subject.guard, "close"):
            stack.callback(subject.guard.close)
        progress = stack.enter_context(_bar(sys.stderr))
        result = preflight.check(subject, only=only, skip=skip, target=target, progress=progress)
    out = sys.stdout
    if as_json:
        echo(dumps({**to_plain(result), "ok": result.ok}))
    else:
        unicode = screen.takes_unicode(out)
        text = screen.draw(out, lambda console: paint_preflight(console, result, unicode=unicode))
        screen.put(text, out)
    if not result.ok or (strict and result.of("warn")):
        raise typer.Exit(EXIT_PREFLIGHT)
    raise typer.Exit(EXIT_OK)


def _limits(words: list[str]) -> dict[str, float]:
    """`*.alpha=10` -> pattern and limit."""
    limits = {}
    for word in words:
        pattern, _, number = word.rpartition("=")
        try:
            limits[pattern] = float(number)
        except ValueError:
            pattern = ""
        # Written so that a NaN is refused as well.
        if not pattern or not limits[pattern] > 0:
            raise ConfigError(
                f"--watch {word!r} must look like PATTERN=LIMIT, as in '*.alpha=10', with a limit "
                "above 0."
            )
    return limits


@contextmanager
def _bar(stream: TextIO) -> Iterator[Progress | None]:
    """Draw a progress bar over the examples, on a terminal only; it is erased at the end."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from stepguard.report import screen

    if not screen.is_tty(stream):
        yield None
        return
    with Bar(console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("reading examples", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


# --- `stepguard selftest`: do the promises hold on this machine and device?


def selftest(
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="As torch names it: cpu, cuda, cuda:1, mps.")
    ] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Test stepguard's guarantees on a device, in about a minute, and print a table to send in.

    Exit code 5 if one does not hold.
    """
    import json

    from rich.console import Console
    from rich.table import Table

    from stepguard.run.selftest import selftest as run_selftest

    console = Console(stderr=True)
    with console.status("selftest") as status:
        found = run_selftest(device, lambda name: status.update(f"selftest: {name}"))
    if as_json:
        echo(json.dumps(found.as_json()))
    else:
        table = Table("", "promise", "what was seen", title=f"{found.device}: {found.name}")
        marks = {True: "ok", False: "FAILED", None: "not tried"}
        for check in found.checks:
            table.add_row(marks[check.holds], check.name, check.detail)
        Console().print(table)
        echo(f"stepguard {found.stepguard}, torch {found.torch}, {found.platform}")
    raise typer.Exit(EXIT_OK if found.ok else EXIT_PREFLIGHT)
