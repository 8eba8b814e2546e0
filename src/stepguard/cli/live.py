"""`stepguard live RUN`: follow a run from its journal, and say after some steps whether it is
healthy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stepguard._errors import EXIT_HALTED, EXIT_OK, EXIT_SCRIPT_FAILED, JournalError
from stepguard.cli._run_folder import GIVE, RankOption, RunArgument, is_journal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepguard.journal import Follower
    from stepguard.report.health import Concern
    from stepguard.report.live_view import Verdict
    from stepguard.report.stages import Outcome, Stage

EVERY = 0.5
"""Seconds between two looks at the journal."""
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
        int | None, typer.Option("--steps", min=1, help="Give a verdict after this many steps.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            help="What must hold, such as '0-500: loss<5, incidents=0, fall>1'. Repeatable.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and end, instead of following.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the verdict, as JSON, at the end.")
    ] = False,
    rank: RankOption = 0,
) -> None:
    """Follow a run: loss, norm, skips, incidents, stages. Exit code 0 healthy, 1 not, 3 stopped by
    its policy.
    """
    from stepguard.journal import Follower
    from stepguard.report.stages import parse_stage

    stages = [parse_stage(text) for text in stage or ()]
    follower = Follower(run, rank)
    _refuse_no_journal(follower.record.path, once)
    follower.read()
    if once and not is_journal(follower.record):
        raise JournalError(
            f"{follower.record.path} is no journal of stepguard: none of its lines can be read; "
            f"{GIVE}."
        )
    seen = follow(follower, stages, steps, once=once, quiet=as_json)
    if as_json:
        _print_json(follower, seen)
    raise typer.Exit(EXITS[seen.verdict])


def _refuse_no_journal(path: Path, once: bool) -> None:
    """Whoever follows may come before the run; whoever looks once has mistyped."""
    if path.exists() and not path.is_file():
        raise JournalError(f"{path} is no file; {GIVE}.")
    if once and not path.exists():
        raise JournalError(f"{path} does not exist; {GIVE}.")


class Seen(NamedTuple):
    """The last look at a run."""

    verdict: Verdict
    outcomes: tuple[Outcome, ...] = ()
    concerns: tuple[Concern, ...] = ()


def follow(
    follower: Follower,
    stages: list[Stage],
    wanted: int | None,
    *,
    once: bool,
    quiet: bool = False,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> Seen:
    """Look, show, wait, until there is a verdict or Ctrl+C."""
    from rich.console import Console
    from rich.live import Live

    from stepguard.report import screen

    seen = Seen("waiting")
    shows = screen.is_tty(sys.stdout) and not quiet
    console = Console(quiet=not shows)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live_screen:
        while True:
            follower.read()
            seen = _look(
                follower, stages, wanted, once=once, idle=_idle(follower.record.path, clock)
            )
            if shows:
                live_screen.update(_screenful(follower, seen), refresh=True)
            if once or seen.verdict != "waiting":
                break
            wait(EVERY)
    if not shows and not quiet:
        screen.put(
            screen.draw(sys.stdout, lambda paper: paper.print(_screenful(follower, seen))),
            sys.stdout,
        )
    return seen


def _look(
    follower: Follower, stages: list[Stage], wanted: int | None, *, once: bool, idle: float
) -> Seen:
    from stepguard.report.health import concerns, silence
    from stepguard.report.live_view import judge_run
    from stepguard.report.stages import judge_stages

    record = follower.record
    outcomes, told = judge_stages(record, stages), concerns(record)
    verdict = judge_run(record, outcomes, wanted, told)
    quiet_since = silence(record, idle) if verdict == "waiting" else None
    if quiet_since is not None:
        told = (*told, quiet_since)
    if once:
        verdict = judge_run(record, outcomes, wanted, told, now=True)
    return Seen(verdict, outcomes, told)


def _idle(path: Path, clock: Callable[[], float]) -> float:
    """Seconds since the journal was written to; 0 while there is none."""
    try:
        return max(0.0, clock() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _screenful(follower: Follower, seen: Seen) -> RenderableType:
    from stepguard.report.live_view import screenful
    from stepguard.report.summary import summarize

    return screenful(
        follower.record, summarize(follower.record), seen.outcomes, seen.verdict, seen.concerns
    )


def _print_json(follower: Follower, seen: Seen) -> None:
    from stepguard.records.codec import dumps, to_jsonable

    record = follower.record
    fields = {
        "verdict": seen.verdict,
        "steps": len(record.steps),
        "incidents": len(record.incidents),
    }
    stages = [to_jsonable(outcome) for outcome in seen.outcomes]
    typer.echo(
        dumps(
            {**fields, "concerns": [to_jsonable(each) for each in seen.concerns], "stages": stages}
        )
    )
