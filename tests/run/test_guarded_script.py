"""The exit code of a guarded script, and what is printed at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard import GuardConfig
from stepguard.run.guarded_script import run_script

QUIET = GuardConfig(terminal="quiet")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("x = 1", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('no data')", 1),
        ("raise ValueError('bad')", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_exit_code_is_that_of_the_script(tmp_path: Path, source: str, code: int) -> None:
    (tmp_path / "train.py").write_text(source)
    assert run_script(str(tmp_path / "train.py"), [], QUIET) == code


def test_traceback_has_only_frames_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('bad')\nf()\n")
    run_script(str(tmp_path / "train.py"), [], QUIET)
    printed = capsys.readouterr().err
    assert "ValueError: bad" in printed and printed.count("train.py") == 2
    assert "guarded_script.py" not in printed


def test_swallowed_stop_is_still_exit_code_3(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from stepguard import TrainingHalted\n"
        "from stepguard.records import Incident, Reading, Verdict\n"
        "verdict = Verdict(kind='spike', severity='incident')\n"
        "incident = Incident(id='i', step=0, verdict=verdict, reading=Reading(step=0))\n"
        "try:\n    raise TrainingHalted(incident)\n"
        "except TrainingHalted:\n    raise SystemExit(1)\n"
    )
    assert run_script(str(tmp_path / "train.py"), [], QUIET) == 3


REFUSED = """
import torch
class Engine(torch.optim.SGD):
    pass
Engine.__module__ = "deepspeed.runtime"
model = torch.nn.Linear(1, 1)
optimizer = Engine(model.parameters(), lr=0.1)
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "the script made none that stepped"),
        (REFUSED, "for the reason above"),
        ("raise SystemExit(7)", ""),
    ],
)
def test_end_of_a_run_without_guards_says_why(
    source: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(source)
    run_script(str(tmp_path / "train.py"), [], QUIET)
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1] if said else lines == []
