"""The history holds finite losses only, so nothing can blind it."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.runs import HEALTHY, healthy, play, played, reading
from stepguard.judge import History
from stepguard.judge.history import Weights

anything = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(anything, max_size=100))
def test_no_non_finite_loss_ever_enters(losses: list[float]) -> None:
    history = played(losses)
    assert (
        list(history.losses) == [loss for loss in losses if math.isfinite(loss)][-history.window :]
    )
    assert history.best is None or not math.isnan(history.best)
    assert all(math.isfinite(loss) for loss in history.first)


def test_one_nan_does_not_blind_the_history() -> None:
    losses = [2.0 + 0.1 * math.sin(i) for i in range(60)]
    history = played([*losses[:30], math.nan, *losses[30:]])
    clean = played(losses)
    assert (history.level, history.spread, history.best) == (clean.level, clean.spread, clean.best)


def test_spike_after_a_nan_is_still_found() -> None:
    losses = [2.0 + 0.1 * math.sin(i) for i in range(60)]
    assert play([*losses, math.nan, 2.0, 90.0])[-1].kind == "spike"


def test_window_forgets_the_oldest() -> None:
    history = History(window=8)
    for step in range(20):
        history.add(reading(step, float(step)))
    assert list(history.losses) == [float(i) for i in range(12, 20)]
    assert history.committed == 20


def test_level_is_the_median_of_the_last_nine() -> None:
    history = played([100.0] * 20 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    assert history.level == median(range(1, 10))


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=70))
def test_spread_is_positive_and_best_is_never_above_the_level(losses: list[float]) -> None:
    history = played(losses)
    assert history.spread > 0
    assert history.best is not None and history.best <= history.level


def test_single_outlier_hardly_moves_the_spread() -> None:
    losses = [2.0 + 0.5 * math.sin(i) for i in range(60)]
    assert played([*losses, 1e6]).spread == pytest.approx(played(losses).spread, rel=0.1)


def test_run_began_at_the_highest_of_its_first_losses() -> None:
    assert played([3.0, 4.0, 3.5, 9.0, 1.0]).began_at == 4.0


def test_ceiling_is_the_highest_rate_configured_or_seen() -> None:
    history = History(configured_lr=(0.1, 0.5))
    history.add(reading(0, 1.0, lr=(0.2, 0.3)))
    history.add(reading(1, 1.0, lr=(0.15, 0.3)))
    assert [history.ceiling(group) for group in range(3)] == [0.2, 0.5, 0.0]


def test_non_finite_rate_does_not_raise_the_ceiling() -> None:
    history = History(configured_lr=(0.1,))
    for rate in (math.nan, math.inf):
        history.add(reading(0, 1.0, lr=(rate,)))
        assert history.ceiling(0) == 0.1


def test_group_added_later_gets_its_own_ceiling() -> None:
    history = History()
    history.add(reading(0, 1.0, lr=(0.1,)))
    history.add(reading(1, 1.0, lr=(0.1, 0.7)))
    assert history.ceiling(1) == 0.7


def test_step_without_a_loss_counts_as_committed_only() -> None:
    history = History()
    history.add(reading(0, None))
    assert history.committed == 1
    assert list(history.losses) == []


# --- what counts as diverged

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


def test_run_that_explodes_at_once_began_where_it_was_before() -> None:
    assert played([12.0, 1e5, 1e20]).began_at == 12.0
    assert played([0.0, 0.4, 0.2]).began_at == 0.4


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_losses_are_not_diverged_on_ordinary_weights(kind: str) -> None:
    for seed in range(5):
        assert not played(healthy(kind, seed)).divergence(ORDINARY)


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
