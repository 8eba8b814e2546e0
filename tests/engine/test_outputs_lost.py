"""Every output gets every event; what cannot be written costs that output, and the next NaN is
still vetoed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import stepguard
from report.literals import MASKED_ROW
from scenes import LOOPS, Scene, batches, grouped, plain_net, poisoned, quiet
from stepguard import ConfigError, Guard, GuardConfig
from stepguard.engine.protect import Output, OutputLost, Outputs, SinkDropped, add_people_outputs
from stepguard.journal import read_run
from stepguard.records import Reading, Sink

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


def _run(mode: str, folder: Path, how: str) -> dict[str, Any]:
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(forked.PATHS)}
    if how == "full" and _small_file_system(folder):
        inner = TINY.format(folder=folder, python=sys.executable, script=SCRIPT, mode=mode)
        command = ["unshare", "-Urm", "sh", "-c", inner]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=known)
    else:
        limit = "limit" if how == "full" else how
        words = [str(SCRIPT), mode, str(folder / "out"), limit]
        done = forked.python(words, variables=known, seconds=240)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told["stderr"] = done.stderr
    return told


@pytest.mark.parametrize("mode", LOOPS if forked.FULL else ["watch"])
def test_disk_that_is_full_costs_the_record_and_the_next_nan_is_still_vetoed(
    mode: str, tmp_path: Path
) -> None:
    told = _run(mode, tmp_path, "full")
    assert told["same"] and told["finite"] and told["armed"]
    assert told["incidents"] == [4, 12]
    assert "OutputLost" in told["warned"] and "GuardDisarmed" not in told["warned"]
    assert "still protected" in told["stderr"] and "of its records are lost" in told["stderr"]


@pytest.mark.parametrize("mode", LOOPS if forked.FULL else ["step"])
def test_file_that_may_not_grow_leaves_no_half_line(mode: str, tmp_path: Path) -> None:
    told = _run(mode, tmp_path, "limit")
    assert told["same"] and told["armed"]
    record = read_run(tmp_path / "out" / "run")
    assert record.torn == 0
    assert [incident.step for incident in record.incidents] == [12]
    lost = [note["summary"] for note in record.notes if note.get("kind") == "journal"]
    assert len(lost) == 1 and "records are lost" in lost[0]
    for line in (tmp_path / "out" / "log" / "training_log.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("mode", LOOPS if forked.FULL else ["watch"])
def test_folder_that_is_deleted_in_mid_run_is_made_again(mode: str, tmp_path: Path) -> None:
    told = _run(mode, tmp_path, "deleted")
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


# --- the fan-out


class Memory(Sink):
    """Keeps the texts it is given, and fails while `broken`."""

    def __init__(self, *, broken: bool = False) -> None:
        self.got: list[str] = []
        self.broken = broken

    def step(self, reading: Reading, committed: bool) -> None:
        self._keep(f"step {reading.step}")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._keep(f"{kind} {fields.get('kind')} {fields.get('step')}: {fields.get('summary')}")

    def _keep(self, text: str) -> None:
        if self.broken:
            raise OSError("gone")
        self.got.append(text)


def test_output_that_fails_is_tried_less_and_less_and_says_what_was_lost() -> None:
    said: list[str] = []
    tries: list[int] = []

    class Log(Memory):
        def step(self, reading: Reading, committed: bool) -> None:
            tries.append(reading.step)
            super().step(reading, committed)

    log = Log(broken=True)
    output = Output(log, "the log", said.append)
    with pytest.warns(OutputLost, match="the log cannot be written: OSError: gone"):
        for number in range(200):
            output.step(Reading(step=number), True)
    assert tries == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    log.broken = False
    output.put(lambda sink: sink.note("note", {}))
    assert said[1:] == ["the log can be written again; 200 of its records are lost"]


def test_loss_of_an_output_is_said_once_to_those_that_are_left() -> None:
    outputs = Outputs(lambda: 7)
    lost, left = Memory(broken=True), Memory()
    outputs.add(lost, "log", "the log")
    outputs.add(left, "journal", "the journal")
    with pytest.warns(OutputLost) as warned:
        outputs.note("loader", "one")
        outputs.note("loader", "two")
    assert len(warned) == 1
    assert [text for text in left.got if "cannot be written" in text] == [
        "note log 7: the log cannot be written: OSError: gone. The run is still protected"
    ]
    lost.broken = False
    outputs.note("loader", "three")
    again = "note log 7: the log can be written again; 2 of its records are lost"
    assert again in left.got and again in lost.got


def test_sink_of_the_user_is_dropped_at_its_first_failure() -> None:
    outputs = Outputs()
    lost, left = Memory(broken=True), Memory()
    outputs.add_user_sink(lost)
    outputs.add_user_sink(left)
    with pytest.warns(SinkDropped, match="Memory failed and is dropped"):
        outputs.note("loader", "one")
    lost.broken = False
    outputs.note("loader", "two")
    assert lost.got == []
    assert [text.partition(": ")[2] for text in left.got][1:] == ["one", "two"]


@pytest.mark.parametrize(("rank", "terminal"), [(1, "auto"), (0, "quiet"), (0, "logging")])
def test_other_ranks_and_other_settings_print_nothing(
    rank: int, terminal: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = Outputs()
    add_people_outputs(outputs, GuardConfig(terminal=terminal), rank, str)
    _tell_everything(outputs)
    assert capsys.readouterr() == ("", "")


def test_default_prints_every_message_once_although_logging_is_set_up(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    outputs = Outputs()
    add_people_outputs(outputs, GuardConfig(), 0, str)
    with caplog.at_level("DEBUG"):
        _tell_everything(outputs)
    assert capsys.readouterr().err.count("it is empty") == 1
    assert caplog.records == []  # the handler of the root logger would have printed it again


def _tell_everything(outputs: Outputs) -> None:
    outputs.note("loader", "it is empty")
    outputs.line("fault", {"step": 1, "error": "RuntimeError: boom"})
    outputs.incident(MASKED_ROW)
    outputs.halted(MASKED_ROW, "stepguard-exit: step=48")
