"""Messages for people as log records: their levels, and which handlers get them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from report.literals import MASKED_ROW, masked_row, note
from stepguard.report.sinks import LOGGER, LoggingSink


class Records(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@pytest.fixture
def handler() -> Iterator[Records]:
    """A handler of the logger `stepguard` itself, which logs from INFO on."""
    added = Records()
    before = LOGGER.level
    LOGGER.addHandler(added)
    LOGGER.setLevel(logging.INFO)
    yield added
    LOGGER.removeHandler(added)
    LOGGER.setLevel(before)


def _everything(sink: LoggingSink) -> None:
    sink.note("note", note("tracing", "tracing the next steps", 1))
    sink.note("note", note("spike", "the loss jumped", 2))
    sink.note("note", note("save-refused", "not saved", 3))
    sink.note("end", {"steps": 4})
    sink.incident(MASKED_ROW)
    sink.halted(masked_row(52, "stop"), "stepguard-exit: step=52")
    sink.note("fault", {"step": 5, "error": "RuntimeError: boom"})


@pytest.mark.parametrize("propagate", [True, False])
def test_levels_say_how_bad_it_is(handler: Records, propagate: bool) -> None:
    _everything(LoggingSink(propagate=propagate))
    assert [(record.levelname, record.kind) for record in handler.kept] == [  # type: ignore[attr-defined]
        ("INFO", "tracing"),
        ("WARNING", "spike"),
        ("WARNING", "save-refused"),
        ("WARNING", "nonfinite_loss"),
        ("ERROR", "halted"),
        ("ERROR", "halted"),
        ("ERROR", "fault"),
    ]
    assert handler.kept[3].getMessage() == (
        "step 48 skipped: loss is nan (text_loss); aten._softmax in encoder.layers.3.attn at "
        "model.py:88; sample 5; SG204"
    )
    assert handler.kept[3].step == 48  # type: ignore[attr-defined]


def test_root_handlers_get_messages_only_in_place_of_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        _everything(LoggingSink(propagate=False))
        assert caplog.records == []
        _everything(LoggingSink(propagate=True))
        assert len(caplog.records) == 7


def test_level_and_filters_of_the_logger_hold_for_its_own_handlers(handler: Records) -> None:
    handler.setLevel(logging.ERROR)
    only_faults = logging.Filter()
    only_faults.filter = lambda record: record.kind == "fault"  # type: ignore[assignment,attr-defined,method-assign]
    LOGGER.addFilter(only_faults)
    try:
        _everything(LoggingSink(propagate=False))
    finally:
        LOGGER.removeFilter(only_faults)
    assert [record.levelname for record in handler.kept] == ["ERROR"]


def test_message_names_its_guard_where_there_are_several(handler: Records) -> None:
    LoggingSink(propagate=False, whose=lambda: "optimizer 1").note("note", note("veto", "no", 1))
    assert handler.kept[0].getMessage() == "(optimizer 1) step 1: no"
