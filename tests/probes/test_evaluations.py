"""SG931: evaluations in training mode, and calls without gradients that belong to a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepguard
from stepguard import GuardConfig, Probes
from stepguard.journal import read_run
from stepguard.tensors.torch_private import dispatch_mode_stack

STEPS, EVERY, CALLS = 24, 6, 5
Extra = Callable[[nn.Module, int], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))


def silent(
    folder: Path, extra: Extra, model: nn.Module | None = None
) -> tuple[list[str], list[Tensor]]:
    """What a watched run was told, and the weights it ended with."""
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=4), terminal="quiet")
    with stepguard.watch(model, optimizer, config=config) as guard:
        for step in range(STEPS):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(16, 8)), torch.zeros(16, 8)).backward()  # type: ignore[no-untyped-call]
            assert not dispatch_mode_stack()
            optimizer.step()
            extra(model, step)
        assert guard.armed
    assert not dispatch_mode_stack()
    found = [str(n["summary"]) for n in read_run(folder).notes if n.get("kind") == "silent"]
    return found, [one.detach().clone() for one in model.state_dict().values()]


def evaluated(mode: Callable[[], AbstractContextManager[None]], training: bool) -> Extra:
    def extra(model: nn.Module, step: int) -> None:
        if step % EVERY == EVERY - 1:
            model.train(training)
            with mode():
                for _ in range(CALLS):
                    F.smooth_l1_loss(model(torch.randn(16, 8)) * 2.0, torch.zeros(16, 8))
            model.train()

    return extra


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_loss_in_training_mode_is_told_with_what_it_disturbs(
    mode: type[torch.no_grad], tmp_path: Path
) -> None:
    (only,), _ = silent(tmp_path, evaluated(mode, training=True))
    assert only.startswith("SG931") and "l1_loss" in only
    assert "2 drops values" in only and "1 takes the statistics" in only


def test_evaluation_goes_on_as_without_a_guard(tmp_path: Path) -> None:
    extra = evaluated(torch.no_grad, training=True)
    _, guarded = silent(tmp_path, extra)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(16, 8)), torch.zeros(16, 8)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        extra(model, step)
    plain = list(model.state_dict().values())
    assert all(torch.equal(one, other) for one, other in zip(guarded, plain, strict=True))


def mined(model: nn.Module, step: int) -> None:
    """Examples are chosen by their loss, in every step."""
    with torch.no_grad():
        for _ in range(CALLS):
            F.mse_loss(model(torch.randn(16, 8)), torch.zeros(16, 8), reduction="none")


def recalibrated(model: nn.Module, step: int) -> None:
    """Statistics of batch norms are measured anew."""
    if step % EVERY == EVERY - 1:
        with torch.no_grad():
            for _ in range(CALLS):
                model(torch.randn(16, 8))


def pseudo_labelled(model: nn.Module, step: int) -> None:
    """Labels of a student."""
    if step % EVERY == EVERY - 1:
        with torch.no_grad():
            labels = model(torch.randn(16, 8))
        F.mse_loss(model(torch.randn(16, 8)), labels)


HEALTHY: dict[str, Extra] = {
    "evaluation mode": evaluated(torch.no_grad, training=False),
    "examples chosen in every step": mined,
    "statistics of batch norms": recalibrated,
    "labels of a student": pseudo_labelled,
}


@pytest.mark.parametrize("extra", HEALTHY.values(), ids=HEALTHY)
def test_calls_that_belong_to_a_training_are_not_told(extra: Extra, tmp_path: Path) -> None:
    assert silent(tmp_path, extra)[0] == []


def test_model_without_a_mode_may_stay_in_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.0), nn.Linear(16, 8))
    assert silent(tmp_path, evaluated(torch.no_grad, training=True), plain)[0] == []
