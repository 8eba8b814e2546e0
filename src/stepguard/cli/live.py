"""`stepguard live RUN`: follow a run from its journal, and say after some steps whether it is healthy."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_HALTED, EXIT_OK, EXIT_SCRIPT_FAILED
from stepguard.cli.run_folder import RankOption, RunArgument

if TYPE_CHECKING:
    from stepguard.journal import Follower
    from stepguard.report.live_view import Verdict
    from stepguard.report.stages import Stage

EVERY = 0.5
"""Seconds between two looks at the journal."""


def live(
    run: RunArgument,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Give a verdict after this many steps.")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", help="What must hold, such as '0-500: loss<5, incidents=0, fall>1'. Repeatable."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and end, instead of following.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the verdict, as JSON, at the end.")] = False,
    rank: RankOption = 0,
) -> None:
    """Follow a run: loss, norm, skips, incidents, stages. Exit code 0 healthy, 1 not, 3 stopped by its policy."""
    from stepguard.journal import Follower
    from stepguard.report.stages import parse_stage

    stages = [parse_stage(text) for text in stage or ()]
    follower = Follower(run, rank)
    verdict = follow(follower, stages, steps, once=once, quiet=as_json)
    if as_json:
        _print_json(follower, stages, verdict)
    exits = {"healthy": EXIT_OK, "waiting": EXIT_OK, "unhealthy": EXIT_SCRIPT_FAILED, "stopped": EXIT_HALTED}
    raise typer.Exit(exits[verdict])


def follow(
    follower: Follower,
    stages: list[Stage],
    wanted: int | None,
    *,
    once: bool,
    quiet: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> Verdict:
    """Look, show, wait, until there is a verdict or Ctrl+C."""
    from rich.console import Console
    from rich.live import Live

    from stepguard.report.live_view import judge_run, screenful
    from stepguard.report.stages import judge_stages
    from stepguard.report.summary import summarize

    verdict: Verdict = "waiting"
    console = Console(quiet=quiet)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as screen:
        while True:
            follower.read()
            outcomes = judge_stages(follower.record, stages)
            verdict = judge_run(follower.record, outcomes, wanted)
            screen.update(screenful(follower.record, summarize(follower.record), outcomes, verdict), refresh=True)
            if once or verdict != "waiting":
                break
            wait(EVERY)
    return verdict


def _print_json(follower: Follower, stages: list[Stage], verdict: Verdict) -> None:
    from stepguard.records.codec import dumps, to_jsonable
    from stepguard.report.stages import judge_stages

    outcomes = [to_jsonable(outcome) for outcome in judge_stages(follower.record, stages)]
    fields = {"verdict": verdict, "steps": len(follower.record.steps), "incidents": len(follower.record.incidents)}
    typer.echo(dumps({**fields, "stages": outcomes}))
