"""Training scripts that know nothing of stepguard, and how to run them with and without it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import forked
import stepguard
from cli.journals import invoke
from stepguard.journal import read_run
from stepguard.records import Incident, Origin
from stepguard.run.guarded_script import as_main

SOURCE = str(Path(stepguard.__file__).parents[1])

HEAD = """
import math, os, sys
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
"""

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.outer = nn.Linear(8, 3)

    def forward(self, x, shift=None):
        hidden = self.drop(torch.relu(self.norm(self.inner(x))))
        if shift is not None:
            hidden = hidden + torch.log(shift)[:, None]  # BORN HERE
        return self.outer(hidden)
"""

LOOP = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y, shift = torch.randn(6, 4), torch.randint(3, (6,)), torch.ones(6)
    if step in BAD:
        shift[4] = -1.0
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, shift=shift), y)
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
"""


def plain_script(steps: int = 6, bad: str = "()") -> str:
    """A classifier; at the `bad` steps sample 4 makes a NaN in the model's own forward."""
    return HEAD + NET + LOOP.replace("STEPS", str(steps)).replace("BAD", bad)


def line_of(script: str, mark: str = "# BORN HERE") -> int:
    return next(n for n, line in enumerate(script.splitlines(), start=1) if mark in line)


def python(
    folder: Path,
    *words: str,
    timeout: float = 120,
    given: str | None = None,
    ranks: int = 0,
    fresh: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in `folder`; `given` is what it reads from stdin."""
    env = {
        **os.environ,
        "PYTHONPATH": SOURCE,
        "COLUMNS": "140",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return forked.python(
        words,
        folder=folder,
        variables=env,
        given=given,
        seconds=timeout,
        ranks=ranks,
        fresh=fresh,
    )


class Ran(NamedTuple):
    """How a command in this process ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The current directory, from which modules are imported; they are forgotten at the end."""
    with chdir(folder):
        yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
            del sys.modules[name]


def stepguard_in(
    folder: Path, *words: str | Path, given: str | None = None, **variables: str
) -> Ran:
    """`stepguard WORDS` in `folder`, in this process."""
    with inside(folder):
        done = invoke(*words, given=given, COLUMNS="140", **variables)
    return Ran(done.exit_code, done.stdout, done.stderr)


def guarded(folder: Path, *words: str, **variables: str) -> Ran:
    """`stepguard run WORDS` in `folder`, in this process."""
    gc.collect()  # a GradScaler of an earlier test is none of this script's
    return stepguard_in(folder, "run", *words, **variables)


def unguarded(folder: Path, script: str, *arguments: str) -> str:
    """What the script prints without a guard, run in this process."""
    out = StringIO()
    with inside(folder), redirect_stdout(out), as_main(script, list(arguments)) as start:
        start()
    return out.getvalue()


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return text


def incidents(run: Path) -> list[Incident]:
    return read_run(run).incidents


def origin_of(incident: Incident) -> Origin:
    assert incident.origin is not None
    return incident.origin
