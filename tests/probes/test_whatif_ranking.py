"""What works comes first, then what ends lower, then what changes training less."""

from __future__ import annotations

from typing import Any

from stepguard.probes.whatif import ranked
from stepguard.records.probes import TrialOutcome, WhatIf

CALM = (1.0, 1.01, 1.0, 0.99)


def outcome(name: str, cost: int, **fields: Any) -> TrialOutcome:
    return TrialOutcome(name=name, label=name, cost=cost, **fields)


def names(outcomes: list[TrialOutcome]) -> list[str]:
    return [one.name for one in outcomes]


def test_what_fails_comes_last_and_the_one_that_got_furthest_before_the_others() -> None:
    short = outcome("short", 0, losses=(1.0,))
    far = outcome("far", 9, losses=(1.0, 1.0))
    untried = outcome("untried", 1, why_not="ValueError: no")
    works = outcome("works", 8, works=True, loss=5.0)
    assert names(ranked([short, untried, far, works], CALM)) == ["works", "far", "short", "untried"]


def test_of_equal_losses_the_cheaper_candidate_wins() -> None:
    dear = outcome("dear", 8, works=True, loss=1.000)
    cheap = outcome("cheap", 2, works=True, loss=1.015)
    assert names(ranked([dear, cheap], CALM)) == ["cheap", "dear"]


def test_a_loss_that_is_clearly_lower_wins_over_the_cost() -> None:
    dear = outcome("dear", 8, works=True, loss=1.0)
    cheap = outcome("cheap", 2, works=True, loss=1.5)
    assert names(ranked([cheap, dear], CALM)) == ["dear", "cheap"]


def test_batches_that_differ_much_make_losses_equal() -> None:
    dear = outcome("dear", 8, works=True, loss=1.0)
    cheap = outcome("cheap", 2, works=True, loss=1.5)
    assert names(ranked([cheap, dear], (1.0, 4.0, 1.0, 4.0))) == ["cheap", "dear"]


def test_batches_that_were_not_trained_on_count_more() -> None:
    fitted = outcome("fitted", 8, works=True, loss=0.1, held_out=9.0)
    plain = outcome("plain", 9, works=True, loss=1.0, held_out=1.0)
    assert names(ranked([fitted, plain], CALM)) == ["plain", "fitted"]


def test_best_is_the_first_one_only_if_it_works() -> None:
    failing = outcome("nothing", 0)
    assert WhatIf(incident="i", step=1, outcomes=(failing,)).best is None
    working = outcome("skip", 2, works=True, steps=3)
    found = WhatIf(incident="i", step=1, outcomes=(working, failing))
    assert found.best is working
    assert found.steps == 3
