"""Finite anomalies are suspicious, an incident only with evidence, and quiet on healthy runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from judge.runs import CONFIG, HEALTHY, PEERS, SETTLED, healthy, play, played, reading, slow_rise
from stepguard.judge import History, judge
from stepguard.judge.judge import ZERO_STEPS, trend
from stepguard.records import GuardConfig, Probes

finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_run_raises_no_suspicion(kind: str, seed: int) -> None:
    spoken = [v for v in play(healthy(kind, seed)) if v.severity not in ("ok", "note")]
    assert spoken == []


@pytest.mark.slow
@given(st.lists(finite, max_size=80))
@example([1.8e307] * 70)
@example([-1e200, 1e200] * 40)
@example([0.0, 5e-324] * 30)
@example([0.0] * 40 + [1.7e308] * 30)
def test_finite_losses_are_never_an_error(losses: list[float]) -> None:
    assert {verdict.kind for verdict in play(losses)} <= {"ok", "spike", "drift"}


def test_loss_that_is_mostly_zero_and_sometimes_not_is_not_a_constant_suspicion() -> None:
    losses = [0.0 if i % 3 else 0.5 + 0.1 * (i % 4) for i in range(300)]
    spoken = [step for step, verdict in enumerate(play(losses)) if verdict.kind != "ok"]
    assert [step for step in spoken if step >= 16] == []


def test_loss_that_was_zero_for_long_comes_back_without_a_spike() -> None:
    """A hinge, a solved bandit, a network just copied to its target: 0 is a floor, not a level."""
    hinge = [max(0.0, 1.0 - 0.05 * i) for i in range(120)]
    for losses in ([*hinge, 0.3], [*([0.0] * 80), 1.1e-8], [*([1.0] * 20), *([1e-13] * 80), 1e-8]):
        assert {verdict.kind for verdict in play(losses)} == {"ok"}
    assert play([*hinge, 40.0])[-1].kind == "spike"


def test_heavy_tailed_loss_is_told_a_few_times_and_an_extreme_one_always() -> None:
    noise = random.Random(0)
    losses = [1.0 + 0.1 * noise.paretovariate(1.0) for _ in range(500)]
    spoken = [step for step, verdict in enumerate(play(losses)) if verdict.kind != "ok"]
    assert len(spoken) <= 15  # the terminal prints the 1st, 2nd, 4th and 8th of them
    assert play([*losses, 1e6])[-1].kind == "spike"


def test_jump_of_the_loss_in_a_run_that_is_still_learning_is_a_spike() -> None:
    """Its own first losses, far above the present level, are no tail of it."""
    learning = [0.1 + 3.0 * 0.95**step for step in range(48)]
    assert {verdict.kind for verdict in play(learning)} == {"ok"}
    assert [verdict.kind for verdict in play([*learning, 8.0, 7.5])[-2:]] == ["spike"] * 2


def test_outlier_that_comes_once_a_pass_stays_a_spike_every_time() -> None:
    losses = [1e9 if step % 25 == 24 else SETTLED[step % 100] for step in range(200)]
    spoken = [step for step, verdict in enumerate(play(losses)) if verdict.kind == "spike"]
    assert [step for step in spoken if losses[step] == 1e9] == list(range(24, 200, 25))


def test_jump_of_the_loss_is_a_suspicion_with_its_numbers() -> None:
    verdict = play([*SETTLED, 50.0])[-1]
    assert (verdict.kind, verdict.severity) == ("spike", "suspicion")
    assert "loss 50 is" in verdict.summary and "deviations above its usual 2." in verdict.summary
    assert verdict.evidence is not None and verdict.evidence["loss"] == 50.0


def test_fall_of_the_loss_is_fine() -> None:
    assert play([*SETTLED, -50.0])[-1].kind == "ok"


def test_jump_is_found_in_negative_losses() -> None:
    assert play([*healthy("negative", 0), 3.0])[-1].kind == "spike"


def test_young_run_needs_a_larger_jump_than_a_settled_one() -> None:
    young = [2.0, 2.1, 1.9, 2.0]
    assert play([*young, 18.0])[-1].kind == "ok"
    assert play([*young, 50.0])[-1].kind == "spike"
    assert play([*SETTLED, 18.0])[-1].kind == "spike"


@pytest.mark.parametrize("seed", range(10))
def test_slow_rise_is_found_within_40_steps(seed: int) -> None:
    verdicts = play(slow_rise(seed))
    spoken = [step for step, verdict in enumerate(verdicts) if verdict.kind != "ok"]
    assert 200 < spoken[0] <= 240
    assert verdicts[spoken[0]].kind == "drift"
    assert "loss has risen by" in verdicts[spoken[0]].summary


@pytest.mark.parametrize("rule", PEERS)
@pytest.mark.parametrize("seed", range(10))
def test_slow_rise_is_missed_by_rules_on_single_steps(
    rule: Callable[[Sequence[float]], list[int]], seed: int
) -> None:
    assert rule(slow_rise(seed)) == []


@pytest.mark.parametrize("rule", PEERS)
def test_rules_on_single_steps_do_see_a_jump(rule: Callable[[Sequence[float]], list[int]]) -> None:
    losses = slow_rise(0, steps=0)
    assert rule([*losses, 60.0]) == [len(losses)]


def test_trend_of_a_straight_line_is_its_rise_without_noise() -> None:
    rise, noise = trend([1.0 + 0.5 * i for i in range(11)])
    assert rise == pytest.approx(5.0)
    assert noise == pytest.approx(0.0, abs=1e-12)


def test_trend_scales_with_the_losses_up_to_the_end_of_float64() -> None:
    values = [1.0, 1.5, 1.2, 1.7]
    rise, noise = trend(values)
    huge_rise, huge_noise = trend([1e307 * value for value in values])
    assert huge_rise / 1e307 == pytest.approx(rise)
    assert huge_noise / 1e307 == pytest.approx(noise)


# --- what is told as an incident
# --------------------------------------------------------------------------------------


def test_single_jump_of_the_loss_is_not_an_incident_however_high() -> None:
    assert play([*SETTLED, 1e30])[-1].severity == "suspicion"


def test_jump_after_an_update_that_changed_the_weights_is_an_incident() -> None:
    history = played(SETTLED)
    verdict = judge(reading(100, 50.0, update_ratio=3.2), history, CONFIG)
    assert (
        verdict.bad
        and "the last update changed the weights by 3.2 of their norm" in verdict.summary
    )
    assert not judge(reading(100, 50.0, update_ratio=0.01), history, CONFIG).bad
    assert not judge(reading(100, 8.0, update_ratio=3.2), history, CONFIG).bad


def test_loss_that_grows_many_times_twice_in_a_row_is_an_incident() -> None:
    assert play([*SETTLED, 40.0, 5000.0])[-1].bad
    assert not any(verdict.bad for verdict in play([*SETTLED, 40.0, 45.0, 50.0, 30.0]))


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


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf])
def test_impossible_learning_rate_is_an_incident_even_at_the_first_step(rate: float) -> None:
    verdict = judge(reading(0, 1.0, lr=(0.1, rate)), History(), CONFIG)
    assert (verdict.kind, verdict.severity) == ("lr_mismatch", "incident")
    assert "group 1" in verdict.summary


def test_step_without_targets_is_noted() -> None:
    assert judge(reading(0, 0.0, labels=0), History(), CONFIG).kind == "no_labels"
    assert judge(reading(0, 0.0, labels=1), History(), CONFIG).kind == "ok"


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


def test_zero_loss_with_a_gradient_is_fine() -> None:
    assert {verdict.kind for verdict in play([0.0] * 20)} == {"ok"}


def test_losses_that_were_exactly_0_say_nothing_about_what_is_much() -> None:
    assert play([0.0, 0.0, 0.003])[-1].kind == "ok"
    assert play([0.0, 0.002, 0.003, 50.0])[-1].kind == "spike"


def test_what_is_maximised_may_rise_and_must_not_fall() -> None:
    history = History()
    for step, loss in enumerate(SETTLED):
        history.add(reading(step, loss, climbs=True))
    assert judge(reading(100, 50.0, climbs=True), history, CONFIG).kind == "ok"
    assert judge(reading(100, -50.0, climbs=True), history, CONFIG).kind == "spike"


def test_objective_that_begins_at_exactly_0_with_a_gradient_may_rise_slowly() -> None:
    rising = [0.001 * i for i in range(120)]
    assert {verdict.kind for verdict in play(rising)} == {"ok"}
    assert "drift" in {verdict.kind for verdict in play([loss + 0.1 for loss in rising])}


@pytest.mark.parametrize("losses", [[7e-5, 0.024], [7e-5, 0.024, 0.03]])
def test_first_update_that_leaves_a_lucky_start_is_not_judged_by_it(losses: list[float]) -> None:
    assert [verdict.kind for verdict in play(losses)] == ["ok"] * len(losses)


def test_second_loss_of_a_run_that_explodes_is_still_suspicious() -> None:
    assert play([1.0, 5e4])[-1].severity == "suspicion"
