"""`stepguard check TARGET`: the preflight, before a run costs anything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from stepguard._errors import EXIT_OK, EXIT_PREFLIGHT, ConfigError

if TYPE_CHECKING:
    from stepguard.records.preflight import Preflight

Progress = Callable[[int, int | None], None]


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="`module:function` that returns (model, optimizer, loss_fn) or more; a configuration "
        "file "
        "(json, toml, yaml, py); or a data file or folder.",
    ),
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Configuration, given to the function.")
]
Launcher = Annotated[Path | None, typer.Option(metavar="FILE", help="accelerate's yaml or json.")]
Data = Annotated[Path | None, typer.Option(metavar="PATH", help="File or folder to scan.")]
Validation = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Data that must share no example with it.")
]
Checkpoint = Annotated[
    Path | None, typer.Option(metavar="PATH", help="What the run would resume from.")
]
RunDir = Annotated[Path | None, typer.Option(metavar="PATH", help="Where checkpoints will go.")]
Watch = Annotated[
    list[str], typer.Option(metavar="PATTERN=LIMIT", help="Largest magnitude of matching tensors.")
]
LabelKey = Annotated[str | None, typer.Option(help="Key of the targets in an example.")]
IgnoreIndex = Annotated[int | None, typer.Option(help="Target value that does not count (-100).")]
Examples = Annotated[int | None, typer.Option(min=1, help="Scan at most so many examples.")]
Only = Annotated[list[str], typer.Option(metavar="ITEM", help="Only this id, section or pattern.")]
Skip = Annotated[list[str], typer.Option(metavar="ITEM", help="Not this id, section or pattern.")]
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
    given: dict[str, object] = {
        "data": data,
        "validation": validation,
        "checkpoint": checkpoint,
        "run_dir": run_dir,
        "watch": _limits(watch),
        "label_key": label_key,
        "ignore_index": ignore_index,
        "examples": examples,
    }
    result = _checked(target, config, launcher, given, tuple(only), tuple(skip), quiet=as_json)
    _show(result, as_json=as_json)
    bad = result.of("fail", "warn") if strict else result.of("fail")
    raise typer.Exit(EXIT_PREFLIGHT if bad else EXIT_OK)


def _checked(
    target: str,
    config: Path | None,
    launcher: Path | None,
    given: dict[str, object],
    only: tuple[str, ...],
    skip: tuple[str, ...],
    *,
    quiet: bool,
) -> Preflight:
    from stepguard.preflight.run import check as look
    from stepguard.preflight.run import selected
    from stepguard.preflight.target import Request, resolve

    selected(only, skip)  # a misspelt item is told before anything is built
    with (
        redirect_stdout(sys.stderr) if quiet else nullcontext()
    ):  # what the program prints is no part of the JSON
        subject, place = resolve(
            Request(target=target, config=config, launcher=launcher, given=given)
        )
        with _bar(sys.stderr) as progress:
            return look(
                subject, only=only, skip=skip, target=target, place=place, progress=progress
            )


def _limits(words: list[str]) -> dict[str, float]:
    """`*.alpha=10` -> pattern and limit."""
    limits = {}
    for word in words:
        pattern, equals, limit = word.rpartition("=")
        try:
            limits[pattern] = float(limit)
        except ValueError:
            equals = ""
        if not equals or not pattern or not limits[pattern] > 0:
            raise ConfigError(
                f"--watch {word!r} must look like PATTERN=LIMIT, as in '*.alpha=10', with a limit "
                f"above 0."
            )
    return limits


@contextmanager
def _bar(stream: TextIO) -> Iterator[Progress | None]:
    """A progress bar over the examples, on a terminal only; gone when it is done."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from stepguard.report import screen

    if not screen.is_tty(stream):
        yield None
        return
    with Bar(console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("reading examples", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _show(result: Preflight, *, as_json: bool) -> None:
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import screen
    from stepguard.report.preflight import render_preflight

    if as_json:
        typer.echo(dumps({**to_plain(result), "ok": result.ok}))
        return
    out = sys.stdout
    shape = {"colour": screen.wants_colour(out), "unicode": screen.takes_unicode(out)}
    screen.put(render_preflight(result, width=screen.columns(out), **shape), out)
