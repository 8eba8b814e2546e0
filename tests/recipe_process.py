"""Recipes as their users run them: from their own folder, in a process of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import forked

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"


def run(
    recipe: str, *arguments: str, module: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the recipe's folder, or `python -m MODULE ARGUMENTS` in the
    repository's.
    """
    words = [*(("-m", module) if module else ()), *arguments]
    folder = ROOT if module and module.startswith("recipes") else RECIPES / recipe
    return forked.python(words, folder=folder, variables=_variables(), seconds=280)


def typed(folder: Path, line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A command line as it stands in a report, with the programs beside this interpreter.

    torchrun's `--standalone` comes from the environment: two tests at a time must not meet at its
    usual port.
    """
    return subprocess.run(
        [*shlex.split(line), *more],
        cwd=folder,
        env={**_variables(), "PET_STANDALONE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _variables() -> dict[str, str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": programs}
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
