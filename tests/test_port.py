"""What integrations ask of a guard stands behind `guard.port`, and not on the guard."""

from __future__ import annotations

import pytest
import torch

import stepguard
from scenes import NAN, QUIET, batches, plain_net
from stepguard import ConfigError, Guard

MOVED = ("micro", "dropped", "start_at", "settle", "finite", "trouble", "good", "say")


@pytest.mark.parametrize("name", MOVED)
def test_members_for_frameworks_are_on_the_port(name: str) -> None:
    model = plain_net()
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET) as guard:
        assert not hasattr(guard, name)
        assert hasattr(guard.port, name)


def test_micro_is_for_watched_loops_only() -> None:
    model = plain_net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET)
    with guard, pytest.raises(ConfigError, match=r"stepguard\.watch"):
        guard.port.micro(lambda batch: batch, batches(1)[0])


def test_trouble_names_what_must_not_be_saved() -> None:
    model = plain_net()
    guard = stepguard.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET)
    assert guard.port.finite() and guard.port.trouble() == () and guard.port.good
    with torch.no_grad():
        model[0].weight[0, 0] = NAN
    assert not guard.port.finite()
    assert guard.port.trouble() == ("param:0.weight",)
    with torch.no_grad():
        model[0].weight.zero_()
    guard.close()
