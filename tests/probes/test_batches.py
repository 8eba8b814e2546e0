"""Batches that are told apart without keeping them."""

from __future__ import annotations

from typing import Any

import torch

from stepguard.probes.statistics import SeenBatch, digest_of


def seen(batch: Any) -> SeenBatch:
    found = SeenBatch()
    found.add(batch)
    return found


def test_digest_is_that_of_the_values() -> None:
    batch = {"x": torch.arange(4.0), "name": "a"}
    assert digest_of(batch) == digest_of({"x": torch.arange(4.0), "name": "b"})
    assert digest_of(batch) != digest_of({"x": torch.arange(1.0, 5.0), "name": "a"})


def test_constant_tells_nothing() -> None:
    assert digest_of([torch.ones(4), torch.zeros(3, dtype=torch.long), torch.tensor(7.0)]) == ""


def test_kept_tensor_is_told_from_an_equal_one() -> None:
    kept = torch.arange(6.0)
    first = seen(kept)
    assert first.compared(seen(kept)) == "same"
    assert first.compared(seen(kept.view(2, 3))) == "same"
    assert first.compared(seen(kept.clone())) == "equal"
    assert first.compared(seen(kept + 1)) == "other"
    assert first.compared(SeenBatch()) == "unknown"


def test_batch_that_is_gone_is_no_longer_the_same() -> None:
    first = seen(torch.arange(6.0))
    assert first.compared(seen(torch.arange(6.0))) == "equal"
