"""Facts that are measured at the operation that made a bad value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stepguard.locate.operands import Call
from stepguard.locate.source import ModuleSpans
from stepguard.locate.tracer import Tracer
from stepguard.records import Evidence

# --- facts that are measured at the operation that made a bad value


def first_bad(compute: Callable[[], Tensor]) -> Call:
    """The first operation of the computation whose bad result was measured."""
    tracer = Tracer(ModuleSpans({}))
    with tracer:
        compute()
    return next(call for call in tracer.calls if call.output is not None)


def evidence(compute: Callable[[], Tensor]) -> Evidence:
    return first_bad(compute).evidence


def test_zero_over_zero_names_divisor_and_what_computed_it() -> None:
    mask = torch.zeros(3)
    found = evidence(lambda: torch.zeros(1) / mask.sum())
    assert found.zero_denominator and found.zero_numerator
    assert found.denominator_from == "aten.sum" and not found.denominator_fractional


def test_a_fractional_divisor_is_told_from_a_count() -> None:
    found = evidence(lambda: torch.ones(2) / torch.tensor([0.0, 0.5]))
    assert found.zero_denominator and found.denominator_fractional and not found.zero_numerator


@pytest.mark.parametrize(
    ("compute", "argument"),
    [
        (lambda: torch.log(torch.tensor([0.0])), "zero"),
        (lambda: torch.log(torch.tensor([-1.0])), "negative"),
        (lambda: torch.log1p(torch.tensor([-1.0])), "zero"),
        (lambda: torch.tensor([-2.0]) ** 0.5, "negative"),
    ],
    ids=["log 0", "log -1", "log1p -1", "root of -2"],
)
def test_the_argument_is_zero_or_negative(compute: Callable[[], Tensor], argument: str) -> None:
    assert evidence(compute).argument == argument


def test_a_negative_base_that_overflows_has_no_missing_root() -> None:
    assert evidence(lambda: torch.tensor([-1e30]) ** 3).argument is None


def test_zero_to_a_negative_power_is_named() -> None:
    assert evidence(lambda: torch.zeros(1) ** -1.5).negative_power


def test_overflow_in_half_precision_is_finite_in_a_wider_dtype() -> None:
    large = torch.full((2,), 6e4, dtype=torch.float16)
    found = evidence(lambda: large + large)
    assert found.half_precision and found.finite_in == "float32"
    assert found.dtype_limit == 65504.0


def test_what_overflows_in_any_dtype_has_no_wider_one() -> None:
    assert evidence(lambda: torch.tensor([0.0]).log()).finite_in is None


def test_an_infinity_times_zero_was_written_on_purpose() -> None:
    found = evidence(lambda: torch.zeros(2) * float("inf"))
    assert found.zero_times_inf and found.intended_inf
    assert (found.number_argument, found.number) == ("other", float("inf"))


def test_an_epsilon_that_half_precision_cannot_hold_has_vanished() -> None:
    zeros = torch.zeros(2, dtype=torch.float16)
    assert (
        evidence(lambda: torch.ones(2, dtype=torch.float16) / (zeros + 1e-8)).eps_vanished == 1e-8
    )


def test_operands_show_the_element_that_met_the_bad_one() -> None:
    call = first_bad(lambda: torch.log(torch.tensor([2.0, -3.0])))
    assert call.inputs[0].index == (1,) and call.inputs[0].value == -3.0
    assert call.output is not None and call.output.nan == 1


# --- facts on rows, reductions and targets

INF = float("inf")


def test_masked_rows_of_a_softmax_are_counted() -> None:
    scores = torch.tensor([[0.0, 1.0], [-INF, -INF], [-INF, 0.0]])
    found = evidence(lambda: torch.softmax(scores, dim=-1))
    assert (found.masked_rows, found.rows) == (1, 3)


def test_the_axis_of_the_softmax_decides_what_a_row_is() -> None:
    scores = torch.tensor([[-INF, 0.0], [-INF, 0.0]])
    found = evidence(lambda: torch.softmax(scores, dim=0))
    assert (found.masked_rows, found.rows) == (1, 2)


def test_a_mean_of_nothing_reduced_no_element() -> None:
    assert evidence(lambda: torch.zeros(0).mean()).reduced_elements == 0


def test_a_deviation_of_one_element_is_named() -> None:
    with pytest.warns(UserWarning, match="degrees of freedom"):
        assert evidence(lambda: torch.ones(1).std()).reduced_elements == 1


def test_targets_that_count_are_counted() -> None:
    scores = torch.zeros(3, 2)
    found = evidence(lambda: F.cross_entropy(scores, torch.full((3,), -100)))
    assert (found.valid_targets, found.targets) == (0, 3)


def test_a_target_class_of_probability_zero_is_named() -> None:
    mask = torch.tensor([[True, False]])
    scores = torch.zeros(1, 2)
    found = evidence(lambda: F.nll_loss(scores.masked_fill(mask, -INF), torch.tensor([0])))
    assert found.zero_target_probability and found.valid_targets == 1


def test_a_ctc_target_that_is_too_long_is_counted() -> None:
    log_p = torch.randn(2, 1, 3).log_softmax(-1)
    targets = torch.tensor([[1, 2, 1]])
    found = evidence(
        lambda: F.ctc_loss(log_p, targets, torch.tensor([2]), torch.tensor([3]), reduction="none")
    )
    assert found.ctc_infeasible == 1


def test_a_running_variance_below_zero_has_no_root() -> None:
    x = torch.randn(4, 2)
    found = evidence(lambda: F.batch_norm(x, torch.zeros(2), torch.tensor([1.0, -1.0])))
    assert found.argument == "negative"
