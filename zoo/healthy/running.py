"""The way in without a changed line: `stepguard run SCRIPT` in a child process, the same script
bare in this one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from zoo.healthy.drive import Left, Outcome
from zoo.healthy.same import frozen
from zoo.healthy.training import register

GROUP = "scripts"
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = 300
ENDED = re.compile(r"(\d+) steps guarded")


def script(name: str, seed: int, steps: int, outcome: Outcome | None) -> Left:
    """Run it, guarded where there is an outcome to write into."""
    path = SCRIPTS / f"{name}.py"
    with tempfile.TemporaryDirectory(prefix="stepguard-harmless-") as folder:
        out = Path(folder) / "left.pt"
        arguments = ["--seed", str(seed), "--steps", str(steps), "--out", str(out)]
        if outcome is None:
            with _untouched():
                _bare(path, arguments)
        else:
            _guarded(path, arguments, outcome)
        return (0, 0), frozen(torch.load(out, weights_only=True))


def _bare(path: Path, arguments: list[str]) -> None:
    before, sys.argv = sys.argv, [str(path), *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


def _guarded(path: Path, arguments: list[str], outcome: Outcome) -> None:
    with tempfile.TemporaryDirectory(prefix="stepguard-harmless-") as run_dir:
        command = [
            sys.executable,
            "-m",
            "stepguard",
            "run",
            "--run-dir",
            run_dir,
            str(path),
            *arguments,
        ]
        # sums are added up in another order with another number of threads
        surroundings = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=surroundings
        )
        actions = [_action(file) for file in Path(run_dir).rglob("incident.json")]
    done = Counter(action for action in actions if action not in ("note", "warn"))
    if ended.returncode:
        done[f"exit code {ended.returncode}"] += 1
    if ENDED.search(ended.stderr) is None:
        done["not guarded"] += 1
    outcome.interventions = dict(done)
    outcome.notes = len(actions) - sum(action not in ("note", "warn") for action in actions)


def _action(file: Path) -> str:
    decision = json.loads(file.read_text(encoding="utf-8")).get("decision") or {}
    return str(decision.get("action", "undecided"))


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """The script seeds the generators of this process; they are put back."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_state(kept[2])


for name in ("warmup", "policy", "adversaries"):
    register(f"script_{name}", GROUP, "run", partial(script, name))
