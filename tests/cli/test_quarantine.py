"""`stepguard quarantine DIR`: only the bad ones move, all come back, a crash in between loses
nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from check import hostile, saved
from stepguard.cli.app import app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    everything = saved.trained()
    saved.save_zip(folder / "good.pt", everything)
    saved.save_zip(folder / "bad.pt", {"w": torch.tensor([float("nan")])})
    saved.save_trainer(folder / "checkpoint-20", everything)
    broken = saved.save_trainer(folder / "checkpoint-40", everything)
    (broken / "optimizer.pt").write_bytes((broken / "optimizer.pt").read_bytes()[:-40])
    (folder / "too-large.pt").write_bytes(hostile.bomb(1 << 20))
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["quarantine", *map(str, words)])


def test_only_bad_ones_move_and_undo_brings_them_back(run: Path) -> None:
    before = snapshot(run)
    done = invoke(run)
    assert done.exit_code == 0, done.output
    after = snapshot(run)
    moved = {name for name in before if name not in after}
    assert moved == {"bad.pt"} | {name for name in before if name.startswith("checkpoint-40/")}
    assert all(after[f"quarantine/{name}"] == before[name] for name in moved)
    assert all(after[name] == before[name] for name in before if name not in moved)
    assert invoke(run, "--undo").exit_code == 0
    assert snapshot(run) == before


def test_manifest_says_why_and_from_where(run: Path) -> None:
    invoke(run)
    moves = {
        m["original"]: m
        for m in json.loads((run / "quarantine" / "manifest.json").read_text())["moves"]
    }
    assert moves.keys() == {"bad.pt", "checkpoint-40"}
    assert moves["bad.pt"]["reasons"][0].startswith("nan: w")
    assert len(moves["bad.pt"]["digests"]["bad.pt"]) == 32
    assert set(moves["checkpoint-40"]["digests"]) == {
        p.name for p in (run / "checkpoint-20").iterdir()
    }


def test_what_could_not_be_judged_is_left_alone_and_named(run: Path) -> None:
    done = invoke(run)
    assert (run / "too-large.pt").exists() and "too-large.pt" in done.stdout


def test_dry_run_moves_nothing_and_tells_by_its_exit_code(run: Path) -> None:
    before = snapshot(run)
    done = invoke(run, "--dry-run")
    assert done.exit_code == 4 and "would be moved" in done.stdout
    assert snapshot(run) == before


def test_second_call_finds_nothing_more(run: Path) -> None:
    invoke(run)
    done = invoke(run)
    assert done.exit_code == 0 and "0 moved" in done.stdout


def test_same_name_twice_is_numbered_and_both_come_back_in_turn(run: Path) -> None:
    invoke(run)
    saved.save_zip(run / "bad.pt", {"w": torch.tensor([float("inf")])})
    invoke(run)
    assert (run / "quarantine" / "bad.pt").exists() and (run / "quarantine" / "bad.pt.2").exists()
    done = invoke(run, "--undo")
    assert done.exit_code == 2 and "exists again" in done.output
    assert (run / "bad.pt").exists() and (run / "quarantine" / "bad.pt.2").exists()


def test_checkpoint_with_others_below_it_moves_without_them(tmp_path: Path) -> None:
    everything = saved.trained()
    saved.save_trainer(tmp_path / "out", everything)
    saved.save_trainer(tmp_path / "out" / "checkpoint-20", everything)
    broken = {**everything["state_dict"], "outer.bias": torch.tensor([float("nan")])}
    saved.save_safetensors(tmp_path / "out" / "model.safetensors", broken)
    assert invoke(tmp_path).exit_code == 0
    assert (tmp_path / "out" / "checkpoint-20" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "quarantine" / "out" / "model.safetensors").exists()


def test_folder_that_is_a_checkpoint_itself_is_refused(tmp_path: Path) -> None:
    folder = saved.save_trainer(tmp_path / "checkpoint-20", saved.trained())
    done = invoke(folder)
    assert done.exit_code == 2 and "folder above" in done.output


def test_link_to_a_bad_file_outside_is_never_moved(tmp_path: Path) -> None:
    outside = saved.save_zip(tmp_path / "bad.pt", {"w": torch.tensor([float("nan")])})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bad.pt").symlink_to(outside)
    assert invoke(tmp_path / "run").exit_code == 0
    assert outside.exists() and (tmp_path / "run" / "bad.pt").is_symlink()


def test_quarantine_folder_that_is_a_link_out_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / "quarantine").symlink_to(tmp_path / "elsewhere")
    before = {p.name for p in run.iterdir()}
    assert invoke(run).exit_code == 2
    assert {p.name for p in run.iterdir()} == before and not any((tmp_path / "elsewhere").iterdir())


def test_json_names_what_moved(run: Path) -> None:
    data = json.loads(invoke(run, "--json").stdout)
    assert {move["original"] for move in data["moved"]} == {"bad.pt", "checkpoint-40"}
    assert [Path(path).name for path in data["not_judged"]] == ["too-large.pt"]
    assert {
        move["original"]
        for move in json.loads(invoke(run, "--undo", "--json").stdout)["moved_back"]
    } == {
        "bad.pt",
        "checkpoint-40",
    }
