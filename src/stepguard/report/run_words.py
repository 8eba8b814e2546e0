"""The rows of a run's summary in words, the same for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepguard.report import phrases
from stepguard.report.summary import ClipActivity, IncidentGroup, RunSummary
from stepguard.report.timeline import Event

Row = tuple[str, str]
STATES = {
    "running": "running",
    "closed": "ended",
    "error": "ended by an exception",
    "signal": "ended by a signal",
    "stopped": "stopped by its policy",
    "killed": "ended without a word",
}
MOST_EVENTS = 40
_VERSIONS = ("stepguard", "torch", "python")
_RUN_FACTS = ("optimizer", "parameters", "lr", "rank", "world", "agreement")
_TOLD = (
    *_VERSIONS,
    *_RUN_FACTS,
    "versions",
    "time",
    "config",
    "settings",
    "attempt",
    "process",
    "name",
    "lane",
)


def heading(summary: RunSummary) -> list[Row]:
    """When, with what, on how many ranks, and which settings are not the default."""
    header = summary.header
    rows = [
        ("began", phrases.moment(header.get("time"))),
        ("folder", _folder(summary)),
        ("restarts", _restarts(summary)),
        ("versions", _versions(header)),
        ("optimizer", "" if summary.optimizers else _optimizer(header)),
        ("ranks", _ranks(header)),
        ("settings", _settings(summary.changed_settings)),
    ]
    for name, value in header.items():
        if name not in _TOLD:
            rows.append((str(name), _plain(value)))
    return [row for row in rows if row[1]]


def _folder(summary: RunSummary) -> str:
    """Where a folder holds more than this run."""
    parts = []
    if summary.runs > 1:
        others = f"`--run 1` to `--run {summary.runs}` show each of them"
        parts.append(f"used for {summary.runs} runs, this is number {summary.run}; {others}")
    if summary.elsewhere:
        parts.append(f"other runs are in {phrases.first_few(summary.elsewhere, 4)}")
    return "; ".join(parts)


def _restarts(summary: RunSummary) -> str:
    if not summary.restarts:
        return ""
    return f"{summary.restarts}, all in this report"


def _versions(header: Mapping[str, Any]) -> str:
    versions = header.get("versions")
    if not versions:
        versions = {name: header[name] for name in _VERSIONS if name in header}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _ranks(header: Mapping[str, Any]) -> str:
    if header.get("world", 1) <= 1:
        return ""
    return f"{header['world']}, this is rank {header.get('rank', 0)}"


def _settings(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_plain(value)}" for name, value in changed.items())


def _optimizer(header: Mapping[str, Any]) -> str:
    parts = [str(header.get("optimizer") or "")]
    if header.get("parameters"):
        parts.append(phrases.count(header["parameters"], "parameter"))
    if header.get("lr"):
        parts.append(f"lr {phrases.rates(header['lr'])}")
    return phrases.joined(parts)


def counts(summary: RunSummary) -> list[Row]:
    """Steps, bad steps, losses, clipping; of several optimizers, a few words on each."""
    if summary.optimizers:
        return [*map(_lane, summary.optimizers), ("incidents", f"{summary.incidents:,}")]
    rows = [("steps", _steps(summary)), ("bad steps", _bad(summary))]
    if summary.first_loss is not None:
        first = phrases.number(summary.first_loss)
        best = phrases.number(summary.best_loss)
        last = phrases.number(summary.last_loss)
        rows.append(("loss", f"first {first}, best {best}, last {last}"))
    if summary.clip is not None:
        rows.append(("clipping", _clipping(summary.clip)))
    if summary.seconds_per_step is not None:
        rows.append(("speed", f"{phrases.number(summary.seconds_per_step)} s a step (median)"))
    return rows


def _lane(summary: RunSummary) -> Row:
    parts = [_optimizer(summary.header), f"{summary.committed:,} of {summary.steps:,} steps made"]
    parts.append(phrases.count(summary.incidents, "incident"))
    if summary.last_loss is not None:
        first, last = phrases.number(summary.first_loss), phrases.number(summary.last_loss)
        parts.append(f"loss {first} to {last}")
    return summary.name, f"{STATES[summary.state]}: {', '.join(parts)}"


def _clipping(clip: ClipActivity) -> str:
    share = clip.clipped / clip.steps
    text = f"{share:.1%} of {phrases.count(clip.steps, 'step')} clipped"
    if clip.mean_factor is not None:
        text += f", on average to {clip.mean_factor:.2g} of their length"
    return text


def _steps(summary: RunSummary) -> str:
    parts = [
        f"{summary.steps:,} seen",
        f"{summary.committed:,} committed",
        f"{summary.skipped:,} skipped",
    ]
    if summary.left:
        parts[1] += f" ({summary.left:,} of them no longer count: {_left_by(summary)})"
    if summary.calibrations:
        parts.append(phrases.count(summary.calibrations, "loss-scale calibration"))
    return ", ".join(parts)


def _left_by(summary: RunSummary) -> str:
    """Why steps no longer count."""
    ways = []
    if summary.rewinds:
        ways.append(phrases.count(summary.rewinds, "rewind"))
    if summary.restarts:
        ways.append(phrases.count(summary.restarts, "restart"))
    return " and ".join(ways) or "the run went back"


def _bad(summary: RunSummary) -> str:
    if summary.first_bad is None:
        return "none"
    return (
        f"{summary.bad_steps:,}, first {summary.first_bad}, last {summary.last_bad}, "
        f"longest stretch {summary.longest_stretch:,} in a row"
    )


def lead_up(summary: RunSummary, *, plain: bool = False) -> list[Row]:
    """Gradient norm, loss and what was followed, over the steps before the first incident."""
    series = {
        "grad norm": summary.norms_before,
        "loss": summary.losses_before,
        **summary.followed_before,
    }
    rows = []
    for lane in summary.optimizers:
        rows += [(f"{lane.name} {name}", drawn) for name, drawn in lead_up(lane, plain=plain)]
    for name, values in {} if rows else series.items():
        if len(values) > 1:
            rows.append((name, _spark(values, plain)))
    return rows


def chains(summary: RunSummary) -> list[tuple[str, tuple[Event, ...]]]:
    """What led to what, under a heading for each optimizer."""
    lanes = summary.optimizers or (summary,)
    title = "what led to what"
    named = [
        (f"{title}: {lane.name}" if len(lanes) > 1 else title, lane.timeline) for lane in lanes
    ]
    return [(heading, events) for heading, events in named if events]


def kind_title(group: IncidentGroup) -> str:
    """What is wrong, and with which of several optimizers."""
    title = phrases.verdict_title(group.verdict)
    return f"{group.optimizer}: {title}" if group.optimizer else title


def _spark(values: Sequence[float], plain: bool) -> str:
    drawn = phrases.sparkline(values, plain=plain)
    first = phrases.number(values[0])
    last = phrases.number(values[-1])
    return f"{drawn}  {first} to {last} in {phrases.count(len(values), 'step')}"


def where_and_who(group: IncidentGroup) -> str:
    """The place and the samples of a kind of incident."""
    return phrases.joined([group.where, group.culprits])


def further_commands(group: IncidentGroup) -> list[str]:
    """What to type next, without the command whose output this is."""
    return [command for command in group.commands if not command.startswith("stepguard report ")]


def shorten(events: Sequence[Event], most: int = MOST_EVENTS) -> tuple[Sequence[Event], int]:
    """The beginning and the end of a long chain, and how many events lie between."""
    if len(events) <= most:
        return events, 0
    half = most // 2
    return [*events[:half], *events[-half:]], len(events) - 2 * half


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    if isinstance(value, float):
        return phrases.number(value)
    return str(value)
