"""`stepguard check TARGET`: the preflight, before a run costs anything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, TextIO

import typer

from stepguard._errors import EXIT_OK, EXIT_PREFLIGHT, ConfigError
from stepguard.cli._results import echo

Progress = Callable[[int, int | None], None]

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="`module:function` that returns (model, optimizer, loss_fn) or more; a configuration "
        "file (json, toml, yaml, py); or a data file or folder.",
    ),
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Configuration, given to the function.")
]
Launcher = Annotated[Path | None, typer.Option(metavar="FILE", help="accelerate's yaml or json.")]
Data = Annotated[Path | None, typer.Option(metavar="PATH", help="File or folder to scan.")]
Validation = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Validation data; shares no example with --data."),
]
Checkpoint = Annotated[
    Path | None, typer.Option(metavar="PATH", help="What the run would resume from.")
]
RunDir = Annotated[Path | None, typer.Option(metavar="PATH", help="Where checkpoints will go.")]
Watch = Annotated[
    list[str], typer.Option(metavar="PATTERN=LIMIT", help="Largest magnitude of matching tensors.")
]
LabelKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Key of the targets in an example.")
]
IgnoreIndex = Annotated[
    int | None, typer.Option(metavar="N", help="Target value that does not count (-100).")
]
Examples = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Scan at most this many examples.")
]
Only = Annotated[
    list[str], typer.Option(metavar="ITEM", help="Check this id, section or pattern only.")
]
Skip = Annotated[list[str], typer.Option(metavar="ITEM", help="Skip this id, section or pattern.")]
Strict = Annotated[bool, typer.Option("--strict", help="Warnings fail as well.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")]


def check(
    target: Target,
    config: Config = None,
    launcher: Launcher = None,
    data: Data = None,
    validation: Validation = None,
    checkpoint: Checkpoint = None,
    run_dir: RunDir = None,
    watch: Watch = [],  # noqa: B006 (typer copies it)
    label_key: LabelKey = None,
    ignore_index: IgnoreIndex = None,
    examples: Examples = None,
    only: Only = [],  # noqa: B006
    skip: Skip = [],  # noqa: B006
    strict: Strict = False,
    as_json: AsJson = False,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of the table.")
    ] = False,
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
