"""Checking the fixture project the way the commands do, without a process of their own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepguard._errors import ConfigError
from stepguard.check.preflight import check, resolve
from stepguard.check.settings import Tracked
from stepguard.records.checks import Outcome, Preflight
from stepguard.state.capsule import import_function, importable

PROJECT = Path(__file__).parent / "project"


CONFIG = json.loads((PROJECT / "config.json").read_text())


HEALTHY = "tinychat.training:build"


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """With this folder as the current directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def ask(
    target: str,
    *only: str,
    config: Path | None = PROJECT / "config.json",
    launcher: Path | None = PROJECT / "launch.json",
    **given: Any,
) -> Preflight:
    """`stepguard check TARGET` in the project's folder."""
    with inside(PROJECT):
        subject = resolve(target, config, launcher, **given)
        return check(subject, only=only, target=target)


def ask_one(target: str, item: str, **given: Any) -> Outcome:
    return ask(target, item, **given).outcome(item)


def said(result: Preflight, item: str) -> str:
    """The evidence of one item in one line."""
    return "; ".join(result.outcome(item).evidence)


def built(name: str = "training:build") -> dict[str, Any]:
    """What a build function of the project returns."""
    with inside(PROJECT), importable():
        build = import_function(f"tinychat.{name}", ConfigError)
        parts: dict[str, Any] = build(Tracked(CONFIG))
    return parts


def written(folder: Path, **changes: Any) -> Path:
    """The project's configuration with other values, dotted keys allowed (`optimizer__lr=1`)."""
    values = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *outer, last = key.split("__")
        inner = values
        for name in outer:
            inner = inner[name]
        inner[last] = value
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


def saved(
    path: Path, model: nn.Module, optimizer: Any = None, scheduler: Any = None, **more: Any
) -> Path:
    """A checkpoint of the usual layout."""
    state: dict[str, Any] = {"model": model.state_dict(), **more}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    torch.save(state, path)
    return path


DOCTORED = """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, alpha):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.alpha_res = nn.Parameter(torch.tensor(alpha))

    def forward(self, x):
        return self.alpha_res * self.line(x)


def model():
    return Gate(0.01)


def with_inputs():
    return Gate(0.01), torch.ones(2, 4)


def with_large_gate():
    return Gate(3.0), (torch.ones(2, 4),)


def with_nan():
    net = Gate(0.01)
    with torch.no_grad():
        net.line.weight[0, 0] = float("nan")
    return net, {"x": torch.ones(2, 4)}


def with_wrong_inputs():
    return Gate(0.01), torch.ones(2, 5)


def subject():
    return {"model": Gate(0.01), "batch": (torch.ones(2, 4),)}


def broken():
    raise RuntimeError("no such dataset")


def wrong():
    return 3
"""


@contextmanager
def project_in(folder: Path) -> Iterator[Path]:
    """Write the project into the folder, and work there."""
    (folder / "doctored_project.py").write_text(DOCTORED)
    (folder / "run").mkdir()
    with inside(folder):
        yield folder
    sys.modules.pop("doctored_project", None)
