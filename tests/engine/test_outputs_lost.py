"""The protection outlives its recorder: what cannot be written costs that output, and the next NaN
is still vetoed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from scenes import LOOPS, Scene, batches, grouped, plain_net, poisoned, quiet
from stepguard import ConfigError, Guard
from stepguard.engine.protect import OutputLost
from stepguard.journal import read_run

SCRIPT = Path(__file__).with_name("full_disk_run.py")
DATA = batches(12)
TINY = (
    "mount -t tmpfs -o size=256k tmpfs {folder} && exec {python} {script} {mode} {folder}/out full"
)


def _small_file_system(folder: Path) -> bool:
    """May this process mount one, in a name space of its own?"""
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs -o size=64k tmpfs {folder}"]
    return subprocess.run(tried, capture_output=True, timeout=60).returncode == 0


def _run(command: list[str]) -> dict[str, Any]:
    search = os.pathsep.join([str(SCRIPT.parents[1]), *filter(None, sys.path)])
    known = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=known)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told["stderr"] = done.stderr
    return told


@pytest.mark.parametrize("mode", LOOPS)
def test_disk_that_is_full_costs_the_record_and_the_next_nan_is_still_vetoed(
    mode: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(SCRIPT), mode, str(tmp_path / "out"), "limit"]
    if _small_file_system(tmp_path):
        inner = TINY.format(folder=tmp_path, python=sys.executable, script=SCRIPT, mode=mode)
        command = ["unshare", "-Urm", "sh", "-c", inner]
    told = _run(command)
    assert told["same"] and told["finite"] and told["armed"]
    assert told["incidents"] == [4, 12]
    assert "OutputLost" in told["warned"] and "GuardDisarmed" not in told["warned"]
    assert "still protected" in told["stderr"] and "of its records are lost" in told["stderr"]


@pytest.mark.parametrize("mode", LOOPS)
def test_file_that_may_not_grow_leaves_no_half_line(mode: str, tmp_path: Path) -> None:
    told = _run([sys.executable, str(SCRIPT), mode, str(tmp_path / "out"), "limit"])
    assert told["same"] and told["armed"]
    record = read_run(tmp_path / "out" / "run")
    assert record.torn == 0
    assert [incident.step for incident in record.incidents] == [12]
    lost = [note["summary"] for note in record.notes if note.get("kind") == "journal"]
    assert len(lost) == 1 and "records are lost" in lost[0]
    for line in (tmp_path / "out" / "log" / "training_log.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("mode", LOOPS)
def test_folder_that_is_deleted_in_mid_run_is_made_again(mode: str, tmp_path: Path) -> None:
    told = _run([sys.executable, str(SCRIPT), mode, str(tmp_path / "out"), "deleted"])
    assert told["same"] and told["finite"] and told["armed"]
    assert told["incidents"] == [4, 12]
    assert [incident.step for incident in read_run(tmp_path / "out" / "run").incidents] == [4, 12]


@pytest.mark.parametrize("loop", LOOPS)
def test_journal_on_a_device_that_is_always_full_is_said_once(loop: str, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    model = plain_net()
    scene = Scene(model, torch.optim.AdamW(model.parameters()))
    bad = (poisoned(DATA[0]),)
    with pytest.warns(OutputLost, match=r"journal.*No space left.*still protected") as said:
        LOOPS[loop](
            scene, [*grouped(DATA, 1), bad, *grouped(DATA, 1), bad], quiet(run_dir=tmp_path)
        )
    assert len(said) == 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("setting", ["run_dir", "human_log"])
def test_folder_that_cannot_be_made_is_refused_at_building(setting: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=rf"GuardConfig\.{setting}=.*file/run' cannot be written"):
        Guard(model, optimizer, config=quiet(**{setting: tmp_path / "file" / "run"}))
    stepguard.watch(
        model, optimizer, config=quiet()
    ).close()  # nothing of the refused guard is left behind
