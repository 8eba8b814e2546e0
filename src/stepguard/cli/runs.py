"""`stepguard live RUN`: follow a run by its journal, and judge whether it is healthy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._results import (
    PAGE,
    RankOption,
    RunArgument,
    WhichOption,
    chosen,
    echo,
    folder_of,
    open_story,
    report_page,
    write_page,
)

if TYPE_CHECKING:
    from stepguard.report.summary import RunSummary
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from stepguard._errors import EXIT_HALTED, EXIT_OK, EXIT_SCRIPT_FAILED, JournalError
from stepguard.cli._results import GIVE, refuse_other_file

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepguard.report.health import Concern
    from stepguard.report.live import Stage, StageOutcome, Verdict
    from stepguard.report.story import StoryReader
from enum import StrEnum

from stepguard.cli._results import open_run

if TYPE_CHECKING:
    from stepguard.report.plot import RunFigure
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepguard.report.checks import Suspect


# --- `stepguard report RUN`: what happened in a run, from its journal.


def report(
    run: RunArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown", metavar="PATH", help="Write Markdown to this file; - is stdout."
        ),
    ] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Write one web page that opens from disk.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="With --html: where to; - is stdout. Default: report.html in the run directory.",
        ),
    ] = None,
    rank: RankOption = None,
    which: WhichOption = None,
) -> None:
    """Show what happened in a run: counts, incidents by kind, what led to what."""
    from stepguard.report.run_report import render_markdown
    from stepguard.report.summary import render_json, summarize

    _refuse_contradictions(as_json, markdown, html, out)
    if html:
        write_page(report_page(run, rank), out or folder_of(run) / PAGE)
        return
    story = open_story(run, rank)
    summary = summarize(chosen(story, which), story)
    if as_json:
        echo(render_json(summary))
    elif markdown is None:
        _show(summary)
    elif str(markdown) == "-":
        echo(render_markdown(summary), nl=False)
    else:
        _write(markdown, render_markdown(summary))


def _refuse_contradictions(
    as_json: bool, markdown: Path | None, html: bool, out: Path | None
) -> None:
    if as_json and markdown is not None:
        raise ConfigError("--json and --markdown exclude each other; give one of them.")
    if html and (as_json or markdown is not None):
        raise ConfigError("--html excludes --json and --markdown; give one of them.")
    if out is not None and not html:
        raise ConfigError("--out says where the page of --html goes; give both.")


def _show(summary: RunSummary) -> None:
    from stepguard.report import screen
    from stepguard.report.run_report import render_terminal

    out = sys.stdout
    text = render_terminal(
        summary,
        width=screen.columns(out),
        colour=screen.wants_colour(out),
        unicode=screen.takes_unicode(out),
    )
    screen.put(text, out)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--markdown: {path} cannot be written: {error.strerror}.") from error
    echo(f"wrote {path}")


# --- `stepguard live RUN`: follow a run by its journal, and judge whether it is healthy.


EVERY = 0.5
"""Seconds between two reads of the journal."""
EXITS = {
    "healthy": EXIT_OK,
    "waiting": EXIT_OK,
    "attention": EXIT_SCRIPT_FAILED,
    "unhealthy": EXIT_SCRIPT_FAILED,
    "stopped": EXIT_HALTED,
}


def live(
    run: RunArgument,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="Give a verdict after this many steps."),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            metavar="'A-B: NAME<LIMIT, ...'",
            help="What must hold, such as '0-500: loss<5, incidents=0, fall>1'. Repeatable.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and end, instead of following.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the verdict, as JSON, at the end.")
    ] = False,
    rank: RankOption = None,
) -> None:
    """Follow a run: loss, norm, skips, incidents, stages.

    Exit code 0 healthy, 1 not, 3 stopped by its policy.
    """
    from stepguard.report.live import parse_stage
    from stepguard.report.story import StoryReader

    stages = [parse_stage(text) for text in stage or ()]
    follower = StoryReader(run, rank)
    _refuse_no_journal(follower.main_path, once)
    follower.read()
    if once:
        refuse_other_file(follower.story())
    seen = follow(follower, stages, steps, once=once, quiet=as_json)
    if as_json:
        _print_json(follower, seen)
    raise typer.Exit(EXITS[seen.verdict])


def _refuse_no_journal(path: Path, once: bool) -> None:
    """Refuse a missing journal with `--once`: only who follows may come before the run starts."""
    if path.exists() and not path.is_file():
        raise JournalError(f"{path} is not a file; {GIVE}.")
    if once and not path.exists():
        raise JournalError(f"{path} does not exist; {GIVE}.")


class Seen(NamedTuple):
    """What was read of a run at one moment, and judged."""

    verdict: Verdict
    outcomes: tuple[StageOutcome, ...] = ()
    concerns: tuple[Concern, ...] = ()


def follow(
    follower: StoryReader,
    stages: list[Stage],
    wanted: int | None,
    *,
    once: bool,
    quiet: bool = False,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> Seen:
    """Read, judge, show, wait, until there is a verdict or Ctrl+C."""
    from rich.live import Live

    from stepguard.report import screen

    seen = Seen("waiting")
    shows = screen.is_tty(sys.stdout) and not quiet
    console = screen.CleanConsole(quiet=not shows, markup=False, emoji=False)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live_screen:
        while True:
            follower.read()
            idle = min(_idle(lane.path, clock) for lane in follower.story().latest.lanes)
            seen = _look(follower, stages, wanted, once=once, idle=idle)
            if shows:
                live_screen.update(_screenful(follower, seen), refresh=True)
            if once or seen.verdict != "waiting":
                break
            wait(EVERY)
    if not shows and not quiet:
        shown = _screenful(follower, seen)
        screen.put(screen.draw(sys.stdout, lambda paper: paper.print(shown)), sys.stdout)
    return seen


def _look(
    follower: StoryReader, stages: list[Stage], wanted: int | None, *, once: bool, idle: float
) -> Seen:
    from stepguard.report.health import concerns, silence
    from stepguard.report.live import judge_run, judge_stages

    latest = follower.story().latest
    outcomes = judge_stages(latest, stages)
    told = concerns(latest)
    verdict = judge_run(latest, outcomes, wanted, told)
    quiet_since = silence(latest, idle) if verdict == "waiting" else None
    if quiet_since is not None:
        told = (*told, quiet_since)
    if once:
        verdict = judge_run(latest, outcomes, wanted, told, now=True)
    return Seen(verdict, outcomes, told)


def _idle(path: Path, clock: Callable[[], float]) -> float:
    """Seconds since the journal was written to; 0 while there is none."""
    try:
        return max(0.0, clock() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _screenful(follower: StoryReader, seen: Seen) -> RenderableType:
    from stepguard.report.live import screenful
    from stepguard.report.summary import summarize

    latest = follower.story().latest
    return screenful(latest, summarize(latest), seen.outcomes, seen.verdict, seen.concerns)


def _print_json(follower: StoryReader, seen: Seen) -> None:
    from stepguard.records.codec import dumps, to_jsonable

    latest = follower.story().latest
    fields = {
        "verdict": seen.verdict,
        "steps": len(latest.steps),
        "incidents": sum(len(lane.incidents) for lane in latest.lanes),
        "concerns": [to_jsonable(concern) for concern in seen.concerns],
        "stages": [to_jsonable(outcome) for outcome in seen.outcomes],
    }
    echo(dumps(fields))


# --- `stepguard look RUN`: the deep looks of a run, worst first.


def look(
    run: RunArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="Every look as one JSON line instead of tables.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every row instead of the worst ones.")
    ] = False,
    which: WhichOption = None,
    rank: RankOption = None,
) -> None:
    """Show how far the numbers of a run are from their limits, from its deep looks."""
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import probes, screen

    opened = open_run(run, rank, which)
    found = opened.looks
    if not found:
        raise ConfigError(f"{run} holds no deep looks: {probes.why_none(opened)}.")
    if as_json:
        for one in found:
            echo(dumps(to_plain(one)))
        return
    most = None if everything else probes.MOST_LISTED
    out = sys.stdout
    screen.put(screen.draw(out, lambda console: probes.paint_looks(found, console, most=most)), out)


# --- `stepguard plot RUN`: the loss curve of a run as a picture or a web page.


class PlotFormat(StrEnum):
    """What `stepguard plot` can write."""

    PNG = "png"
    HTML = "html"


ENDINGS = {".png": PlotFormat.PNG, ".html": PlotFormat.HTML}


def plot(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="Where to write; by default loss_curve.png inside RUN.",
        ),
    ] = None,
    kind: Annotated[
        PlotFormat | None,
        typer.Option(
            "--format", metavar="png|html", help="By default what --out ends with, else png."
        ),
    ] = None,
    rank: RankOption = None,
    which: WhichOption = None,
) -> None:
    """Draw loss, gradient norm and learning rate over the steps, with every incident marked."""
    from stepguard.report.plot import describe

    chosen, path = choose_output(folder_of(run), out, kind)
    told = open_run(run, rank, which)
    if not len(told.steps):
        raise ConfigError(f"{told.path} holds no step yet, so there is nothing to draw.")
    title = f"training loss: {folder_of(run).resolve().name}"
    shown = describe(told, title)
    try:
        _plot_write(shown, chosen, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    echo(f"wrote {path}")


def _plot_write(shown: RunFigure, kind: PlotFormat, path: Path) -> None:
    if kind is PlotFormat.PNG:
        from stepguard.report.plot import write_png

        write_png(shown, path)
    else:
        from stepguard.report.plot import write_html

        write_html(shown, path)


def choose_output(
    folder: Path, out: Path | None, kind: PlotFormat | None
) -> tuple[PlotFormat, Path]:
    """Choose format and file; `--format` and the ending of `--out` must not contradict."""
    if out is None:
        chosen = kind or PlotFormat.PNG
        return chosen, folder / f"loss_curve.{chosen}"
    by_ending = ENDINGS.get(out.suffix.lower())
    if kind is None and by_ending is None:
        raise ConfigError(
            f"--out {out} does not end with .png or .html; change the ending or give --format."
        )
    if kind is not None and by_ending is not None and kind is not by_ending:
        raise ConfigError(
            f"--format {kind} does not fit --out {out}; leave --format out or change the ending."
        )
    return kind or by_ending or PlotFormat.PNG, out


# --- `stepguard quarantine --data RUN`: the samples a run left out, and a list for a sampler.


def show_bad_samples(run: Path, *, as_json: bool, out: Path | None, unproven: bool) -> None:
    """Print the ledger of a run, or write the samples to leave out to a file, one a line."""
    from stepguard.ledger import read_ledger
    from stepguard.records.codec import dumps
    from stepguard.report import checks, screen

    if not any(run.glob("journal*.jsonl")) and not any(run.glob("bad_samples*.jsonl")):
        raise ConfigError(
            f"{run} is not a run folder: it holds neither a journal.jsonl nor a bad_samples.jsonl."
        )
    try:
        entries, unread = read_ledger(run)
    except OSError as error:
        raise JournalError(f"{error.filename or run} cannot be read: {error.strerror}.") from error
    steps = _steps_seen(run)
    if as_json:
        echo(dumps(checks.as_json(str(run), entries, unread, steps)))
    else:
        stream = sys.stdout
        text = checks.render_ledger(str(run), entries, unread, steps, screen.columns(stream))
        screen.put(text, stream)
    if out is not None:
        _bad_samples_write(out, checks.suspects(entries), unproven=unproven)


def _bad_samples_write(path: Path, found: Sequence[Suspect], *, unproven: bool) -> None:
    lines = []
    for suspect in found:
        if suspect.proven or unproven:
            lines.append(f"{suspect.id if suspect.index is None else suspect.index}\n")
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}.") from error
    text = f"wrote {len(lines)} to {path}"
    left = len(found) - len(lines)
    if left:
        text += f"; {left} more are in bad batches, none of them proven (--unproven lists them too)"
    echo(text, err=True)


def _steps_seen(run: Path) -> int:
    """Step lines of the journals, of all ranks and attempts."""
    count = 0
    for path in run.glob("journal*.jsonl"):
        if not path.is_file():
            continue
        try:
            with path.open("rb") as lines:
                count += sum(b'"type":"step"' in line for line in lines)
        except OSError:
            continue
    return count


# --- `stepguard serve RUNS`: the page of a run, or of a folder of runs, while they train.


def serve(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A run directory, or a folder with several.")
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where to bind, 127.0.0.1 by default. Beyond the loopback, and where other people "
            "use this machine, a token is needed; one is made where none is given.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, metavar="N", help="Default: the first free one from 8321."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="STEPGUARD_TOKEN",
            metavar="TEXT",
            help="Ask for this token; also by the variable STEPGUARD_TOKEN.",
        ),
    ] = None,
) -> None:
    """Show runs live in the browser, from their journals; training is not touched."""
    from stepguard.serve.app import serve_runs

    serve_runs(runs, host, port, token, say=echo)
