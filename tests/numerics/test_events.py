"""Counters of what the functions left out or limited."""

from __future__ import annotations

import torch

from stepguard.numerics import Events


def test_events_add_up_until_they_are_cleared() -> None:
    counted = Events()
    counted.add("a", torch.tensor([True, True, False]))
    counted.add("a", torch.tensor(3))
    counted.add("b", torch.tensor(False))
    assert counted.counts() == {"a": 5}
    counted.clear()
    assert counted.counts() == {}
