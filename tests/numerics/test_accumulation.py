"""Micro-batches weighed by the labels they hold."""

from __future__ import annotations

import pytest
import torch

import stepguard
from stepguard import numerics


def test_a_common_denominator_makes_two_micro_batches_equal_to_one_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (2, 5), generator=generator)
    targets[0, 2:] = -100
    whole = numerics.masked_cross_entropy(logits, targets)
    share = numerics.token_share([targets[:1], targets[1:]], numerics.count_labels)
    halves = [
        numerics.masked_cross_entropy(logits[i : i + 1], targets[i : i + 1], denominator=share)
        for i in (0, 1)
    ]
    assert float(sum(halves)) == pytest.approx(float(whole), rel=1e-6)
    means = [numerics.masked_cross_entropy(logits[i : i + 1], targets[i : i + 1]) for i in (0, 1)]
    assert float(sum(means) / 2) != pytest.approx(float(whole), rel=1e-3)


def test_labels_are_counted_without_those_ignored_or_masked() -> None:
    targets = torch.tensor([1, -100, 2, 3])
    assert int(numerics.count_labels(targets)) == 3
    mask = torch.tensor([True, True, False, True])
    assert int(numerics.count_labels(targets, mask=mask)) == 2


def test_no_micro_batch_is_refused_and_no_label_gives_one() -> None:
    with pytest.raises(stepguard.ConfigError, match="no micro-batch"):
        numerics.token_share([], numerics.count_labels)
    empty = torch.full((3,), -100)
    assert float(numerics.token_share([empty], numerics.count_labels)) == 1.0
