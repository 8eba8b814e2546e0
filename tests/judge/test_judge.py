"""The gravest thing that can be said about a step, from literals."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.runs import CONFIG, played, reading
from stepguard.judge import History, judge
from stepguard.judge.judge import alarming
from stepguard.records import GuardConfig, Reading

NAN, INF = math.nan, math.inf
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "fine": ({}, "ok", "ok"),
    "no loss seen": ({"loss": None}, "ok", "ok"),
    "nan loss": ({"loss": NAN}, "nonfinite_loss", "incident"),
    "infinite loss": ({"loss": INF}, "nonfinite_loss", "incident"),
    "bad batch": ({"loss": NAN, "bad_inputs": ("batch:x",)}, "nonfinite_input", "incident"),
    "bad batch, fine loss": ({"bad_inputs": ("batch:x",)}, "ok", "ok"),
    "bad gradient": (
        {"grads_finite": False, "bad_grads": ("fc.weight",)},
        "nonfinite_gradient",
        "incident",
    ),
    "loss too large for its dtype": (
        {"loss": INF, "micro_losses": (INF,), "loss_overflow": True},
        "loss_overflow",
        "note",
    ),
    "infinite norm": ({"grad_norm": INF}, "infinite_norm", "incident"),
    "nan norm": ({"grad_norm": NAN}, "infinite_norm", "incident"),
    "bad parameter": ({"bad_state": ("param:w",)}, "nonfinite_parameter", "incident"),
    "bad buffer": ({"bad_state": ("buffer:bn.running_var",)}, "nonfinite_buffer", "incident"),
    "bad slot": ({"bad_state": ("opt:exp_avg",)}, "nonfinite_optimizer_state", "incident"),
    "scaler warm-up": (
        {"grads_finite": False, "overflow": True, "scale": 65536.0},
        "scale_calibration",
        "note",
    ),
    "scaler at its end": (
        {"grads_finite": False, "overflow": True, "scale": 0.5},
        "scaler_collapse",
        "incident",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict_of(name: str) -> None:
    fields, kind, severity = CASES[name]
    verdict = judge(reading(0, **fields), History(), CONFIG)
    assert (verdict.kind, verdict.severity) == (kind, severity)
    assert bool(verdict.summary) == (kind != "ok")


@pytest.mark.parametrize("name", CASES)
def test_everything_non_finite_asks_for_a_closer_look(name: str) -> None:
    fields, kind, _ = CASES[name]
    assert alarming(reading(0, **fields)) == (kind != "ok")


def test_bad_state_outweighs_the_loss_it_causes() -> None:
    both = reading(0, NAN, bad_state=("param:w", "param:b"), grads_finite=False)
    verdict = judge(both, History(), CONFIG)
    assert verdict.kind == "nonfinite_parameter"
    assert verdict.summary == "param:w and 1 more was non-finite before this step"


def test_state_that_the_update_made_bad_is_said_so() -> None:
    verdict = judge(reading(0, 1.0, bad_state=("param:w",), state_born=True), History(), CONFIG)
    assert verdict.summary == "param:w became non-finite in this step"


def test_bad_micro_batch_and_loss_component_are_named() -> None:
    seen = Reading(
        step=0, loss=NAN, micro_losses=(1.0, NAN, 2.0), components={"ce": 1.0, "kl": NAN}
    )
    assert judge(seen, History(), CONFIG).summary == "loss is nan (kl) in micro-batch 2 of 3"


def test_infinite_loss_is_spelled_differently_from_nan() -> None:
    assert judge(reading(0, -INF), History(), CONFIG).summary == "loss is infinite"


def test_gradient_verdict_names_three_parameters_and_counts_the_rest() -> None:
    names = tuple(f"layer{i}.weight" for i in range(5))
    verdict = judge(reading(0, 1.5, grads_finite=False, bad_grads=names), History(), CONFIG)
    assert "layer0.weight, layer1.weight, layer2.weight and 2 more" in verdict.summary
    assert "while the loss is 1.5" in verdict.summary


def test_overflow_of_a_static_scale_is_an_incident_with_the_scale() -> None:
    config = GuardConfig(loss_scale=1024.0)
    verdict = judge(
        reading(0, 1.0, grads_finite=False, overflow=True, scale=1024.0), History(), config
    )
    assert verdict.bad
    assert verdict.evidence == {"scale": 1024.0}


loss = st.none() | st.floats() | st.sampled_from([NAN, INF, -INF])
maybe = st.none() | st.floats()
readings = st.builds(
    Reading,
    step=st.integers(0, 10**9),
    loss=loss,
    micro_losses=st.lists(st.floats(), max_size=3).map(tuple),
    components=st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
    grad_norm=maybe,
    grads_finite=st.booleans(),
    scale=maybe,
    lr=st.lists(st.floats(), max_size=2).map(tuple),
    labels=st.none() | st.integers(0, 3),
    bad_state=st.lists(st.sampled_from(["param:w", "buffer:b", "opt:exp_avg"]), max_size=2).map(
        tuple
    ),
    bad_inputs=st.lists(st.just("batch:x"), max_size=1).map(tuple),
    overflow=st.booleans(),
    repeat_loss=maybe,
    repeat_before=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


@pytest.mark.slow
@given(readings, st.lists(st.floats(), max_size=40))
def test_judge_never_raises_and_repeats_itself(seen: Reading, losses: list[float]) -> None:
    history = played(losses)
    verdict = judge(seen, history, CONFIG)
    assert judge(seen, history, CONFIG).kind == verdict.kind
    assert bool(verdict.summary) == (verdict.kind != "ok")


@given(readings)
def test_non_finite_loss_or_gradient_is_never_waved_through(seen: Reading) -> None:
    verdict = judge(seen, History(), CONFIG)
    bad_loss = seen.loss is not None and not math.isfinite(seen.loss)
    if bad_loss or seen.bad_state or (not seen.grads_finite and not seen.overflow):
        assert verdict.bad
