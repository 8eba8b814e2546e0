"""`stepguard run` of a script that the policy stopped, whatever wraps its main function."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.scripts import guarded, plain_script, write

HYDRA = """
import hydra
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    train()
main()
"""
CLICK = """
import click
@click.command()
def main():
    train()
main()
"""
TYPER = """
import typer
app = typer.Typer()
@app.command()
def main():
    train()
app()
"""
ABSL = """
from absl import app
app.run(lambda arguments: train())
"""
RECORD = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    train()
main()
"""
CATCH_ALL = """
import logging
try:
    train()
except Exception:
    logging.exception("training failed")
"""
ANOTHER = """
try:
    train()
except Exception as fault:
    raise RuntimeError("epoch failed") from fault
"""
WRAPPERS = {
    "hydra": HYDRA,
    "click": CLICK,
    "typer": TYPER,
    "absl": ABSL,
    "record": RECORD,
    "sys.exit(1)": "try:\n    train()\nexcept Exception as fault:\n    sys.exit(1)\n",
    "sys.exit(text)": "try:\n    train()\nexcept Exception as fault:\n    sys.exit(str(fault))\n",
    "catch-all": CATCH_ALL,
    "another exception": ANOTHER,
}


def in_a_function(script: str) -> str:
    head, loop = script.split("model = Net()")
    body = "".join(f"    {line}\n" for line in f"model = Net(){loop}".splitlines())
    return f"{head}def train():\n{body}"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_policy_stop_is_exit_code_3_whoever_catches_it(tmp_path: Path, wrapper: str) -> None:
    write(tmp_path, in_a_function(plain_script(steps=200, bad="range(2, 200)")) + WRAPPERS[wrapper])
    done = guarded(tmp_path, "train.py", PYTHONWARNINGS="ignore")
    assert done.returncode == 3, done.stderr
    assert "Stopping training" in done.stderr
    if (
        wrapper != "catch-all"
    ):  # logging takes the frames from the interpreter, not from the exception
        assert "stepguard/engine" not in done.stderr and "stepguard/guard.py" not in done.stderr


def test_a_script_that_ends_with_a_code_of_its_own_after_a_stop_keeps_it(tmp_path: Path) -> None:
    ending = "try:\n    train()\nexcept Exception:\n    sys.exit(42)\n"
    write(tmp_path, in_a_function(plain_script(steps=200, bad="range(2, 200)")) + ending)
    assert guarded(tmp_path, "train.py").returncode == 42


def test_a_failing_script_that_skipped_a_step_before_is_still_exit_code_1(tmp_path: Path) -> None:
    write(tmp_path, plain_script(bad="(2,)") + "raise RuntimeError('my own bug')\n")
    assert guarded(tmp_path, "train.py").returncode == 1
