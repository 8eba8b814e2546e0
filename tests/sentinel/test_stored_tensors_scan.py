"""The rotating scan of parameters: a part of a large model after each update, in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from scenes import quiet
from stepguard.records import Incident
from stepguard.sentinel.gradients import SCANNED_EACH_STEP, STEPS_A_ROUND, RotatingScan

LARGE = 3 * SCANNED_EACH_STEP + 12


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


@pytest.mark.parametrize(
    "place", [0, SCANNED_EACH_STEP - 1, SCANNED_EACH_STEP, 2 * SCANNED_EACH_STEP + 5, LARGE - 1]
)
def test_a_nan_anywhere_in_a_large_parameter_is_found_within_a_round(place: int) -> None:
    torch.manual_seed(0)
    found = _run(WithUnused(), place, steps=8)
    assert found[0].verdict.kind == "nonfinite_parameter"
    assert found[0].reading.bad_state == ("param:unused",)
    assert 2 < found[0].step <= 2 + LARGE // SCANNED_EACH_STEP + 2


def test_nothing_is_found_where_nothing_is_hurt() -> None:
    assert _run(WithUnused(), None, steps=8) == ()


def test_a_round_of_shares_holds_every_element_once_and_each_share_is_small() -> None:
    tensors = [
        torch.arange(size, dtype=torch.float32) for size in (5, LARGE, 7, SCANNED_EACH_STEP, 0, 9)
    ]
    turn = RotatingScan()
    shares = [turn.share(tensors) for _ in range(STEPS_A_ROUND)]
    sizes = [sum(t.numel() for t in share) for share in shares]
    round_of = next(
        n for n in range(1, STEPS_A_ROUND) if shares[n][0].data_ptr() == shares[0][0].data_ptr()
    )
    assert sum(sizes[:round_of]) == sum(t.numel() for t in tensors)
    assert max(sizes) < 2 * SCANNED_EACH_STEP


def test_a_round_takes_a_bounded_number_of_steps_for_a_model_of_any_size() -> None:
    huge = [
        torch.empty(40 * SCANNED_EACH_STEP, device="meta"),
        *(torch.empty(SCANNED_EACH_STEP // 3, device="meta") for _ in range(50)),
    ]
    turn = RotatingScan()
    seen = sum(t.numel() for _ in range(STEPS_A_ROUND) for t in turn.share(huge))
    assert seen >= sum(t.numel() for t in huge)


def test_replaced_memory_is_scanned_where_it_is_now() -> None:
    parameter = nn.Parameter(torch.zeros(2, SCANNED_EACH_STEP))
    turn = RotatingScan()
    tensors: list[Tensor] = [parameter]
    turn.share(tensors)
    parameter.data = torch.ones(SCANNED_EACH_STEP, 2).t()  # cannot be cut without a copy any more
    assert [t.numel() for t in turn.share(tensors)] == [2 * SCANNED_EACH_STEP]
    parameter.data = torch.ones(3)
    assert [t.tolist() for t in turn.share(tensors)] == [[1.0, 1.0, 1.0]]


def test_ignored_tensors_are_in_no_share() -> None:
    tensors = [torch.ones(3), torch.ones(2 * SCANNED_EACH_STEP)]
    turn = RotatingScan()
    assert [t.numel() for _ in range(3) for t in turn.share(tensors, {id(tensors[1])})] == [3]
