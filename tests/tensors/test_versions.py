"""Version marks tell which tensors were written to in place."""

from __future__ import annotations

import torch

from stepguard.tensors.values import versions, written_since


def test_only_tensors_written_in_place_are_listed() -> None:
    kept = torch.zeros(2)
    changed = torch.zeros(2)
    marks = versions([kept, changed])
    assert written_since([kept, changed], marks) == []
    changed.add_(1.0)
    assert [t is changed for t in written_since([kept, changed], marks)] == [True]


def test_a_write_through_a_view_counts() -> None:
    base = torch.zeros(4)
    marks = versions([base])
    base[1:3].mul_(2.0)
    assert len(written_since([base], marks)) == 1
