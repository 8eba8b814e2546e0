"""A loop that leaves its schedule alone when the scaler skips, and vetoes among such skips."""

import pytest
import torch
from torch import Tensor, nn

import stepguard
from stepguard import GuardConfig

QUIET = GuardConfig(terminal="quiet")
SCALE = 256.0


def _loss(model: nn.Linear, kind: str) -> Tensor:
    if kind == "overflow":  # finite as it is; only the scale makes its gradient infinite
        return torch.sin(model.weight * 1e37).sum()
    rows = torch.full((4, 4), float("nan") if kind == "nan" else 1.0)
    return model(rows).sum()


def _schedule_after(kinds: list[str], *, fused: bool) -> tuple[int, float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    with stepguard.watch(model, optimizer, scaler=scaler, scheduler=scheduler, config=QUIET):
        for kind in kinds:
            optimizer.zero_grad()
            scaler.scale(_loss(model, kind)).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
    return scheduler.last_epoch, scaler.get_scale()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["good", "good", "overflow", "nan", "good", "good"],
        ["good", "overflow", "nan", "overflow", "good", "good"],
        ["overflow", "nan", "good", "good"],
        ["good", "nan", "overflow", "nan", "good"],
    ],
    ids=" ".join,
)
def test_schedule_counts_updates_only(kinds: list[str], fused: bool) -> None:
    moved, scale = _schedule_after(kinds, fused=fused)
    assert moved == kinds.count("good")
    assert scale == SCALE / 2 ** kinds.count("overflow")
