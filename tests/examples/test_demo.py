"""The demo does what it says: the same training dies unguarded and survives guarded, and the run
can be looked at.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from examples.denoiser import LEVELS, Denoiser, batches, loss_of, quality

import stepguard
from examples import demo

pytestmark = pytest.mark.slow

STEPS = 90
FIRST_BAD = 57


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[demo.Outcome], Path]:
    """The demo, run once; what it printed and returned."""
    folder = tmp_path_factory.mktemp("demo") / "demo_run"
    seen: list[demo.Outcome] = []
    patch = pytest.MonkeyPatch()
    train = demo.train
    patch.setattr(demo, "train", lambda *args: seen.append(train(*args)) or seen[-1])
    try:
        code = demo.main(["--steps", str(STEPS), "--run-dir", str(folder)])
    finally:
        patch.undo()
    return code, seen, folder


def test_unguarded_dies_and_guarded_survives(shown: tuple[int, list[demo.Outcome], Path]) -> None:
    code, (unguarded, guarded, repaired), _ = shown
    assert code == 0
    assert (unguarded.alive, guarded.alive, repaired.alive) == (False, True, True)
    assert unguarded.first_bad == guarded.first_bad == FIRST_BAD and repaired.first_bad is None
    assert unguarded.nan_tensors >= unguarded.tensors - 1 and math.isnan(unguarded.decibels)
    assert (unguarded.committed, unguarded.skipped) == (FIRST_BAD, 0)
    assert (guarded.committed, guarded.skipped, guarded.left_out) == (STEPS, 0, 2)
    assert guarded.nan_tensors == 0
    assert guarded.decibels == pytest.approx(repaired.decibels, abs=2.0)


def test_guard_names_line_sample_and_cause(shown: tuple[int, list[demo.Outcome], Path]) -> None:
    guarded = shown[1][1]
    level = list(batches(STEPS, demo.SEED))[FIRST_BAD]["level"]
    first = guarded.incidents[0]
    assert first.step == FIRST_BAD and first.origin is not None
    assert first.origin.op == "aten.log" and first.origin.module == "level"
    assert first.origin.samples == tuple((level == 0).nonzero().flatten().tolist())
    assert first.findings[0].code == "SG202"


def test_recorded_step_can_be_replayed(shown: tuple[int, list[demo.Outcome], Path]) -> None:
    guarded, folder = shown[1][1], shown[2]
    again = stepguard.replay(folder / str(guarded.incidents[0].capsule), build=demo.rebuild)
    assert again.origin is not None and again.origin.reproduced and again.origin.op == "aten.log"


def test_earlier_demo_is_replaced_and_nothing_else_is_touched(tmp_path: Path) -> None:
    ours, theirs, file = tmp_path / "ours", tmp_path / "theirs", tmp_path / "file"
    assert demo.fresh_folder(ours) is None
    (ours / "journal.jsonl").write_text("old")
    assert demo.fresh_folder(ours) is None
    assert [p.name for p in ours.iterdir()] == [demo.MARKER]
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    file.write_text("x")
    for other in (theirs, file):
        assert "--run-dir" in str(demo.fresh_folder(other))
    assert (theirs / "thesis.tex").read_text() == "years of work" and file.read_text() == "x"


def test_foreign_folder_ends_the_demo_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    assert demo.main(["--steps", "1", "--run-dir", str(tmp_path)]) == 2


def test_guarded_run_that_dies_gives_a_failure_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "quality", lambda model: math.nan)
    assert demo.main(["--steps", "2", "--run-dir", str(tmp_path / "run")]) == 1


def test_failure_comes_from_the_data_and_nowhere_else() -> None:
    torch.manual_seed(0)
    model = Denoiser()
    seen = [
        (bool((b["level"] == 0).any()), bool(torch.isfinite(loss_of(model, b))))
        for b in batches(100, demo.SEED)
    ]
    assert all(zero != finite for zero, finite in seen) and any(zero for zero, _ in seen)
    assert math.isfinite(quality(model)) and LEVELS == 1000
