"""Causes that need more than the operation: the run's losses and rates, what a divisor is, what a
replay moved.
"""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import INF, NAN, codes, found, number, origin, out, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Origin

DIVERGED = (6.0, 5.8, 19.9, 292.0, 6112.0)
CALM_LOSSES = (6.0, 5.8, 5.9, 5.7, 5.8)


def huge_in_bfloat16(finite_in: str | None = None) -> Origin:
    """A layer norm of 3e20, on a batch that holds nothing unusual."""
    wide = tensor("input", (4, 8), -3e20, 3e20, dtype="bfloat16")
    made = out((4, 8), nan=32, dtype="bfloat16")
    evidence = Evidence(half_precision=True, batch_max=4.2, finite_in=finite_in)
    return origin(
        "forward",
        "aten.native_layer_norm",
        wide,
        number("eps", 1e-5),
        output=made,
        evidence=evidence,
    )


@pytest.mark.parametrize("finite_in", [None, "float32"], ids=["in any dtype", "in bfloat16 only"])
def test_divergence_in_bfloat16_is_no_extreme_input(finite_in: str | None) -> None:
    facts = RunFacts(losses=DIVERGED, committed=5)
    assert codes(huge_in_bfloat16(finite_in), facts=facts, lr=(1.0,))[0] == "SG505"


def test_calm_run_in_bfloat16_is_not_called_diverged_first() -> None:
    facts = RunFacts(losses=CALM_LOSSES, committed=5)
    assert codes(huge_in_bfloat16("float32"), facts=facts)[0] == "SG301"


def test_extreme_batch_stays_the_cause_in_a_diverging_run() -> None:
    wide = tensor("input", (4, 8), -3e20, 3e20, dtype="bfloat16")
    where = origin(
        "forward",
        "aten.native_layer_norm",
        wide,
        output=out((4, 8), nan=8),
        evidence=Evidence(sample_max=3e20, others_max=2.0),
    )
    assert codes(where, facts=RunFacts(losses=DIVERGED, committed=5))[0] == "SG103"


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


def test_spike_without_a_measured_sign_is_less_certain() -> None:
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
    assert (alone.certainty, shown.certainty) == ("likely", "certain")


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


def division(low: float, high: float, *, dtype: str = "float32", **evidence: Any) -> Origin:
    divisor = tensor("other", (4,), low, high, zeros=1, index=(3,), value=0.0, dtype=dtype)
    return origin(
        "loss",
        "aten.div",
        tensor("self", (4,), 0.1, 0.5, index=(3,), value=0.3),
        divisor,
        output=out(posinf=1),
        evidence=Evidence(zero_denominator=True, **evidence),
    )


NO_COUNTS = {
    "logarithm of a length": division(
        0.0, 2.83, denominator_from="aten.log", denominator_root="batch:length"
    ),
    "logarithm of lengths that are all 1": division(
        0.0, 0.0, denominator_from="aten.log", denominator_root="batch:length"
    ),
    "weights between 0 and 3": division(
        0.0, 3.0, denominator_root="batch:mask", denominator_fractional=True
    ),
    "whole numbers below 0": division(-2.0, 3.0, denominator_root="batch:label"),
    "integers below 0": division(-2.0, 3.0, dtype="int64"),
}
COUNTS = {
    "lengths": division(0.0, 17.0, denominator_root="batch:length"),
    "integers": division(0.0, 17.0, dtype="int64"),
    "sum of a mask": division(0.0, 4.0, denominator_from="aten.sum", denominator_root="batch:mask"),
}


@pytest.mark.parametrize("name", NO_COUNTS)
def test_divisor_that_is_no_count_is_a_division_by_zero(name: str) -> None:
    assert codes(NO_COUNTS[name], loss=INF)[0] == "SG201"


@pytest.mark.parametrize("name", COUNTS)
def test_divisor_that_counts_is_an_empty_reduction(name: str) -> None:
    assert codes(COUNTS[name], loss=INF)[0] == "SG102"


def test_epsilon_that_vanished_before_a_root_is_the_cause() -> None:
    where = origin(
        "forward",
        "aten.div",
        tensor("self", (4,), -0.4, 0.4, dtype="float16"),
        tensor("other", (4, 1), 0.0, 0.3, zeros=1, dtype="float16"),
        output=out(nan=4, dtype="float16"),
        evidence=Evidence(zero_denominator=True, denominator_from="aten.sqrt", eps_vanished=1e-08),
    )
    assert codes(where)[0] == "SG302"


def test_value_computed_from_the_batch_is_the_divisor_and_not_what_is_divided() -> None:
    finding = found("SG104", NO_COUNTS["logarithm of a length"], loss=INF)
    assert "got 0 at index (3,)" in finding.evidence[0]


def test_not_reproduced_names_the_loss_function_before_hardware() -> None:
    where = origin(
        "loss", reproduced=False, evidence=Evidence(same_bits=True, moves=("the generator `own`",))
    )
    finding = found("SG702", where)
    assert (
        finding.evidence[0]
        == "not reproduced: the loss function is probably not a function of its batch"
    )
    assert "the generator `own`" in finding.evidence[1]
    assert "hardware" in finding.evidence[-1]
    steady = origin("loss", reproduced=False, evidence=Evidence(same_bits=True))
    assert (finding.certainty, found("SG702", steady).certainty) == ("likely", "certain")


def test_state_loaded_bad_is_also_a_corrupted_checkpoint() -> None:
    where = origin("state", tensor="param:head.weight", evidence=Evidence(bad_elements=1))
    fresh = RunFacts(resumed=True, committed=0)
    assert "SG603" in codes(where, loss=NAN, bad_state=("param:head.weight",), facts=fresh)
    later = RunFacts(resumed=True, committed=40)
    assert "SG603" not in codes(where, loss=NAN, bad_state=("param:head.weight",), facts=later)


def test_autocast_seen_in_the_replay_counts_for_the_settings() -> None:
    where = origin(
        "backward",
        "aten.mul",
        tensor("self", (4,), 0.0, 0.0),
        evidence=Evidence(autocast="float16"),
    )
    assert "SG801" in codes(where, facts=RunFacts(scaling="none"))
    assert "SG801" not in codes(where, facts=RunFacts(scaling="dynamic"))


def test_spike_on_weights_that_stood_still_is_no_certain_divergence() -> None:
    facts = RunFacts(losses=DIVERGED, committed=9, update_ratio=1e-12)
    finding = found(
        "SG505", None, kind="spike", loss=9e4, grads_finite=True, lr=(1e-12,), facts=facts
    )
    assert finding.certainty == "possible"
