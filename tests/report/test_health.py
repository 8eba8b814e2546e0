"""What `stepguard live` holds against a run, what it leaves alone, and stages to pass."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forked import FULL
from pairwise import pairwise
from report.literals import told
from stepguard import Guard, GuardConfig, Probes
from stepguard._errors import ConfigError
from stepguard.journal import RunRecord
from stepguard.records import Decision, Incident, Reading, Verdict
from stepguard.report.health import concerns, judge_run, judge_stages, parse_stage, silence
from stepguard.report.story import read_story

END = {"type": "end", "armed": True}


def journal(losses: Sequence[float], *, over: bool = True, **every: Any) -> RunRecord:
    """A run of these losses; `every` goes into each step's line."""
    record = RunRecord(path=Path("run"))
    usual = {"grad_norm": 0.5, "lr": [1e-3], "committed": True, "seconds": 0.1}
    record.steps = [{"step": n, "loss": loss, **usual, **every} for n, loss in enumerate(losses)]
    record.notes = [END] if over else []
    return record


def verdict(record: RunRecord) -> str:
    return judge_run(told(record), (), None)


def said(record: RunRecord) -> str:
    return "; ".join(concern.text for concern in concerns(told(record)))


def learning(steps: int, seed: int = 0, start: float = 2.3, floor: float = 0.3) -> list[float]:
    draw = random.Random(seed)
    return [
        (floor + (start - floor) * math.exp(-5 * n / steps)) * draw.lognormvariate(0, 0.15)
        for n in range(steps)
    ]


def policy_gradient(steps: int, seed: int) -> list[float]:
    """REINFORCE: around 0, of both signs, with rare large values."""
    draw = random.Random(seed)
    return [
        draw.gauss(0, 1) * (1 + 3 * n / steps) * (20 if draw.random() < 0.02 else 1)
        for n in range(steps)
    ]


def q_learning(steps: int, seed: int) -> list[float]:
    """The loss rises with the values that are learned, and jumps with each new target network."""
    draw = random.Random(seed)
    return [
        0.02 + 4 * n / steps * draw.lognormvariate(0, 0.6) * (3 if n % 100 < 5 else 1)
        for n in range(steps)
    ]


def generator(steps: int, seed: int) -> list[float]:
    """A GAN's generator against its opponent."""
    draw = random.Random(seed)
    phase = draw.random() * 6
    return [1.2 + 0.8 * math.sin(phase + n / 25) + 0.3 * draw.gauss(0, 1) for n in range(steps)]


def critic(steps: int, seed: int) -> list[float]:
    """A Wasserstein critic: negative, down and slowly up again."""
    draw = random.Random(seed)
    return [
        -8 * math.exp(-n / steps) + 0.8 * draw.gauss(0, 1) + math.sin(n / 40) for n in range(steps)
    ]


def actor(steps: int, seed: int) -> list[float]:
    """The loss of an actor is minus a growing return."""
    draw = random.Random(seed)
    return [-100 * n / steps + 10 * draw.gauss(0, 1) for n in range(steps)]


def restarts(steps: int, seed: int) -> list[float]:
    """Warm restarts of the learning rate."""
    draw = random.Random(seed)
    return [
        loss + (0.3 if n % 50 < 8 else 0) + 0.05 * draw.gauss(0, 1)
        for n, loss in enumerate(learning(steps, seed))
    ]


def converged(steps: int, seed: int) -> list[float]:
    """Fine-tuning of what is learned already: next to nothing, with hard batches."""
    draw = random.Random(seed)
    return [1e-3 * draw.lognormvariate(0, 2.0) for _ in range(steps)]


HEALTHY: dict[str, Callable[[int, int], list[float]]] = {
    "classifier": learning,
    "policy gradient": policy_gradient,
    "q-learning": q_learning,
    "generator": generator,
    "critic": critic,
    "actor": actor,
    "restarts": restarts,
    "converged": converged,
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), pairwise(product(HEALTHY, [12, 60, 300, 1200])))
def test_healthy_runs_stay_healthy_whatever_their_loss_looks_like(kind: str, steps: int) -> None:
    for seed in range(20 if FULL else 3):
        record = journal(HEALTHY[kind](steps, seed))
        assert verdict(record) == "healthy", (seed, said(record))


