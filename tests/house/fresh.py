"""Run something in a fresh interpreter and see what it imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import stepguard

HEAVY = frozenset({"torch", "numpy", "pandas", "matplotlib"})
FRAMEWORKS = frozenset(
    [
        "transformers",
        "accelerate",
        "lightning",
        "pytorch_lightning",
        "peft",
        "trl",
        "datasets",
        "wandb",
        "mlflow",
        "tensorboard",
        "hydra",
        "omegaconf",
        "matplotlib",
        "starlette",
        "uvicorn",
        "prometheus_client",
    ]
)
"""Each is made importable as an empty package, so that importing one shows even where it is not
installed.
"""
_RUNNER = """
import json, runpy, sys
where, mode, *words = sys.argv[1:]
code = 0
try:
    if mode == "cli":
        sys.argv = ["stepguard", *words]
        runpy.run_module("stepguard", run_name="__main__", alter_sys=True)
    else:
        exec(words[0])
except SystemExit as stop:
    code = stop.code or 0
with open(where, "w") as out:
    names = sorted({name.partition(".")[0] for name in sys.modules})
    json.dump({"code": code, "modules": names}, out)
"""


@dataclass(frozen=True, slots=True)
class Fresh:
    """The end of a fresh interpreter: its exit code, top-level modules, and what it printed."""

    code: int
    modules: frozenset[str]
    stdout: str
    stderr: str


def run_cli(folder: Path, *words: str) -> Fresh:
    """`python -m stepguard WORDS`."""
    return _run(folder, "cli", *words)


def run_code(folder: Path, code: str) -> Fresh:
    return _run(folder, "code", code)


def _run(folder: Path, *words: str) -> Fresh:
    stubs = folder / "stubs"
    for name in FRAMEWORKS:
        (stubs / name).mkdir(parents=True, exist_ok=True)
        (stubs / name / "__init__.py").touch()
    where = folder / "modules.json"
    where.unlink(missing_ok=True)
    path = os.pathsep.join([str(Path(stepguard.__file__).parents[1]), str(stubs)])
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER, str(where), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(where.read_text())
    return Fresh(seen["code"], frozenset(seen["modules"]), done.stdout, done.stderr)
