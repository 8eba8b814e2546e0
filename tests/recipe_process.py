"""Recipes as their users run them: from their own folder, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"


def run(recipe: str, *arguments: str, module: str | None = None) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the recipe's folder, or `python -m MODULE ARGUMENTS` in the repository's."""
    command = [sys.executable, *(("-m", module) if module else ()), *arguments]
    return subprocess.run(
        command,
        cwd=ROOT if module and module.startswith("recipes") else RECIPES / recipe,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
