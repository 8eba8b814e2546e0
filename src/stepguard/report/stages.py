"""Acceptance of a run by stages: `0-500: loss<5, incidents=0` is asked once step 500 has come."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from stepguard._errors import ConfigError
from stepguard.report import phrases
from stepguard.report.step_lines import StepLine, committed
from stepguard.report.summary import Record

State = Literal["waiting", "passed", "failed"]
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
EXAMPLE = "'0-500: loss<5, incidents=0'"
_CONDITION = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(<=|>=|<|>|=)\s*([-+.\deE]+)\s*")
_STAGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*:(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A number of the run and its limit."""

    name: str
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{phrases.number(self.limit)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps `first` to `last`, and what must hold of them."""

    first: int
    last: int
    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """One condition of one stage, with the number that decided it."""

    stage: str
    condition: str
    state: State
    value: float | None = None
    note: str = ""
    """Why there is no number, where steps have come and none of them has it."""


def parse_stage(text: str) -> Stage:
    """`0-500: loss<5, incidents=0`; raises ConfigError with what is wrong."""
    found = _STAGE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--stage {text!r} must look like {EXAMPLE}.")
    first = int(found[1])
    last = int(found[2])
    if last < first:
        raise ConfigError(f"--stage {text!r} ends before it begins; write {last}-{first}.")
    conditions = tuple(_condition(part, text) for part in found[3].split(","))
    return Stage(first=first, last=last, conditions=conditions)


def _condition(part: str, text: str) -> Condition:
    found = _CONDITION.fullmatch(part)
    try:
        limit = float(found[3]) if found else None
    except ValueError:
        limit = None
    if found is None or limit is None:
        raise ConfigError(
            f"--stage {text!r}: {part.strip()!r} is not a condition; write one like {EXAMPLE}."
        )
    return Condition(name=found[1], sign=found[2], limit=limit)


def judge_stages(record: Record, stages: Sequence[Stage]) -> tuple[StageOutcome, ...]:
    """Judge every condition of every stage.

    Counts fail as soon as they are over their limit; levels are read when the stage is over.
    """
    last = max((line["step"] for line in record.steps), default=-1)
    outcomes = []
    for stage in stages:
        for condition in stage.conditions:
            outcomes.append(_outcome(record, stage, condition, last))
    return tuple(outcomes)


def _outcome(record: Record, stage: Stage, condition: Condition, last: int) -> StageOutcome:
    value = _value(record, stage, condition.name)
    state: State = "waiting"
    if last >= stage.last:
        state = "passed" if _holds(condition, value) else "failed"
    elif _lost_already(condition, value):
        state = "failed"
    note = _no_such_value(record, condition.name) if value is None else ""
    return StageOutcome(
        stage=str(stage), condition=str(condition), state=state, value=value, note=note
    )


def _holds(condition: Condition, value: float | None) -> bool:
    return value is not None and COMPARE[condition.sign](value, condition.limit)


def _lost_already(condition: Condition, value: float | None) -> bool:
    """Counts only grow: one that is above its upper limit stays there."""
    if value is None or condition.name not in COUNTS or condition.sign in (">", ">="):
        return False
    return value > condition.limit


def _no_such_value(record: Record, name: str) -> str:
    """Say that no step has a value of this name; nothing before the first step."""
    known: dict[str, None] = {}
    for line in record.steps:
        known.update(dict.fromkeys(_names(line)))
    if not known or name in known:
        return ""
    names = ", ".join([*known, *COUNTS, "fall"])
    return f"no step of this run has a value named {name!r}; it has {names}"


def _names(line: StepLine) -> list[str]:
    named = [*(line.get("components") or ()), *(line.get("followed") or ())]
    return [name for name in LEVELS if line.get(name) is not None] + named


COUNTS = ("incidents", "skipped")
LEVELS = ("loss", "grad_norm", "clip_factor", "scale", "lr", "seconds")
"""Numbers that a step's line may have, whatever the user names or follows."""


def _value(record: Record, stage: Stage, name: str) -> float | None:
    if name == "incidents":
        inside = [i for i in record.incidents if stage.first <= i.step <= stage.last]
        return float(len(inside))
    lines = [line for line in record.steps if stage.first <= line["step"] <= stage.last]
    if name == "skipped":
        return float(len(lines) - len(committed(lines)))
    if name == "fall":
        return _fall(lines)
    return _level(_numbers(lines, name))


def _fall(lines: Sequence[StepLine]) -> float | None:
    """How far the loss came down: its level in the stage's first tenth less that in its last."""
    losses = _numbers(lines, "loss")
    if not losses:
        return None
    tenth = max(1, len(losses) // 10)
    return median(losses[:tenth]) - median(losses[-tenth:])


def _level(numbers: Sequence[float]) -> float | None:
    """Where a stage ended: the median of its last tenth, which single spikes do not move."""
    if not numbers:
        return None
    tenth = max(1, len(numbers) // 10)
    return median(numbers[-tenth:])


def _numbers(lines: Sequence[StepLine], name: str) -> list[float]:
    found = []
    for line in committed(lines):
        parts = {**(line.get("followed") or {}), **(line.get("components") or {})}
        value = line.get(name, parts.get(name))
        # `lr` has one value for each parameter group.
        if isinstance(value, list | tuple) and value:
            value = max(value)
        if phrases.finite(value):
            found.append(float(value))
    return found
