"""The readable log: greppable, linked, and safe to parse after any crash."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

import forked
from report.literals import BARE, INF, MASKED_ROW, NAN, masked_row, note
from stepguard.records import Decision, Reading, Verdict
from stepguard.report.sinks import HumanLog, drop_torn_line, step_line

NOON = datetime(2026, 3, 1, 12, 0, 5)
SNIPPET = """
import json
losses = []
with open('training_log.jsonl') as f:
    for line in f:
        losses.append(json.loads(line)['loss'])
import matplotlib.pyplot as plt
plt.plot(losses)
plt.yscale('log')
plt.savefig('loss_curve.png')
"""
"""Taken word for word from the report that asks for this file."""


def noon() -> datetime:
    return NOON


def reading(step: int, loss: float | None = 2.3412) -> Reading:
    return Reading(step=step, loss=loss, grad_norm=0.91, lr=(1e-4,), seconds=0.21)


def test_step_is_one_line_with_its_numbers() -> None:
    assert step_line(reading(12)) == "step 12 loss 2.3412 grad_norm 0.91 lr 1.00e-04 0.21s"


def test_step_line_leaves_out_what_was_not_seen() -> None:
    assert step_line(Reading(step=3)) == "step 3"
    assert step_line(Reading(step=3, loss=NAN, grad_norm=INF), committed=False) == (
        "step 3 loss nan grad_norm inf (not committed)"
    )
    assert step_line(Reading(step=3, grad_norm=1e-5)) == "step 3 grad_norm 1.00e-05"


def test_files_have_the_names_people_tail(tmp_path: Path) -> None:
    with HumanLog(tmp_path / "train_logs", 0, clock=noon) as log:
        log.step(reading(0))
        # read while the log is open: every line is flushed
        assert (tmp_path / "train_logs/latest.log").read_text().startswith("step 0 loss 2.3412")
    assert sorted(path.name for path in (tmp_path / "train_logs").iterdir()) == [
        "latest.log",
        "train_20260301-120005.log",
        "training_log.jsonl",
    ]
    assert (tmp_path / "train_logs/latest.log").readlink() == Path("train_20260301-120005.log")


def test_latest_names_the_newest_run_and_old_logs_stay(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        with HumanLog(tmp_path, 0, clock=noon) as log:
            log.step(reading(0, loss))
    assert (tmp_path / "latest.log").readlink() == Path("train_20260301-120005-2.log")
    assert (tmp_path / "latest.log").read_text().startswith("step 0 loss 2.0000")
    assert (tmp_path / "train_20260301-120005.log").read_text().startswith("step 0 loss 1.0000")
    assert len((tmp_path / "training_log.jsonl").read_text().splitlines()) == 2


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with HumanLog(tmp_path / "logs", 1) as log:
        log.step(reading(0))
        log.incident(MASKED_ROW)
        log.line("x")
    assert not (tmp_path / "logs").exists()


def test_invalid_loss_is_an_error_with_its_parts(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        log.incident(MASKED_ROW)
    assert (tmp_path / "latest.log").read_text().splitlines() == [
        "ERROR: Invalid loss at step 48: nan",
        "  text_loss: nan",
        "  latent_loss: 0.4123",
        "  loss is nan (text_loss)",
        "  origin: forward aten._softmax in encoder.layers.3.attn at model.py:88, sample 5",
        "  output: float32 [8,4,16,16]; nan at [5,0]; 1,024 NaN of 8,192; finite 0 to 1",
        "  cause: SG204 softmax over a fully masked row",
        "  lr: 4.92e-04 / 1.00e-04",
        "Skipping batch and resetting gradients",
        "  1 in a row, 1 in this run",
    ]


def test_bad_gradient_norm_is_an_error_in_both_wordings(tmp_path: Path) -> None:
    bad = replace(BARE, reading=Reading(step=7, grad_norm=INF), decision=Decision(action="skip"))
    with HumanLog(tmp_path, 0) as log:
        log.incident(bad)
    lines = (tmp_path / "latest.log").read_text().splitlines()
    assert lines[:2] == [
        "ERROR: NaN/Inf gradient norm at step 7",
        "ERROR: Invalid gradient norm: inf",
    ]
    assert "Skipping batch and resetting gradients" in lines


@pytest.mark.parametrize(
    "kind", ["nonfinite_parameter", "spike", "drift", "nonfinite_buffer", "scaler_collapse"]
)
def test_every_incident_has_a_line_that_starts_with_error(tmp_path: Path, kind: str) -> None:
    verdict = Verdict(kind=kind, severity="incident", summary="what is wrong")  # type: ignore[arg-type]
    with HumanLog(tmp_path, 0) as log:
        log.incident(replace(BARE, verdict=verdict))
    text = (tmp_path / "latest.log").read_text()
    assert text.startswith("ERROR: ") and "at step 7" in text and "  what is wrong" in text


def test_stop_says_that_training_stops(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        log.incident(masked_row(9, "stop"))
    assert "Stopping training to prevent corruption..." in (tmp_path / "latest.log").read_text()


def test_healthy_run_has_no_error_line(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        for step in range(5):
            log.step(reading(step))
        log.note("note", note("scale_calibration", "GradScaler calibration", 5))
    text = (tmp_path / "latest.log").read_text()
    assert "ERROR" not in text
    assert text.endswith("note at step 5: loss-scale calibration: GradScaler calibration\n")


def test_disarmed_guard_is_an_error_and_lines_for_programs_are_left_out(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        log.note("end", {"steps": 5})
        log.note("fault", {"step": 5, "error": "RuntimeError: boom"})
    assert (tmp_path / "latest.log").read_text() == (
        "ERROR: the guard failed and is disarmed; training goes on unguarded: RuntimeError: boom\n"
    )


def test_every_step_is_a_strict_json_object_with_a_loss(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with HumanLog(tmp_path, 0, clock=noon) as log:
        for step, loss in enumerate((2.5, NAN, INF, None)):
            log.step(
                replace(reading(step, loss), components={"text_loss": NAN}), committed=loss == 2.5
            )
    lines = (tmp_path / "training_log.jsonl").read_text().splitlines()
    objects = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [line["loss"] for line in objects] == [2.5, None, None, None]
    assert [line.get("loss_kind") for line in objects] == [None, "nan", "inf", None]
    assert objects[0]["committed"] is True and objects[1]["committed"] is False
    assert objects[0]["time"] == "2026-03-01T12:00:05"


def test_snippet_of_the_report_works_word_for_word(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with HumanLog(tmp_path, 0) as log:
        for step, loss in enumerate((2.5, NAN, 1.5, INF, 1.0)):
            log.step(reading(step, loss))
    env = {**os.environ, "MPLBACKEND": "Agg"}
    forked.python(["-c", SNIPPET], folder=tmp_path, variables=env).check_returncode()
    assert (tmp_path / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_half_a_line_of_a_crash_is_dropped_before_the_next_run(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        log.step(reading(0))
    steps = tmp_path / "training_log.jsonl"
    with steps.open("a") as file:
        file.write('{"step":1,"lo')
    with HumanLog(tmp_path, 0) as log:
        log.step(reading(2))
    assert [json.loads(line)["step"] for line in steps.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"a\n", b"a\n"),
        (b"a\nb", b"a\n"),
        (b"torn", b""),
        (b"a\n" + b"b" * 9000, b"a\n"),
    ],
)
def test_torn_end_is_found_at_any_length(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(before)
    drop_torn_line(path)
    assert path.read_bytes() == after


def test_lines_survive_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from stepguard.records import Reading\n"
        "from stepguard.report import HumanLog\n"
        "log = HumanLog(sys.argv[1], 0)\n"
        "for step in range(3): log.step(Reading(step=step, loss=1.0))\n"
        "os._exit(9)\n"
    )
    done = forked.python(["-c", code, str(tmp_path)])
    assert done.returncode == 9
    assert len((tmp_path / "latest.log").read_text().splitlines()) == 3
    assert len((tmp_path / "training_log.jsonl").read_text().splitlines()) == 3
