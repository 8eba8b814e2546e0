"""Rule SG505: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    CALM,
    DIVERGED,
    HUGE,
    INF,
    NAN,
    Bad,
    at_second,
    backward,
    codes,
    found,
    huge_in_bfloat16,
    number,
    origin,
    out,
    tensor,
)
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence

RISING = RunFacts(losses=(1.0, 3.0, 40.0, 9e5), lr_history=((0.1,),) * 4)

UNFROZEN = RunFacts(losses=(1.0, 1.1, 40.0), lr_history=((0.05, 0.0), (0.05, 0.0), (0.05, 0.05)))


def test_fires_with_the_numbers() -> None:
    where = origin("optimizer", "aten.add_")
    reading: dict[str, Any] = CALM | {
        "kind": "spike",
        "summary": "loss 900 is 40 deviations above its usual 8",
        "lr": (0.8,),
        "repeat_loss": 870.0,
        "facts": RunFacts(losses=(8.0, 90.0, 900.0), update_ratio=0.4),
    }
    said = " | ".join(found("SG505", where, **reading).evidence)
    for fragment in (
        "40 deviations",
        "from 8 to 900",
        "gives 870",
        "0.4 of their norm",
        "lr is 0.8",
    ):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "weights that ran away": (
        origin(
            "loss",
            "aten.mse_loss",
            tensor("self", (16, 1), -1e22, 1e23),
            tensor("target", (16, 1), -3.0, 3.0),
            output=out((), posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=3.1),
        ),
        {"loss": INF, "facts": RISING, "lr": (0.1,)},
    ),
    "a slow rise": (
        origin("optimizer", "aten.add_"),
        {"kind": "drift", "loss": 3.0, "grads_finite": True, "lr": (1e-3,), "repeat_loss": 2.9},
    ),
    "a weight of 1e38 after some updates": (
        origin(
            "forward",
            "aten.bmm",
            tensor("mat2", (1, 6, 18), -3e38, 3e38),
            output=out(posinf=9),
            evidence=HUGE,
        ),
        {"loss": NAN, "facts": RunFacts(committed=40, losses=(1.0, 3.0, 40.0, 9e5))},
    ),
    "a group that stood still and now runs with the rate of the others": (
        origin("optimizer"),
        {"kind": "spike", "facts": UNFROZEN},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG505"


SILENT: dict[str, Bad] = {
    "a rate that jumped": (
        origin("optimizer", "aten.add_"),
        CALM
        | {
            "kind": "spike",
            "facts": RunFacts(lr_history=((0.01,), (4.0,)), losses=(1.0, 50.0)),
        },
    ),
    "a singular gradient in a falling run": (
        backward(
            "aten.div",
            "SqrtBackward0",
            at_second("self", 1.0, 1.0, 1.0),
            at_second("other", 0.0, 0.0, 1.0),
        ),
        BACKWARD | {"facts": RunFacts(losses=(3.0, 2.0, 1.0))},
    ),
    "an extreme batch": (
        origin(
            "loss",
            "aten.mse_loss",
            tensor("self", (3,), 0.0, 1e25),
            evidence=Evidence(batch_max=1e25),
        ),
        {"loss": INF, "facts": RunFacts(losses=(3.0, 2.0, 1.0))},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG505" not in codes(where, **reading)


def test_a_run_that_diverged_into_an_infinite_norm_is_a_divergence() -> None:
    facts = RunFacts(losses=(8.0, 9e3, 4e7, 6e18), lr_history=((0.8,),) * 5)
    assert codes(None, **(CALM | {"kind": "infinite_norm", "grad_norm": INF}), facts=facts) == [
        "SG505",
        "SG501",
    ]


@pytest.mark.parametrize("finite_in", [None, "float32"], ids=["in any dtype", "in bfloat16 only"])
def test_divergence_in_bfloat16_is_no_extreme_input(finite_in: str | None) -> None:
    facts = RunFacts(losses=DIVERGED, committed=5)
    assert codes(huge_in_bfloat16(finite_in), facts=facts, lr=(1.0,))[0] == "SG505"


def test_runaway_schedule_is_told_by_its_first_rate_and_the_declared_one() -> None:
    facts = RunFacts(
        lr_history=tuple((0.0025 * step,) for step in range(20, 81)),
        first_lr=(0.0025,),
        initial_lr=(0.05,),
        losses=DIVERGED,
        committed=80,
    )
    finding = found(
        "SG505", None, kind="spike", loss=9e4, grads_finite=True, lr=(0.2,), facts=facts
    )
    said = (
        "the learning rate of group 0 has grown from 0.0025 to 0.2 over 80 steps and is 4 times "
        "initial_lr (0.05)"
    )
    assert said in finding.evidence
    assert not any("did not jump" in sentence for sentence in finding.evidence)
    assert finding.remedies[0].title.startswith("Let the schedule end")


def test_constant_rate_is_still_said_not_to_have_jumped() -> None:
    facts = RunFacts(lr_history=((0.1,),) * 9, first_lr=(0.1,), losses=DIVERGED, committed=9)
    finding = found(
        "SG505", None, kind="spike", loss=9e4, grads_finite=True, lr=(0.1,), facts=facts
    )
    assert "lr is 0.1 and did not jump" in finding.evidence


def test_divergence_is_a_conclusion_and_never_certain() -> None:
    facts = RunFacts(losses=DIVERGED, committed=9)
    alone = found("SG505", None, kind="spike", loss=9e4, grads_finite=True, lr=(0.1,), facts=facts)
    shown = found(
        "SG505",
        None,
        kind="spike",
        loss=9e4,
        grads_finite=True,
        lr=(0.1,),
        facts=facts,
        said={"older_loss": 2.0},
    )
    assert (alone.certainty, shown.certainty) == ("likely", "likely")


def test_temperature_annealed_to_nothing_is_not_a_certain_divergence() -> None:
    """scores / 1e-30: the number is extreme by itself, whatever the weights are."""
    where = origin(
        "loss",
        "aten.div",
        tensor("self", (4, 8), -3e9, 3e9),
        number("other", 1e-30),
        output=out((4, 8), posinf=3),
        evidence=Evidence(finite_in="float64", batch_max=3.0),
    )
    facts = RunFacts(losses=DIVERGED, committed=9)
    said = codes(where, facts=facts)
    assert said[0] != "SG505", said


def test_loss_function_that_changes_by_itself_makes_divergence_doubtful() -> None:
    where = origin("optimizer", evidence=Evidence(moves=("the number `temperature`",)))
    facts = RunFacts(losses=DIVERGED, committed=9)
    finding = found(
        "SG505",
        where,
        kind="spike",
        loss=9e4,
        grads_finite=True,
        lr=(0.1,),
        facts=facts,
        said={"older_loss": 2.0},
    )
    assert finding.certainty == "possible"
    assert "but the loss function changes by itself (the number `temperature`)" in finding.evidence


def test_spike_on_weights_that_stood_still_is_no_certain_divergence() -> None:
    facts = RunFacts(losses=DIVERGED, committed=9, update_ratio=1e-12)
    finding = found(
        "SG505", None, kind="spike", loss=9e4, grads_finite=True, lr=(1e-12,), facts=facts
    )
    assert finding.certainty == "possible"
