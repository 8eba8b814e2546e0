"""The fan-out: every output gets every event, and one that fails costs only itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from report.literals import MASKED_ROW
from stepguard import GuardConfig
from stepguard.engine.protect import Output, OutputLost, Outputs, SinkDropped, add_people_outputs
from stepguard.journal import Journal, read_run
from stepguard.records import Reading, Sink


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


def test_note_reaches_every_output_with_the_present_step_or_the_given_one() -> None:
    outputs = Outputs(lambda: 7)
    first, second = Memory(), Memory()
    outputs.add(first, "log", "the log")
    outputs.add_user_sink(second)
    outputs.note("loader", "it is empty")
    outputs.note("loader", "it was empty", step=3)
    assert first.got == second.got
    assert first.got == ["note loader 7: it is empty", "note loader 3: it was empty"]


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


def test_closed_outputs_tell_sinks_of_the_user_nothing_more(tmp_path: Path) -> None:
    outputs = Outputs()
    sink = Memory()
    outputs.add_user_sink(sink)
    outputs.add_journal(Journal(tmp_path))
    outputs.step(Reading(step=0, loss=1.0), committed=True)
    outputs.close()
    assert sink.got == ["step 0"]
    assert [line["step"] for line in read_run(tmp_path).steps] == [0]


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
