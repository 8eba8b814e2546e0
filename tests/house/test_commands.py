"""Commands that the pages tell people to type are taken by the programs; quick ones are run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path

import pytest
import torch
from scripts.check_commands import Command, collected, commands, problem
from typer.testing import CliRunner

from report.real_runs import batch, build
from stepguard.cli.app import app

EVERY = collected()
RUN_FOR_REAL = ("report", "plot", "compare", "explain", "verify", "quarantine", "doctor")
"""Commands that take a moment on a small run. The others train, wait, or are run by tests/cli."""
MODEL = "from torch import nn\ndef build():\n    return nn.Linear(4, 4)\n"


@cache
def said(words: tuple[str, ...], page: str, whole: bool) -> str:
    return problem(Command(page, 0, words, whole))


def refused(part: str) -> list[str]:
    """Commands of the pages whose first word is this, and what is wrong with them."""
    found = []
    for command in EVERY:
        if command.words[0] == part:
            what = said(command.words, command.page, command.whole)
            if what:
                found.append(f"{command}: {what}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", ["stepguard", "pytest", "make", "pip", "torchrun", "accelerate", "python"]
)
def test_every_command_of_the_pages_is_taken(tool: str) -> None:
    assert [command for command in EVERY if command.words[0] == tool], "no page has such a command"
    assert refused(tool) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("stepguard guess runs/a", "no command guess"),
        ("stepguard report runs/a --colour", "--colour"),
        ("stepguard report", "RUN"),
        ("stepguard live runs/a --steps many", "--steps"),
        ("torchrun --nproc-per-node 2 -m stepguard guess train.py", "no command guess"),
        ("pytest tests/house/test_nothing.py", "does not exist"),
        ("make nothing", "no target nothing"),
        ("pip install '.[nothing]'", "no extra nothing"),
        ("python -m benchmarks.nothing", "no module"),
        ("python -m benchmarks.harmless --nothing", "--nothing"),
        ("python scripts/nothing.py", "does not exist"),
    ],
)
def test_a_command_that_would_be_refused_is_caught(line: str, reason: str) -> None:
    (command,) = commands("docs/page.md", f"```bash\n{line}  # why\n```")
    assert reason in problem(command)


def test_output_of_a_command_and_words_are_no_commands() -> None:
    text = (
        "```\n$ stepguard report a | head\nstepguard report: a\n```\n`make` it, `stepguard: error`"
    )
    (command,) = commands("docs/page.md", text)
    assert command.words == ("stepguard", "report", "a")


def test_a_script_of_a_recipe_has_to_be_there() -> None:
    (command,) = commands("recipes/sft/README.md", "```bash\npython homework/nothing.py a=1\n```")
    assert "nothing.py is neither" in problem(command)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the examples of the pages find what they name: runs, files, a module."""
    folder = tmp_path_factory.mktemp("examples")
    first = folder / "runs" / "a"
    _, guard, loss_fn = build(first)
    for number in range(12):
        guard.step(loss_fn, batch(number, bad=number == 8, rows=slice(2, 3)))
    guard.save()
    guard.close()
    for name in ("runs/b", "runs/demo", "runs/today", "runs/mine", "run"):
        shutil.copytree(first, folder / name)
    for name in ("outputs/mmdit", "outputs/mmdit-stable"):  # the example of a recipe
        shutil.copytree(first, folder / name)
    for name in (
        "model.pt",
        "checkpoint-500/pytorch_model.bin",
        "outputs/mmdit/latest/checkpoint.pt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weight": torch.ones(4, 4)}, folder / name)
    (folder / "train.yaml").write_text("lr: 1.0e-2\n", encoding="utf-8")
    (folder / "project").mkdir()
    (folder / "project" / "model.py").write_text(MODEL, encoding="utf-8")
    with chdir(folder):
        yield folder
    for name in ("project", "project.model"):
        sys.modules.pop(name, None)


def real() -> list[Command]:
    """Commands of fenced blocks that are run, each once."""
    found: dict[tuple[str, ...], Command] = {}
    for command in EVERY:
        words = command.words
        if command.whole and words[0] == "stepguard" and words[1] in RUN_FOR_REAL:
            found.setdefault(words, command)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", real(), ids=str)
def test_an_example_does_what_the_page_says(command: Command, prepared: Path) -> None:
    done = CliRunner().invoke(app, list(command.words[1:]))
    expected = 2 if "nothing" in command.words else 0  # the example of an error
    assert done.exit_code == expected, done.output
