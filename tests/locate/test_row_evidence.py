"""Facts on rows, reductions and targets."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from locate.test_evidence import evidence

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
