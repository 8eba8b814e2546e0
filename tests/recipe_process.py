"""Recipes as their users run them: from their own folder, in a process of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"


def run(
    recipe: str, *arguments: str, module: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the recipe's folder, or `python -m MODULE ARGUMENTS` in the
    repository's.
    """
    command = [sys.executable, *(("-m", module) if module else ()), *arguments]
    return _ended(command, ROOT if module and module.startswith("recipes") else RECIPES / recipe)


def typed(folder: Path, line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A command line as it stands in a report, with the programs beside this interpreter.

    torchrun's `--standalone` comes from the environment: two tests at a time must not meet at its
    usual port.
    """
    return _ended([*shlex.split(line), *more], folder, PET_STANDALONE="1")


def _ended(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": programs}
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **paths, **variables, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
