"""Commands that read what a run has written: report, compare, live, look, plot, serve."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stepguard._errors import (
    EXIT_HALTED,
    EXIT_OK,
    EXIT_SCRIPT_FAILED,
    ConfigError,
    JournalError,
)
from stepguard.cli._results import (
    COMPARISON,
    GIVE,
    PAGE,
    JsonOption,
    RankOption,
    RunArgument,
    WhichOption,
    chosen,
    comparison_page,
    echo,
    echo_json,
    exclude,
    folder_of,
    open_run,
    open_story,
    refuse_other_file,
    report_page,
    show,
    write_page,
    writing,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepguard.report.health import Concern
    from stepguard.report.live import Stage, StageOutcome, Verdict
    from stepguard.report.story import StoryReader

HtmlOption = Annotated[bool, typer.Option("--html", help="Write a web page that opens from disk.")]
PageOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="PATH",
        help="With --html: where to; - is stdout. By default a file in the (second) run directory.",
    ),
]


def report(
    run: RunArgument,
    as_json: JsonOption = False,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown", metavar="PATH", help="Write Markdown to this file; - is stdout."
        ),
    ] = None,
    html: HtmlOption = False,
    out: PageOption = None,
    rank: RankOption = None,
    which: WhichOption = None,
) -> None:
    """Show what happened in a run: counts, incidents by kind, what led to what."""
    from stepguard.report.run_report import render_markdown, render_terminal
    from stepguard.report.summary import render_json, summarize

    exclude(json=as_json, markdown=markdown, html=html)
    _refuse_out_without_html(html, out)
    if html:
        write_page(report_page(run, rank), out or folder_of(run) / PAGE)
        return
    story = open_story(run, rank)
    summary = summarize(chosen(story, which), story)
    if as_json:
        echo(render_json(summary))
    elif markdown is None:
        show(render_terminal, summary, unicode=True)
    elif str(markdown) == "-":
        echo(render_markdown(summary), nl=False)
    else:
        with writing(markdown):
            markdown.write_text(render_markdown(summary), encoding="utf-8")


def compare(
    first: Annotated[
        Path,
        typer.Argument(metavar="RUN_A", help="A run directory or journal, such as the original."),
    ],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="The one to compare it with.")],
    as_json: JsonOption = False,
    html: HtmlOption = False,
    out: PageOption = None,
    rank: RankOption = None,
) -> None:
    """Put two runs side by side: bad steps, what was done, causes, losses, settings that differ."""
    from stepguard.report.compare import compare as put_side_by_side
    from stepguard.report.compare import render_json, render_terminal

    exclude(html=html, json=as_json)
    _refuse_out_without_html(html, out)
    comparison = put_side_by_side(open_run(first, rank), open_run(second, rank))
    if html:
        page = comparison_page((first, second), rank, comparison)
        write_page(page, out or folder_of(second) / COMPARISON)
    elif as_json:
        echo(render_json(comparison))
    else:
        show(render_terminal, comparison)


def _refuse_out_without_html(html: bool, out: Path | None) -> None:
    if out is not None and not html:
        raise ConfigError("--out says where the page of --html goes; give both.")


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
    from stepguard.records.codec import to_jsonable
    from stepguard.report.live import parse_stage
    from stepguard.report.story import StoryReader

    stages = [parse_stage(text) for text in stage or ()]
    follower = StoryReader(run, rank)
    path = follower.main_path
    if path.exists() and not path.is_file():
        raise JournalError(f"{path} is not a file; {GIVE}.")
    # Who follows may come before the run starts.
    if once and not path.exists():
        raise JournalError(f"{path} does not exist; {GIVE}.")
    follower.read()
    if once:
        refuse_other_file(follower.story())
    seen = follow(follower, stages, steps, once=once, quiet=as_json)
    if as_json:
        latest = follower.story().latest
        fields = {
            "verdict": seen.verdict,
            "steps": len(latest.steps),
            "incidents": sum(len(lane.incidents) for lane in latest.lanes),
            "concerns": [to_jsonable(concern) for concern in seen.concerns],
            "stages": [to_jsonable(outcome) for outcome in seen.outcomes],
        }
        echo_json(fields)
    raise typer.Exit(EXITS[seen.verdict])


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
            now = clock()
            from stepguard.report.health import concerns, silence
            from stepguard.report.live import judge_run, judge_stages

            latest = follower.story().latest
            outcomes = judge_stages(latest, stages)
            found = concerns(latest)
            verdict = judge_run(latest, outcomes, wanted, found)
            written = 0.0
            for lane in latest.lanes:
                with suppress(OSError):
                    written = max(written, lane.path.stat().st_mtime)
            quiet_since = silence(latest, now - written) if written else None
            if verdict == "waiting" and quiet_since is not None:
                found = (*found, quiet_since)
            if once:
                verdict = judge_run(latest, outcomes, wanted, found, now=True)
            seen = Seen(verdict, outcomes, found)
            if shows:
                live_screen.update(_screenful(follower, seen), refresh=True)
            if once or seen.verdict != "waiting":
                break
            wait(EVERY)
    if not shows and not quiet:
        shown = _screenful(follower, seen)
        screen.put(screen.draw(sys.stdout, lambda paper: paper.print(shown)), sys.stdout)
    return seen


def _screenful(follower: StoryReader, seen: Seen) -> RenderableType:
    from stepguard.report.live import screenful
    from stepguard.report.summary import summarize

    latest = follower.story().latest
    return screenful(latest, summarize(latest), seen.outcomes, seen.verdict, seen.concerns)


# --- Pictures and pages.


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
    from stepguard.report import probes, screen

    opened = open_run(run, rank, which)
    found = opened.looks
    if not found:
        raise ConfigError(f"{run} holds no deep looks: {probes.why_none(opened)}.")
    if as_json:
        for one in found:
            echo_json(one)
        return
    most = None if everything else probes.MOST_LISTED
    out = sys.stdout
    screen.put(screen.draw(out, lambda console: probes.paint_looks(found, console, most=most)), out)


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
    rank: RankOption = None,
    which: WhichOption = None,
) -> None:
    """Draw loss, gradient norm and learning rate over the steps, with every incident marked."""
    from stepguard.report.plot import describe, write_png

    path = out or folder_of(run) / "loss_curve.png"
    if path.suffix.lower() != ".png":
        raise ConfigError(
            f"--out {path} does not end with .png; for a web page: stepguard report --html {run}."
        )
    opened = open_run(run, rank, which)
    if not len(opened.steps):
        raise ConfigError(f"{opened.path} holds no step yet, so there is nothing to draw.")
    with writing(path):
        write_png(describe(opened, f"training loss: {folder_of(run).resolve().name}"), path)


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
    from stepguard.report.serve import serve_runs

    serve_runs(runs, host, port, token, say=echo)
