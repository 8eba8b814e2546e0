"""The panel prints sentences for people, never an internal fact of the locator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import stepguard
from stepguard import GuardConfig


class CalledByAnotherName(nn.Linear):
    """A model whose loop does not call `forward`, so the guard sees no call it could replay."""

    def score(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_step_that_cannot_be_replayed_says_so_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = CalledByAnotherName(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=GuardConfig()) as guard:
        (model.score(torch.ones(2, 4)).sum() * math.nan).backward()
        optimizer.step()
    assert len(guard.incidents) == 1
    shown = capsys.readouterr()
    panel = shown.out + shown.err
    assert "no-replay=" not in panel
    assert "the step could not be replayed" in " ".join(panel.split())


@pytest.mark.parametrize("way", ["watched", "handed over", "step"])
def test_first_incident_outside_the_model_says_how_it_can_be_located(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = stepguard.Guard if way == "step" else stepguard.watch

    def loss_fn(x: Tensor) -> Tensor:
        return torch.log(model(x).exp() - 1e9).mean()

    with made(model, optimizer, config=GuardConfig()) as guard:
        x = torch.ones(2, 4)
        if way == "step":
            guard.step(loss_fn, x)
        else:
            loss = guard.loss(loss_fn, x) if way == "handed over" else loss_fn(x)
            loss.backward()
            optimizer.step()
    panel = " ".join(capsys.readouterr().err.split())
    assert "FIX" in panel
    assert ("guard.loss(loss_fn, batch)" in panel) == (way == "watched")
