"""Commands that read: what a run has written, and what a code means."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stepguard._errors import (
    EXIT_HALTED,
    EXIT_OK,
    EXIT_SCRIPT_FAILED,
    EXIT_USAGE,
    ConfigError,
    JournalError,
)
from stepguard.cli._results import (
    GIVE,
    JsonOption,
    RankOption,
    RunArgument,
    WhichOption,
    chosen,
    echo,
    echo_json,
    exclude,
    folder_of,
    open_run,
    open_story,
    refuse_other_file,
    show,
    writing,
)
from stepguard.diagnose.engine import UnknownCode, all_rules, explained, index, page, rule_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepguard.report.health import Concern, Stage, StageOutcome, Verdict
    from stepguard.report.story import StoryReader

LISTED = ("state", "steps", "loss", "incidents", "last")
"""What the list of runs shows of each."""
HtmlOption = Annotated[bool, typer.Option("--html", help="Write a web page that opens from disk.")]
PageOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="PATH",
        help="Output file of --html; - is stdout. By default report.html in the run directory.",
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
    """Show what happened in a run: counts, incidents by kind, what led to what.

    Of a folder with several runs, a list of them.
    """
    from stepguard.journal import is_run
    from stepguard.report.run_report import render_markdown, render_terminal
    from stepguard.report.summary import summarize

    exclude(json=as_json, markdown=markdown, html=html)
    if out is not None and not html:
        raise ConfigError("--out says where the page of --html goes; give both.")
    if html:
        from stepguard.report.plot import replace_file

        page, path = report_page(run, rank), out or folder_of(run) / "report.html"
        if str(path) == "-":
            echo(page)
            return
        with writing(path):
            replace_file(path, page.encode("utf-8"))
        return
    if run.is_dir() and not is_run(run) and rank is None:
        _list_runs(run, as_json=as_json)
        return
    story = open_story(run, rank)
    summary = summarize(chosen(story, which), story)
    if as_json:
        echo_json(summary)
    elif markdown is None:
        show(render_terminal, summary, unicode=True)
    elif str(markdown) == "-":
        echo(render_markdown(summary), nl=False)
    else:
        with writing(markdown):
            markdown.write_text(render_markdown(summary), encoding="utf-8")


def _list_runs(folder: Path, *, as_json: bool) -> None:
    from stepguard.cli.schemas import RunList, run_row
    from stepguard.journal import runs_below
    from stepguard.report.page import overview
    from stepguard.report.phrases import moment
    from stepguard.report.run_report import render_list

    stories = {name: (path, open_story(path)) for name, path in runs_below(folder).items()}
    if not stories:
        raise JournalError(f"{folder} holds no run; {GIVE}.")
    if as_json:
        rows = tuple(run_row(name, str(path), story) for name, (path, story) in stories.items())
        echo_json(RunList(runs=rows))
        return
    lines = []
    for name, (_, story) in stories.items():
        shown = overview(story)
        line = {"run": name, **{title: shown[title] for title in LISTED}}
        lines.append({**line, "started": moment(shown["began"])})
    show(render_list, lines)


def compare(
    first: Annotated[
        Path,
        typer.Argument(metavar="RUN_A", help="A run directory or journal, such as the original."),
    ],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="The run to compare it with.")],
    as_json: JsonOption = False,
    rank: RankOption = None,
) -> None:
    """Put two runs side by side: bad steps, what was done, causes, losses, settings that differ."""
    from stepguard.report.run_report import render_comparison
    from stepguard.report.summary import compare as put_side_by_side

    one, other = (open_story(run, rank).latest for run in (first, second))
    comparison = put_side_by_side(one, other)
    if as_json:
        echo_json(comparison)
    else:
        show(render_comparison, comparison)


def report_page(run: Path, rank: int | None = None) -> str:
    """The page of a run folder, with what lies in the folders of its incidents."""
    from stepguard.report.page import Folders, render_page, run_name, story_document

    return render_page(story_document(open_story(run, rank), run_name(run), Folders()))


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
        bool, typer.Option("--once", help="Print the state once and exit, instead of following.")
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
    from stepguard.report.health import parse_stage
    from stepguard.report.story import StoryReader

    stages = [parse_stage(text) for text in stage or ()]
    follower = StoryReader(run, rank)
    path = follower.main_path
    if path.exists() and not path.is_file():
        raise JournalError(f"{path} is not a file; {GIVE}.")
    # Who follows may come before the run writes, but not with a name that nobody has made.
    if not run.exists() or (once and not path.exists()):
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
            from stepguard.report.health import concerns, judge_run, judge_stages, silence

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
    from stepguard.report.run_report import screenful
    from stepguard.report.summary import summarize

    latest = follower.story().latest
    return screenful(latest, summarize(latest), seen.outcomes, seen.verdict, seen.concerns)


# --- Pictures and pages.


def look(
    run: RunArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="Every health probe as one JSON line instead of tables.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every row instead of the worst ones.")
    ] = False,
    which: WhichOption = None,
    rank: RankOption = None,
) -> None:
    """Show how far the numbers of a run are from their limits, from its health probes."""
    from stepguard.report import probes, screen

    opened = open_run(run, rank, which)
    found = opened.looks
    if not found:
        raise ConfigError(f"{run} holds no health probes: {probes.why_none(opened)}.")
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
    from stepguard.report.plot import draw_run, write_png

    path = out or folder_of(run) / "loss_curve.png"
    if path.suffix.lower() != ".png":
        raise ConfigError(
            f"--out {path} does not end with .png; for a web page: stepguard report --html {run}."
        )
    opened = open_run(run, rank, which)
    if not len(opened.steps):
        raise ConfigError(f"{opened.path} holds no step yet, so there is nothing to draw.")
    with writing(path):
        write_png(draw_run(opened, f"training loss: {folder_of(run).resolve().name}"), path)


def serve(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A run directory, or a folder with several.")
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where to bind. Addresses beyond this machine, and machines with several "
            "users, need a token; one is generated if you give none.",
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
            help="Require this token.",
        ),
    ] = None,
) -> None:
    """Show runs live in the browser, from their journals; training is not touched."""
    from stepguard.report.serve import serve_runs

    serve_runs(runs, host, port, token, say=echo)


# --- What a code means.


def explain(
    code: Annotated[
        str, typer.Argument(help="A code such as SG204; without one, all codes are listed.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Explain a finding: what it means, why it happens, how stepguard knows, what to do."""
    if code:
        try:
            rule = rule_of(code)
        except UnknownCode as unknown:
            echo(str(unknown), err=True)
            raise typer.Exit(EXIT_USAGE) from None
        facts: object = asdict(explained(rule))
        markdown = page(rule)
    else:
        facts = [asdict(explained(rule)) for rule in all_rules()]
        markdown = index()
    if as_json:
        echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    if not sys.stdout.isatty():
        echo(markdown, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(markdown))
