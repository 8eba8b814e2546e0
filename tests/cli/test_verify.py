"""`stepguard verify PATH...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from check import saved
from cli.journals import run_stepguard
from stepguard import Guard, GuardConfig, Snapshots, verify
from stepguard.cli.app import app


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return saved.save_zip(tmp_path / "good.pt", saved.trained())


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return saved.save_zip(tmp_path / "bad.pt", {"w.weight": torch.tensor([1.0, float("nan")])})


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, words)])


def test_good_checkpoint_is_exit_code_0(good: Path) -> None:
    done = invoke(good)
    assert done.exit_code == 0, done.output
    assert "good.pt" in done.stdout and "torch zip" in done.stdout and "1 good" in done.stdout


def test_corrupt_checkpoint_is_exit_code_4_and_says_where(good: Path, bad: Path) -> None:
    done = invoke(good, bad)
    assert done.exit_code == 4
    for words in ("w.weight", "parameter", "1 NaN of 2", "1 good, 1 corrupt"):
        assert words in done.stdout


def test_folder_lists_each_checkpoint(good: Path, bad: Path) -> None:
    done = invoke(good.parent)
    assert done.exit_code == 4 and "2 checkpoints, 1 good, 1 corrupt" in done.stdout


def test_json_is_one_strict_object(good: Path, bad: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    done = run_stepguard("verify", str(good.parent), "--json")
    assert done.returncode == 4 and done.stderr == ""
    data = json.loads(done.stdout, parse_constant=refuse)
    assert data["ok"] is False
    (folder,) = data["paths"]
    assert [part["ok"] for part in folder["parts"]] == [False, True]
    assert folder["parts"][0]["problems"][0]["tensor"] == "w.weight"


def test_missing_path_is_exit_code_2(tmp_path: Path) -> None:
    done = invoke(tmp_path / "nothing")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "does not exist" in done.stderr


def test_folder_without_checkpoints_is_exit_code_2_and_never_success(
    good: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    done = invoke(tmp_path / "empty")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "nothing to verify in" in done.stderr
    (tmp_path / "empty" / "notes.txt").write_text("no checkpoint")
    assert invoke(tmp_path / "empty").exit_code == 2


def test_empty_folder_among_others_is_told_beside_their_result(
    good: Path, bad: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    done = invoke(good, tmp_path / "empty")
    assert done.exit_code == 2 and "1 good" in done.stdout and "nothing to verify in" in done.stderr
    assert invoke(bad, tmp_path / "empty").exit_code == 4
    data = json.loads(invoke(good, tmp_path / "empty", "--json").stdout)
    assert data["ok"] is False and data["paths"][0]["ok"] is True


def test_other_learning_rate_is_exit_code_5(good: Path, tmp_path: Path) -> None:
    assert invoke(good, "--lr", "5e-4").exit_code == 0
    done = invoke(good, "--lr", "1e-4")
    assert done.exit_code == 5 and "OneCycleLR" in done.stdout
    config = tmp_path / "train.yaml"
    config.write_text("trainer:\n  lr: 1e-4  # peak\n  min_lr: 1e-6\n")
    assert invoke(good, "--config", config).exit_code == 5
    assert invoke(good, "--config", config, "--lr", "1").exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 10\n", "names no learning rate"),
        ("lr: 1\nhead:\n  lr: 2\n", "several"),
        ("", "names no"),
    ],
)
def test_configuration_without_one_rate_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    done = invoke(tmp_path, "--config", tmp_path / "c.yaml")
    assert done.exit_code == 2 and words in done.stderr


def test_output_in_a_pipe_is_plain_and_fits_a_narrow_window(bad: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(bad)], env={"COLUMNS": "60"})
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 60 for line in done.stdout.splitlines() if str(bad) not in line)


def test_diverged_run_is_told_alike_by_seals_verify_doctor_and_live(tmp_path: Path) -> None:
    """A warm-up without an end: what was learned is lost in the middle of the run."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    run = tmp_path / "run"
    config = GuardConfig(
        run_dir=run, checkpoint_every=10, snapshots=Snapshots(probation=5), terminal="quiet"
    )
    with Guard(model, optimizer, config=config) as guard:
        for step in range(120):
            optimizer.param_groups[0]["lr"] = 0.02 if step < 60 else 30.0
            x = torch.randn(16, 4)
            guard.step(lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), x)
    folder = run / "checkpoints"
    pointer = invoke(folder / "last-good")
    assert pointer.exit_code == 0 and "last-good -> step-" in pointer.stdout
    last_good = verify(folder / "last-good")
    assert last_good.step is not None and last_good.step <= 60
    diverged = [leaf for leaf in verify(run).leaves if leaf.diverged]
    assert diverged and min(leaf.step or 0 for leaf in diverged) >= 60
    # one judgement: nothing in between is left out, and nothing from after it is good
    done = invoke(diverged[-1].path)
    assert done.exit_code == 5 and "0 good, 1 diverged" in done.stdout
    doctor = CliRunner().invoke(app, ["doctor", str(run)])
    assert f"resume from {last_good.path}" in " ".join(doctor.stdout.split())
    live = CliRunner().invoke(app, ["live", str(run), "--once"])
    assert live.exit_code == 1 and "has diverged" in " ".join(live.stdout.split())
    notes = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert sum(note.get("kind") == "diverged" for note in notes) == 1
    assert not any("refused" in note for note in notes)