def exploding(steps: int) -> list[float]:
    return [2.3 * 1.7**n for n in range(steps)]


def gone_again(steps: int) -> list[float]:
    half = learning(steps * 3 // 4)
    return half + [2.0 + 0.1 * math.sin(n) for n in range(steps - len(half))]


@pytest.mark.parametrize("steps", [20, 60, 300])
def test_run_whose_loss_has_run_away_is_never_healthy(steps: int) -> None:
    for losses in (exploding(steps), [0.54, *[2.7e7] * steps], learning(steps) + [2.9e13] * 20):
        record = journal(losses)
        assert verdict(record) == "unhealthy" and "run away" in said(record)


@pytest.mark.parametrize("steps", [60, 300, 1200])
def test_half_of_what_was_learned_gone_again_asks_for_attention(steps: int) -> None:
    record = journal(gone_again(steps))
    assert verdict(record) == "attention" and "what was learned is lost again" in said(record)


def test_run_without_a_step_is_not_healthy() -> None:
    assert verdict(journal([])) == "unhealthy"
    assert verdict(journal([], over=False)) == "waiting"


def test_disarmed_guard_asks_for_attention() -> None:
    record = journal(learning(60))
    record.notes = [{"type": "fault", "step": 12, "error": "OSError: no space"}, END]
    assert verdict(record) == "attention" and "since step 12: OSError" in said(record)
    record.notes = [{"type": "end", "armed": False}]
    assert verdict(record) == "attention"


def test_run_that_ended_with_an_exception_is_unhealthy() -> None:
    record = journal(learning(20))
    raised = Verdict(
        kind="nonfinite_loss", severity="incident", summary="IndexError: index 7 is out of bounds"
    )
    object.__setattr__(raised, "kind", "exception")
    record.incidents = [Incident(id="20", step=20, verdict=raised, reading=Reading(step=20))]
    assert verdict(record) == "unhealthy" and "IndexError" in said(record)
    for error, expected in (
        ("OSError: no such shard", "unhealthy"),
        ("KeyboardInterrupt", "healthy"),
    ):
        record = journal(learning(60))
        record.notes = [{**END, "error": error}]
        assert verdict(record) == expected
    record = journal([*learning(60), *[math.nan] * 8])
    assert verdict(record) == "unhealthy" and "not finite" in said(record)


def test_scaler_that_looks_for_its_scale_is_healthy() -> None:
    record = journal(learning(9))
    for line in record.steps[:6]:
        line.update(committed=False, scale=65536.0)
    assert verdict(record) == "healthy"
    never = journal([1.0] * 60, committed=False, scale=65536.0)
    assert verdict(never) == "unhealthy"


def test_silence_is_long_only_beside_what_the_run_is_used_to() -> None:
    running = journal(learning(60), over=False)
    assert silence(told(running), 59) is None
    concern = silence(told(running), 3600)
    assert concern is not None and "3,600 s" in concern.text and "0.1 s" in concern.text
    running.steps[30]["seconds"] = 1200.0  # an evaluation
    assert silence(told(running), 3600) is None
    assert silence(told(journal(learning(60))), 1e9) is None


def test_run_that_goes_on_is_judged_only_to_its_disadvantage() -> None:
    bad, good = journal(exploding(60), over=False), journal(learning(60), over=False)
    assert judge_run(told(bad), (), None) == "waiting"
    assert judge_run(told(bad), (), None, now=True) == "unhealthy"
    assert judge_run(told(good), (), None, now=True) == "waiting"


def test_run_that_was_started_again_after_a_stop_is_not_stopped() -> None:
    record = journal(learning(60))
    stop = Incident(
        id="9", step=9, verdict=Verdict(kind="spike", severity="incident"), reading=Reading(step=9)
    )
    record.incidents = [replace(stop, decision=Decision(action="stop"))]
    assert verdict(record) == "healthy"
    record.steps = record.steps[:10]
    assert verdict(record) == "stopped"


@pytest.mark.parametrize(
    ("values", "exploded"),
    [
        ([0.0] * 10 + [0.5, 3.0, 80.0] * 10, False),
        ([2.7 + n % 5 for n in range(40)], False),
        ([float(10 ** (n // 4)) for n in range(40)], False),
        ([2.7] * 20 + [1e9] + [2.7] * 20, True),
        ([2.7] * 20 + [-4e8], True),
    ],
)
def test_a_followed_value_that_explodes_is_reported(values: list[float], exploded: bool) -> None:
    record = journal([1.0] * len(values))
    for line, value in zip(record.steps, values, strict=True):
        line["followed"] = {"w(t)": value}
    text = said(record)
    assert ("w(t) exploded" in text) is exploded
    if exploded:
        assert "at step 20, at most 2.7 before" in text


@pytest.mark.parametrize(("grows", "expected"), [(1.0, False), (1.5, True)])
def test_weights_that_explode_behind_a_norm_are_reported(
    tmp_path: Path, grows: float, expected: bool
) -> None:
    """Their loss stays as it is, because the norm divides their size out again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=5), terminal="quiet")
    with Guard(model, optimizer, config=settings) as guard:
        for _ in range(41):
            guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
            with torch.no_grad():
                model[0].weight.mul_(grows)
    text = "; ".join(concern.text for concern in concerns(read_story(tmp_path).latest))
    assert ("weights exploded: the root mean square of 0.weight" in text) is expected
    assert not guard.incidents


def _record(steps: int, *, skipped: tuple[int, ...] = (), over: bool = False) -> RunRecord:
    record = RunRecord(path=Path("run"))
    record.steps = [
        {"step": n, "loss": 10.0 - n / 10, "committed": n not in skipped, "lr": [1e-4, 2e-4]}
        for n in range(steps)
    ]
    record.incidents = [
        Incident(
            id=f"{n}",
            step=n,
            verdict=Verdict(kind="spike", severity="incident"),
            reading=Reading(step=n),
        )
        for n in skipped
    ]
    record.notes = [{"type": "end"}] if over else []
    return record


def _states(record: RunRecord, *stages: str) -> list[str]:
    return [
        outcome.state for outcome in judge_stages(told(record), [parse_stage(s) for s in stages])
    ]


def test_a_stage_waits_until_its_last_step_has_come() -> None:
    assert _states(_record(49), "0-49: loss<6") == ["waiting"]
    assert _states(_record(50), "0-49: loss<6") == ["passed"]
    assert _states(_record(50), "0-49: loss<5, accuracy>0.5") == ["failed", "failed"]


def test_too_many_incidents_fail_a_stage_before_it_is_over() -> None:
    assert _states(_record(10, skipped=(3,)), "0-49: incidents=0, skipped<=1") == [
        "failed",
        "waiting",
    ]


def test_the_fall_of_the_loss_and_the_largest_learning_rate_can_be_asked() -> None:
    assert _states(_record(50), "0-49: fall>4, fall>5, lr<=2e-4, lr<2e-4") == [
        "passed",
        "failed",
        "passed",
        "failed",
    ]


@pytest.mark.parametrize(
    "text", ["", "5: loss<1", "9-3: loss<1", "0-9: loss", "0-9: loss<x", "0-9: loss!1"]
)
def test_a_stage_that_cannot_be_read_is_named_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--stage"):
        parse_stage(text)


def test_a_run_is_healthy_once_the_wanted_steps_are_there() -> None:
    assert judge_run(told(_record(9)), (), 10) == "waiting"
    assert judge_run(told(_record(10)), (), 10) == "healthy"
    assert judge_run(told(_record(9, over=True)), (), 10) == "healthy"
    outcomes = judge_stages(told(_record(9, over=True)), [parse_stage("0-49: loss<100")])
    assert judge_run(told(_record(9, over=True)), outcomes, None) == "unhealthy"
    assert judge_run(told(_record(20, skipped=tuple(range(5, 20)))), (), 20) == "unhealthy"


def test_what_the_guard_found_wrong_in_healthy_steps_asks_for_attention_once() -> None:
    """Journal lines of silent failures carry a code; forecasts may not come true."""
    record = journal(learning(60))
    note = {"type": "note", "kind": "silent", "step": 12, "code": "SG912"}
    record.notes = [{**note, "summary": "SG912 a learning rate that is 0"}, {**note, "step": 24}]
    record.notes += [{**note, "code": "SG951", "summary": "the loss will end"}, END]
    assert verdict(record) == "attention"
    assert said(record) == "step 12: SG912 a learning rate that is 0"
