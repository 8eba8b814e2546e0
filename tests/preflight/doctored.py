"""A small project to examine: a module with build functions, and an empty folder of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from preflight.asking import inside

PROJECT = """
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
    (folder / "doctored_project.py").write_text(PROJECT)
    (folder / "run").mkdir()
    with inside(folder):
        yield folder
    sys.modules.pop("doctored_project", None)
