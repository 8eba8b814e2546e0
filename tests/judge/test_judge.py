"""The gravest thing that can be said about a step, and what counts as an anomaly."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forked import FULL
from judge.runs import CONFIG, HEALTHY, SETTLED, healthy, play, played, reading, slow_rise
from stepguard.judge import History, judge
from stepguard.judge.history import Weights
from stepguard.judge.judge import LASTING, ZERO_STEPS, Comparison, alarming, blame_weights
from stepguard.records import GuardConfig, Probes, Reading, Verdict

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
    "no targets": ({"loss": 0.0, "labels": 0}, "no_labels", "note"),
    "one target": ({"loss": 0.0, "labels": 1}, "ok", "ok"),
    "infinite rate": ({"lr": (0.1, INF)}, "lr_mismatch", "incident"),
    "negative infinite rate": ({"lr": (0.1, -INF)}, "lr_mismatch", "incident"),
    "nan rate": ({"lr": (0.1, NAN)}, "lr_mismatch", "incident"),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict_of(name: str) -> None:
    fields, kind, severity = CASES[name]
    verdict = judge(reading(0, **fields), History(), CONFIG)
    assert (verdict.kind, verdict.severity) == (kind, severity)
    assert bool(verdict.summary) == (kind != "ok")
    if kind == "lr_mismatch":
        assert "group 1" in verdict.summary
    if "lr" not in fields and "labels" not in fields:
        assert alarming(reading(0, **fields)) == (kind != "ok")


def test_bad_state_outweighs_the_loss_it_causes() -> None:
    both = reading(0, NAN, bad_state=("param:w", "param:b"), grads_finite=False)
    verdict = judge(both, History(), CONFIG)
    assert verdict.kind == "nonfinite_parameter"
    assert verdict.summary == "param:w and 1 more was non-finite before this step"
    verdict = judge(reading(0, 1.0, bad_state=("param:w",), state_born=True), History(), CONFIG)
    assert verdict.summary == "param:w became non-finite in this step"


def test_bad_micro_batch_and_loss_component_are_named() -> None:
    seen = Reading(
        step=0, loss=NAN, micro_losses=(1.0, NAN, 2.0), components={"ce": 1.0, "kl": NAN}
    )
    assert judge(seen, History(), CONFIG).summary == "loss is nan (kl) in micro-batch 2 of 3"
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
def test_nothing_non_finite_is_waved_through_and_nothing_is_an_error(
    seen: Reading, losses: list[float]
) -> None:
    history = played(losses)
    verdict = judge(seen, history, CONFIG)
    assert judge(seen, history, CONFIG).kind == verdict.kind
    assert bool(verdict.summary) == (verdict.kind != "ok")
    bad_loss = seen.loss is not None and not math.isfinite(seen.loss)
    if bad_loss or seen.bad_state or (not seen.grads_finite and not seen.overflow):
        assert judge(seen, History(), CONFIG).bad


# --- finite anomalies


HINGE = [max(0.0, 1.0 - 0.05 * i) for i in range(120)]
LEARNING = [0.1 + 3.0 * 0.95**step for step in range(48)]
YOUNG = [2.0, 2.1, 1.9, 2.0]


@pytest.mark.parametrize(
    ("before", "last", "kind"),
    [
        (SETTLED, -50.0, "ok"),
        (SETTLED, 18.0, "spike"),
        (SETTLED, 1e30, "spike"),
        ([*SETTLED, NAN, 2.0], 90.0, "spike"),
        (healthy("negative", 0), 3.0, "spike"),
        # a young run needs a larger jump
        (YOUNG, 18.0, "ok"),
        (YOUNG, 50.0, "spike"),
        ([1.0], 5e4, "spike"),
        # its own first losses, far above the present level, are no tail of a run that learns
        (LEARNING[:-1], LEARNING[-1], "ok"),
        (LEARNING, 8.0, "spike"),
        ([*LEARNING, 8.0], 7.5, "spike"),
        # a hinge, a solved bandit, a network just copied to its target: 0 is a floor, not a level
        (HINGE, 0.3, "ok"),
        (HINGE, 40.0, "spike"),
        ([0.0] * 80, 1.1e-8, "ok"),
        ([*([1.0] * 20), *([1e-13] * 80)], 1e-8, "ok"),
        ([0.0] * 20, 0.0, "ok"),
        ([0.0, 0.0], 0.003, "ok"),
        ([0.0, 0.002, 0.003], 50.0, "spike"),
        # a lucky start is no measure of what comes after the first update
        ([7e-5], 0.024, "ok"),
        ([7e-5, 0.024], 0.03, "ok"),
        # an objective that begins at exactly 0 may rise slowly
        ([0.001 * i for i in range(120)], 0.12, "ok"),
        ([0.1 + 0.001 * i for i in range(120)], 0.22, "drift"),
    ],
)
def test_jump_of_the_loss_is_a_suspicion_where_it_is_unusual(
    before: list[float], last: float, kind: str
) -> None:
    *earlier, verdict = play([*before, last])
    assert verdict.kind == kind
    assert verdict.severity == ("ok" if kind == "ok" else "suspicion")
    assert {"spike"}.isdisjoint(v.kind for v in earlier[:-1])
    if kind == "ok":
        assert {v.kind for v in earlier} == {"ok"}


def test_jump_of_the_loss_is_a_suspicion_with_its_numbers() -> None:
    verdict = play([*SETTLED, 50.0])[-1]
    assert (verdict.kind, verdict.severity) == ("spike", "suspicion")
    assert "loss 50 is" in verdict.summary and "deviations above its usual 2." in verdict.summary
    assert verdict.evidence is not None and verdict.evidence["loss"] == 50.0


def test_loss_that_grows_many_times_twice_in_a_row_is_an_incident() -> None:
    assert play([*SETTLED, 40.0, 5000.0])[-1].bad
    assert not any(verdict.bad for verdict in play([*SETTLED, 40.0, 45.0, 50.0, 30.0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_run_raises_no_suspicion(kind: str) -> None:
    for seed in range(10 if FULL else 2):
        losses = healthy(kind, seed)
        assert [v for v in play(losses) if v.severity not in ("ok", "note")] == []
        assert not played(losses).divergence(ORDINARY)


def test_loss_that_is_mostly_zero_and_sometimes_not_is_not_a_constant_suspicion() -> None:
    losses = [0.0 if i % 3 else 0.5 + 0.1 * (i % 4) for i in range(300)]
    assert {verdict.kind for verdict in play(losses)[16:]} == {"ok"}


finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.slow
@given(st.lists(finite, max_size=80))
@example([1.8e307] * 70)
@example([-1e200, 1e200] * 40)
@example([0.0, 5e-324] * 30)
@example([0.0] * 40 + [1.7e308] * 30)
def test_finite_losses_are_never_an_error(losses: list[float]) -> None:
    assert {verdict.kind for verdict in play(losses)} <= {"ok", "spike", "drift"}


def test_heavy_tailed_loss_is_told_a_few_times_and_an_extreme_one_always() -> None:
    noise = random.Random(0)
    losses = [1.0 + 0.1 * noise.paretovariate(1.0) for _ in range(500)]
    spoken = [step for step, verdict in enumerate(play(losses)) if verdict.kind != "ok"]
    assert len(spoken) <= 15  # the terminal prints the 1st, 2nd, 4th and 8th of them
    assert play([*losses, 1e6])[-1].kind == "spike"


def test_outlier_that_comes_once_a_pass_stays_a_spike_every_time() -> None:
    losses = [1e9 if step % 25 == 24 else SETTLED[step % 100] for step in range(200)]
    spoken = [step for step, verdict in enumerate(play(losses)) if verdict.kind == "spike"]
    assert [step for step in spoken if losses[step] == 1e9] == list(range(24, 200, 25))


@pytest.mark.parametrize("seed", range(10 if FULL else 3))
def test_slow_rise_is_found_within_40_steps(seed: int) -> None:
    verdicts = play(slow_rise(seed))
    spoken = [step for step, verdict in enumerate(verdicts) if verdict.kind != "ok"]
    assert 200 < spoken[0] <= 240
    assert verdicts[spoken[0]].kind == "drift"
    assert "loss has risen by" in verdicts[spoken[0]].summary


def test_jump_after_an_update_that_changed_the_weights_is_an_incident() -> None:
    history = played(SETTLED)
    verdict = judge(reading(100, 50.0, update_ratio=3.2), history, CONFIG)
    assert (
        verdict.bad
        and "the last update changed the weights by 3.2 of their norm" in verdict.summary
    )
    assert not judge(reading(100, 50.0, update_ratio=0.01), history, CONFIG).bad
    assert not judge(reading(100, 8.0, update_ratio=3.2), history, CONFIG).bad


def test_run_that_has_diverged_slowly_is_an_incident_with_weights_that_left_where_they_were() -> (
    None
):
    history = played([*SETTLED, *[4.0 * 1.2**i for i in range(64)]])
    assert judge(reading(164, 6e5), history, CONFIG).severity == "suspicion"
    verdict = judge(reading(164, 6e5, weights_moved=7.0), history, CONFIG)
    assert verdict.bad and "its weights have moved by 7 of their norm" in verdict.summary


def test_anomalies_off_judges_no_loss() -> None:
    history, config = played(SETTLED), GuardConfig(probes=Probes(anomalies="off"))
    assert judge(reading(100, 1e9), history, config).kind == "ok"


def test_spikes_off_leaves_the_slow_rise() -> None:
    history, config = played(slow_rise(0)), GuardConfig(probes=Probes(spike_sigmas=None))
    assert judge(reading(260, history.level), history, config).kind == "drift"
    assert judge(reading(100, 1e9), played(SETTLED), config).kind != "spike"


def test_learning_rate_above_everything_before_is_noted() -> None:
    history = History(configured_lr=(0.1,))
    assert judge(reading(0, 1.0, lr=(0.2,)), history, CONFIG).kind == "ok"
    verdict = judge(reading(0, 1.0, lr=(0.21,)), history, CONFIG)
    assert (verdict.kind, verdict.severity) == ("lr_mismatch", "note")
    assert (
        "group 0 runs with lr 0.21; the highest configured or seen before is 0.1" in verdict.summary
    )


def test_warm_up_from_zero_is_not_a_mismatch() -> None:
    history = History()
    for step in range(100):
        seen = reading(step, 1.0, lr=(0.1 * min(step, 50) / 50,))
        assert judge(seen, history, CONFIG).kind == "ok"
        history.add(seen)


@pytest.mark.parametrize("every", [1000, 9])
def test_loss_that_stays_zero_is_noted_once(every: int) -> None:
    """Also where it comes again and again, as in a solved task."""
    history, noted = History(), []
    for step in range(60):
        alive = 0.5 if step % every == every - 1 else 0.0
        seen = reading(step, alive, grad_norm=alive)
        if judge(seen, history, CONFIG).kind == "zero_loss":
            noted.append(step)
        history.add(seen)
    assert noted == [ZERO_STEPS - 1]


def test_what_is_maximised_may_rise_and_must_not_fall() -> None:
    history = History()
    for step, loss in enumerate(SETTLED):
        history.add(reading(step, loss, climbs=True))
    assert judge(reading(100, 50.0, climbs=True), history, CONFIG).kind == "ok"
    assert judge(reading(100, -50.0, climbs=True), history, CONFIG).kind == "spike"


# --- what a run has been like


anything = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(anything, max_size=100))
def test_no_non_finite_loss_ever_enters(losses: list[float]) -> None:
    history = played(losses)
    assert (
        list(history.losses) == [loss for loss in losses if math.isfinite(loss)][-history.window :]
    )
    assert history.best is None or not math.isnan(history.best)
    assert all(math.isfinite(loss) for loss in history.first)
    assert not history.losses or history.spread > 0


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=70))
def test_spread_is_positive_and_best_is_never_above_the_level(losses: list[float]) -> None:
    history = played(losses)
    assert history.spread > 0
    assert history.best is not None and history.best <= history.level


def test_one_nan_does_not_blind_the_history() -> None:
    history, clean = played([*SETTLED[:30], NAN, *SETTLED[30:]]), played(SETTLED)
    assert (history.level, history.spread, history.best) == (clean.level, clean.spread, clean.best)


def test_ceiling_is_the_highest_rate_configured_or_seen() -> None:
    history = History(configured_lr=(0.1, 0.5))
    history.add(reading(0, 1.0, lr=(0.2, 0.3)))
    history.add(reading(1, 1.0, lr=(0.15, 0.3)))
    assert [history.ceiling(group) for group in range(3)] == [0.2, 0.5, 0.0]
    history = History(configured_lr=(0.1,))
    for rate in (NAN, INF):
        history.add(reading(0, 1.0, lr=(rate,)))
        assert history.ceiling(0) == 0.1


LEARNT = [3.0 * 0.9**step + 0.1 for step in range(40)]
ORDINARY = Weights(moved=0.01, update=1e-3, growth=1.1)
FAR_AWAY = Weights(moved=2.0, update=0.4, growth=8.0)


@pytest.mark.parametrize(
    "losses",
    [
        [12.0, 1e5, 1e20],
        [12.0, 500.0, 1800.0, 600.0, 800.0],
        [*LEARNT, *[2.9] * 9],
        [*LEARNT, *[4e3] * 9],
    ],
    ids=["explodes at once", "rises at once", "lost what it learned", "far above its start"],
)
def test_high_loss_counts_as_diverged_on_weights_that_have_left_their_place(
    losses: list[float],
) -> None:
    history = played(losses)
    assert history.divergence(FAR_AWAY)
    assert not history.divergence(ORDINARY)
    assert not played(losses[:1]).divergence(FAR_AWAY)


def test_slow_rise_is_no_divergence_however_the_weights_have_grown() -> None:
    assert not played([0.02 + 0.01 * step for step in range(600)]).divergence(
        Weights(moved=0.9, growth=8.0)
    )


def test_exploded_weights_count_only_where_the_loss_shows_no_progress() -> None:
    exploded = Weights(growth=1e3)
    assert played([2.0] * 20).divergence(exploded)
    assert not played([1e12 * 0.9**step for step in range(40)]).divergence(exploded)
    assert not History().divergence(exploded)
    assert History().divergence(Weights(growth=1e12))


def test_diverged_run_counts_as_back_once_its_level_is() -> None:
    history = played([*LEARNT, *[2.9] * 9])
    assert history.diverged_at is not None
    play([0.2] * 9, history)
    assert history.diverged_at is None


# --- whether the weights are to blame


HIGH = Verdict(kind="spike", severity="suspicion", summary="high", evidence={"loss": 50.0})
PROOF = Comparison(step=96, then=2.0, again=2.0, now=48.0, this_then=2.1)


def _blamed(compared: Comparison | None = PROOF, **given: Any) -> Verdict:
    settings = {"lasting": LASTING, **given}
    return blame_weights(HIGH, reading(100, 50.0), played(SETTLED), compared=compared, **settings)


def test_independent_signs_together_blame_the_weights() -> None:
    verdict = _blamed()
    assert verdict.bad
    assert (
        "an earlier batch gives 48 and gave 2, and on the weights of step 96 this batch gives 2.1"
        in verdict.summary
    )
    assert _blamed(replace(PROOF, now=NAN)).bad and _blamed(replace(PROOF, now=INF)).bad
    # without a replay, weights that left where they were good are blamed
    assert _blamed(None, moved=2.5).bad


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"now": 2.1}, "an earlier batch gives 2.1 and gave 2: not the weights"),
        ({"again": 40.0}, "the loss function changed"),
        ({"this_then": 49.0}, "this batch is as hard for earlier weights"),
    ],
)
def test_one_missing_sign_leaves_the_run_alone(changed: dict[str, float], why: str) -> None:
    verdict = _blamed(replace(PROOF, **changed))  # type: ignore[arg-type]
    assert verdict.severity == "note" and why in verdict.summary


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"lasting": LASTING - 1}, "it has lasted 2 of 3 steps"),
        ({}, "nothing is known of earlier weights"),
        ({"moved": 0.01}, "the weights have moved by 0.01 of their norm"),
    ],
)
def test_without_a_comparison_the_run_is_left_alone(given: dict[str, Any], why: str) -> None:
    verdict = _blamed(None, **given)
    assert verdict.severity == "note" and why in verdict.summary


def test_level_the_run_had_left_long_ago_must_be_reached_again() -> None:
    history = played(SETTLED)
    verdict = blame_weights(HIGH, reading(100, history.level + 0.5), history, LASTING, PROOF)
    assert "not lost" in verdict.summary
