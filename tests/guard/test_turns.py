"""The look at the parameters after an update: of a large model some at a time, and no element is
left out for good.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from guard.scenes import quiet
from stepguard.records import Incident
from stepguard.sentinel.stored_tensors import CHEAP_LOOK, TURNS, InTurn

LARGE = 3 * CHEAP_LOOK + 12


class WithUnused(nn.Module):
    """A large parameter that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.zeros(LARGE // 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def _run(model: WithUnused, hurt: int | None, steps: int) -> tuple[Incident, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with stepguard.Guard(model, optimizer, config=quiet(snapshots=0)) as guard:
        for step in range(steps):
            if step == 2 and hurt is not None:
                model.unused.data.view(-1)[hurt] = float("nan")
            try:
                guard.step(lambda b: F.mse_loss(model(b), torch.zeros(4, 2)), x)
            except stepguard.TrainingHalted:
                break
        return tuple(guard.incidents)


@pytest.mark.parametrize("place", [0, CHEAP_LOOK - 1, CHEAP_LOOK, 2 * CHEAP_LOOK + 5, LARGE - 1])
def test_a_nan_anywhere_in_a_large_parameter_is_seen_once_its_turn_has_come(place: int) -> None:
    torch.manual_seed(0)
    found = _run(WithUnused(), place, steps=8)
    assert found[0].verdict.kind == "nonfinite_parameter"
    assert found[0].reading.bad_state == ("param:unused",)
    assert 2 < found[0].step <= 2 + LARGE // CHEAP_LOOK + 2


def test_nothing_is_found_where_nothing_is_hurt() -> None:
    assert _run(WithUnused(), None, steps=8) == ()


def test_a_round_of_shares_holds_every_element_once_and_each_share_is_small() -> None:
    tensors = [torch.arange(size, dtype=torch.float32) for size in (5, LARGE, 7, CHEAP_LOOK, 0, 9)]
    turn = InTurn()
    shares = [turn.share(tensors) for _ in range(TURNS)]
    sizes = [sum(t.numel() for t in share) for share in shares]
    round_of = next(
        n for n in range(1, TURNS) if shares[n][0].data_ptr() == shares[0][0].data_ptr()
    )
    assert sum(sizes[:round_of]) == sum(t.numel() for t in tensors)
    assert max(sizes) < 2 * CHEAP_LOOK


def test_a_model_of_any_size_is_through_in_so_many_turns() -> None:
    huge = [
        torch.empty(40 * CHEAP_LOOK, device="meta"),
        *(torch.empty(CHEAP_LOOK // 3, device="meta") for _ in range(50)),
    ]
    turn = InTurn()
    seen = sum(t.numel() for _ in range(TURNS) for t in turn.share(huge))
    assert seen >= sum(t.numel() for t in huge)


def test_memory_that_is_replaced_is_looked_at_where_it_is_now() -> None:
    parameter = nn.Parameter(torch.zeros(2, CHEAP_LOOK))
    turn = InTurn()
    tensors: list[Tensor] = [parameter]
    turn.share(tensors)
    parameter.data = torch.ones(CHEAP_LOOK, 2).t()  # cannot be cut without a copy any more
    assert [t.numel() for t in turn.share(tensors)] == [2 * CHEAP_LOOK]
    parameter.data = torch.ones(3)
    assert [t.tolist() for t in turn.share(tensors)] == [[1.0, 1.0, 1.0]]


def test_what_is_ignored_is_in_no_share() -> None:
    tensors = [torch.ones(3), torch.ones(2 * CHEAP_LOOK)]
    turn = InTurn()
    assert [t.numel() for _ in range(3) for t in turn.share(tensors, {id(tensors[1])})] == [3]
