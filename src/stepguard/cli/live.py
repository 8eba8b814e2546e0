"""`stepguard live RUN`: follow a run by its journal, and judge whether it is healthy."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stepguard._errors import EXIT_HALTED, EXIT_OK, EXIT_SCRIPT_FAILED, JournalError
from stepguard.cli._run_folder import GIVE, RankOption, RunArgument, refuse_other_file
from stepguard.cli._terminal import echo

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepguard.report.health import Concern
    from stepguard.report.live_view import Verdict
    from stepguard.report.stages import Stage, StageOutcome
    from stepguard.report.story import StoryReader

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
    from stepguard.report.stages import parse_stage
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
    from stepguard.report.live_view import judge_run
    from stepguard.report.stages import judge_stages

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
    from stepguard.report.live_view import screenful
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
