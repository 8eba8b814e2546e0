"""The benchmark of guards inside frameworks writes what it promises. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.parts.framework_loops import QUICK, Clock

from benchmarks import frameworks


def test_quick_run_measures_a_loop_and_its_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "frameworks.json"
    assert frameworks.main(["--quick", "--only", "trainer", "--output", str(path)]) == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["loop"], row["control"]) for row in data["loops"]] == [
        ("trainer", True),
        ("trainer", False),
    ]
    for row in data["loops"]:
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
        assert row["milliseconds"] > 0
    assert "control" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["trainer", "lightning"])
def test_the_guard_is_gone_when_a_guarded_run_is_over(name: str) -> None:
    loop, backward = frameworks.LOOPS[name](QUICK), torch.Tensor.backward
    steps = loop.run(3, guarded=True)
    loop.close()
    assert len(steps) == 2
    assert torch.Tensor.backward is backward


def test_unknown_loop_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frameworks.main(["--only", "keras", "--output", str(tmp_path / "x.json")]) == 2
    assert "trainer" in capsys.readouterr().out


def test_a_clock_gives_every_step_but_the_last() -> None:
    clock = Clock()
    for _ in range(4):
        clock.mark()
    assert len(clock.take()) == 3
    assert clock.take() == []
