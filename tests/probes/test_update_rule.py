"""SG925: an optimizer that does not do what its name says; all of torch's do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from zoo.silent import wrong_updates

import stepguard
from stepguard import GuardConfig, Probes
from stepguard.journal import read_run
from stepguard.probes.statistics import declared_rule

STEPS = 7
SCALES = torch.logspace(-2, 1, 16)
Build = Callable[[Iterable[nn.Parameter]], Optimizer]


def said(folder: Path, build: Build, scale: float = 1.0) -> list[str]:
    """Codes that a watched run reports."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
    optimizer = build(net.parameters())
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=2), terminal="quiet")
    with stepguard.watch(net, optimizer, config=config) as guard:
        for step in range(STEPS):
            batch = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)) * SCALES
            optimizer.zero_grad()
            loss = (net(batch) - batch.roll(1, 1)).square().mean() * scale
            loss.backward()
            optimizer.step()
        assert guard.armed
    notes = [note for note in read_run(folder).notes if note.get("kind") == "silent"]
    return [str(note["code"]) for note in notes]


TORCHS: dict[str, tuple[Any, dict[str, Any]]] = {
    name: (getattr(torch.optim, name), {})
    for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Rprop")
}
TORCHS |= {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW whose epsilon outweighs the gradient": (torch.optim.AdamW, {"eps": 10.0, "lr": 0.1}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Muon": (torch.optim.Muon, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", TORCHS)
def test_optimizers_of_torch_do_what_their_name_says(tmp_path: Path, name: str) -> None:
    kind, settings = TORCHS[name]
    assert "SG925" not in said(tmp_path, lambda given: kind(given, **{"lr": 1e-3} | settings))


PLAIN: dict[str, Build] = {
    "AdamW": lambda given: wrong_updates.AdamW(given, lr=1e-3),
    "Muon": lambda given: wrong_updates.Muon(given, lr=0.01, dimensions=3),
    "Lion": lambda given: wrong_updates.Lion(given, lr=0.1, signs=False),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_descent_under_another_name_is_reported(tmp_path: Path, name: str) -> None:
    assert said(tmp_path, PLAIN[name]) == ["SG925"]


def test_gradients_that_are_all_of_one_size_tell_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(16, 8, bias=False)
    optimizer = wrong_updates.AdamW(net.parameters(), lr=1e-3)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=2), terminal="quiet")
    with stepguard.watch(net, optimizer, config=config):
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = torch.ones(4, 16) * (1.0 + step)
            net(batch).sum().backward()
            optimizer.step()
    notes = [note for note in read_run(tmp_path).notes if note.get("kind") == "silent"]
    assert "SG925" not in [note["code"] for note in notes]


def test_of_an_optimizer_with_another_name_nothing_is_known() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert declared_rule(Mine(nn.Linear(2, 2).parameters(), lr=0.1)) == ""
