"""CTC leaves out what cannot be aligned, and counts it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stepguard import numerics
from stepguard.numerics import Events


def test_ctc_leaves_out_what_cannot_be_aligned_and_counts_it() -> None:
    counted = Events()
    logits = torch.randn(16, 2, 5, requires_grad=True)
    targets = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]])
    lengths = torch.tensor([16, 16]), torch.tensor([10, 10])
    loss = numerics.ctc_loss(logits.log_softmax(-1), targets, *lengths, count=counted)
    loss.backward()
    alone = F.ctc_loss(logits.log_softmax(-1)[:, 1:], targets[1:], lengths[0][1:], lengths[1][1:])
    assert loss.item() == pytest.approx(alone.item(), rel=1e-5)
    assert counted.counts() == {"ctc_loss.unalignable": 1}
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.isinf(F.ctc_loss(logits.log_softmax(-1), targets, *lengths, reduction="none")[0])


def test_ctc_of_nothing_that_aligns_is_a_zero_with_a_graph() -> None:
    logits = torch.randn(3, 1, 4, requires_grad=True)
    loss = numerics.ctc_loss(
        logits.log_softmax(-1), torch.tensor([[1, 1, 1]]), torch.tensor([3]), torch.tensor([3])
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
