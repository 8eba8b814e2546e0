"""Finite anomalies: suspicious when they should be, an incident only with evidence, and quiet on healthy runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from detect.runs import CONFIG, HEALTHY, PEERS, healthy, play, played, reading, slow_rise, weigh
from stepguard.detect import History, judge
from stepguard.detect.anomalies import LOST_SHARE, RUINED, ZERO_STEPS, fared_better, trend

finite = st.floats(allow_nan=False, allow_infinity=False)
SETTLED = [2.0 + 2.0 * math.exp(-i / 20) + 0.05 * math.sin(i) for i in range(100)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_run_raises_no_suspicion(kind: str, seed: int) -> None:
    spoken = [v for v in play(healthy(kind, seed)) if v.severity not in ("ok", "note")]
    assert spoken == []


@given(st.lists(finite, max_size=80))
@example([1.8e307] * 70)
@example([-1e200, 1e200] * 40)
@example([0.0, 5e-324] * 30)
@example([0.0] * 40 + [1.7e308] * 30)
def test_finite_losses_alone_are_never_an_incident_and_never_an_error(losses: list[float]) -> None:
    assert all(verdict.severity != "incident" for verdict in play(losses))


@given(st.lists(finite, min_size=1, max_size=80), finite, st.floats(min_value=0.0, allow_infinity=False))
def test_batch_that_lost_nothing_acquits_the_weights(losses: list[float], before: float, gain: float) -> None:
    history = played(losses[:-1])
    seen = reading(len(losses), losses[-1])
    assert weigh(seen, history, now=before - gain, before=before).severity != "incident" or math.isinf(before - gain)


def test_loss_that_is_mostly_zero_and_sometimes_not_is_no_constant_suspicion() -> None:
    losses = [0.0 if i % 3 else 0.5 + 0.1 * (i % 4) for i in range(300)]
    spoken = [step for step, verdict in enumerate(play(losses)) if verdict.kind != "ok"]
    assert [step for step in spoken if step >= 16] == []


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
def test_slow_rise_is_missed_by_rules_on_single_steps(rule: Callable[[Sequence[float]], list[int]], seed: int) -> None:
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


def test_spike_becomes_an_incident_when_an_earlier_batch_lost_as_much() -> None:
    history = played(SETTLED)
    verdict = weigh(reading(100, 50.0), history, now=45.0, before=2.0)
    assert verdict.bad
    assert "an earlier batch now gives 45: the weights are hurt" in verdict.summary
    assert verdict.evidence is not None and verdict.evidence["repeat_loss"] == 45.0


def test_spike_is_a_note_when_an_earlier_batch_is_as_good_as_ever() -> None:
    verdict = weigh(reading(100, 50.0), played(SETTLED), now=2.0, before=2.0)
    assert verdict.severity == "note"
    assert "an earlier batch still gives 2: the data did it" in verdict.summary


@pytest.mark.parametrize("now", [math.nan, math.inf])
def test_spike_is_an_incident_when_an_earlier_batch_is_no_longer_finite(now: float) -> None:
    assert weigh(reading(100, 50.0), played(SETTLED), now=now, before=2.0).bad


def test_second_batch_of_a_harder_task_is_not_held_against_the_weights() -> None:
    history = played([*SETTLED, 50.0])
    assert not weigh(reading(101, 52.0), history, now=50.0, before=50.0).bad


def test_hard_batch_whose_loss_was_zero_before_counts_as_lost() -> None:
    history = played([0.0] * 20)
    assert weigh(reading(20, 5.0), history, now=5.0, before=0.0).bad


def test_loss_of_less_than_half_the_progress_is_let_pass() -> None:
    history = played(SETTLED)
    assert history.best is not None
    progress = history.began_at - history.best
    little, much = (history.best + share * progress for share in (LOST_SHARE - 0.1, LOST_SHARE + 0.1))
    jump = history.level + 6.5 * history.spread
    assert weigh(reading(100, jump), history, now=little, before=history.level).severity == "note"
    assert weigh(reading(100, jump), history, now=much + 1.0, before=history.level).bad


def test_slow_rise_of_hurt_weights_becomes_an_incident() -> None:
    losses = slow_rise(0)
    history = played(losses[:-1])
    assert weigh(reading(len(losses), losses[-1]), history, now=losses[-1], before=losses[-1] - 0.5).bad


def test_slow_rise_of_harder_data_stays_a_note_also_in_an_easy_step() -> None:
    history = played(slow_rise(0))
    assert history.best is not None
    assert history.level - history.best > LOST_SHARE * (history.began_at - history.best)
    verdict = weigh(reading(260, history.level - 0.3), history, now=history.level, before=history.level)
    assert (verdict.kind, verdict.severity) == ("drift", "note")


def test_learning_rate_above_everything_before_is_noted() -> None:
    history = History(configured_lr=(0.1,))
    assert judge(reading(0, 1.0, lr=(0.2,)), history, CONFIG).kind == "ok"
    verdict = judge(reading(0, 1.0, lr=(0.21,)), history, CONFIG)
    assert (verdict.kind, verdict.severity) == ("lr_mismatch", "note")
    assert "group 0 runs with lr 0.21; the highest configured or seen before is 0.1" in verdict.summary


def test_warm_up_from_zero_is_no_mismatch() -> None:
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


def test_loss_that_stays_zero_is_noted_once() -> None:
    history, noted = History(), []
    for step in range(20):
        seen = reading(step, 0.0, grad_norm=0.0)
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


def test_another_loss_is_learned_anew() -> None:
    history = played(SETTLED)
    history.begin_anew()
    assert play([50.0, 51.0, 49.0], history)[-1].kind == "ok"
    assert history.best == 50.0


def test_objective_that_begins_at_exactly_0_with_a_gradient_may_rise_slowly() -> None:
    rising = [0.001 * i for i in range(120)]
    assert {verdict.kind for verdict in play(rising)} == {"ok"}
    assert "drift" in {verdict.kind for verdict in play([loss + 0.1 for loss in rising])}


@pytest.mark.parametrize("losses", [[7e-5, 0.024], [7e-5, 0.024, 0.03]])
def test_first_update_that_leaves_a_lucky_start_is_not_judged_by_it(losses: list[float]) -> None:
    assert [verdict.kind for verdict in play(losses)] == ["ok"] * len(losses)


def test_second_loss_of_a_run_that_explodes_is_still_suspicious() -> None:
    assert play([1.0, 5e4])[-1].severity == "suspicion"


@pytest.mark.parametrize(
    ("then", "severity"),
    [(2.1, "incident"), (25.0, "incident"), (49.0, "note"), (60.0, "note"), (math.nan, "note"), (math.inf, "note")],
)
def test_batch_that_was_easy_for_older_weights_accuses_the_present_ones(then: float, severity: str) -> None:
    history = played(SETTLED)
    acquitted = weigh(reading(100, 50.0), history, now=2.0, before=2.0)
    assert acquitted.severity == "note"
    verdict = fared_better(acquitted, history, 96, then)
    assert verdict.severity == severity
    if severity == "incident":
        assert "on the weights of step 96" in verdict.summary and "the data did it" not in verdict.summary
        assert (verdict.evidence or {})["lost_share"] >= RUINED


def test_batch_that_lost_less_than_the_run_has_gained_many_times_over_is_noise() -> None:
    history = played(SETTLED)
    acquitted = weigh(reading(100, 12.0), history, now=2.0, before=2.0)
    assert acquitted.kind == "spike"
    assert fared_better(acquitted, history, 96, 2.1) is acquitted
