"""Text from files cannot control a terminal, nor become HTML in Markdown; readers stay bounded."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from benchmarks.parts.fuzz import named
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli.journals import write_run
from stepguard._errors import ConfigError, JournalError, StepguardError
from stepguard.cli.app import app
from stepguard.records import GuardConfig
from stepguard.records.codec import dumps, mask_settings, masked, printable
from stepguard.report import story as readers
from stepguard.report.sinks import WebhookSink
from stepguard.report.story import read_story

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe"
COMMANDS = (
    ["report"],
    ["report", "--json"],
    ["report", "--markdown"],
    ["live", "--once"],
    ["look"],
    ["doctor"],
    ["quarantine", "--data"],
)


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def planted(value: Any, text: str) -> Any:
    """The same record with `text` in every string, its type and its kinds kept."""
    if isinstance(value, dict):
        fixed = ("type", "kind", "severity", "phase", "certainty", "action", "method", "id")
        return {k: v if k in fixed else planted(v, text) for k, v in value.items()}
    if isinstance(value, list):
        return [planted(one, text) for one in value]
    return f"{value}{text}" if isinstance(value, str) else value


@pytest.fixture
def escaping(tmp_path: Path) -> Path:
    run = write_run(tmp_path / f"run{ESCAPE}")
    lines = (run / "journal.jsonl").read_text().splitlines()
    written = [json.dumps(planted(json.loads(line), ESCAPE)) for line in lines]
    (run / "journal.jsonl").write_text("\n".join(written) + "\n")
    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_escape_sequence_reaches_the_terminal(escaping: Path, command: list[str]) -> None:
    shown = invoke(command[0], escaping, *command[1:])
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    assert shown.output and not set("\x1b\x07\x9b\u202e") & set(shown.output)


MARKUP = "[link=http://x]a[/link] [/] [bold \x1b]8;;http://x\x1b\\b \u2066c" + "d" * 20_000


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_markup_and_links_stay_text(tmp_path: Path, command: list[str]) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "journal.jsonl").read_text().splitlines()
    written = [json.dumps(planted(json.loads(line), MARKUP)) for line in lines]
    (run / "journal.jsonl").write_text("\n".join(written) + "\n")
    shown = invoke(command[0], run, *command[1:])
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    assert shown.output and not set("\x1b\u2066") & set(shown.output)


@pytest.mark.parametrize("command", ["verify", "report", "replay", "plot", "live", "quarantine"])
def test_names_of_files_do_not_either(tmp_path: Path, command: str) -> None:
    path = tmp_path / f"a{ESCAPE}"
    path.write_bytes(b"\x80\x02cposix\nsystem\n.")
    shown = invoke(command, path, *(["--once"] if command == "live" else []))
    assert not set("\x1b\x07\x9b\u202e") & set(shown.output)


def test_printable_keeps_what_people_write() -> None:
    text = "größe 模型 \U0001f525 a\u00a0b\n\tx"
    assert printable(text) == text
    assert printable(ESCAPE) == "?]0;owned??[2J?31m?gnp.exe"
    assert json.loads(dumps({"a": ESCAPE})) == {"a": ESCAPE} and "\x9b" not in dumps({"a": ESCAPE})


def test_markdown_is_one_fence_that_no_text_can_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "journal.jsonl").read_text().splitlines()
    written = [json.dumps(planted(json.loads(line), "a\n```\n<img src=x>")) for line in lines]
    (run / "journal.jsonl").write_text("\n".join(written) + "\n")
    shown = invoke("report", run, "--markdown", "-").stdout
    assert "<img" in shown and shown.startswith("```text\n") and shown.endswith("\n```\n")
    assert shown.count("```") == 2


def test_header_of_wrong_types_is_no_traceback(tmp_path: Path) -> None:
    header = {
        "v": 1,
        "type": "run",
        "time": "x",
        "world": [],
        "lr": {"a": 1},
        "config": 3,
        "run": 7,
    }
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").write_text(json.dumps(header) + '\n{"v":1,"type":"step","step":0}\n')
    for command in COMMANDS:
        shown = invoke(command[0], run, *command[1:])
        assert shown.exception is None or isinstance(shown.exception, SystemExit)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        "step",
        "loss",
        "lr",
        "time",
        "world",
        "run",
        "attempt",
        "components",
        "incident",
        "look",
        "summary",
        "kind",
        "committed",
        "config",
        "refused",
        "to",
        "checkpoint",
        "error",
        "fields",
    ]
)
SETTINGS = st.sampled_from([*GuardConfig.__dataclass_fields__, "x"])
KINDS = st.sampled_from(["run", "step", "note", "incident", "look", "end", "rewind", "checkpoint"])


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(st.tuples(KINDS, st.dictionaries(KEYS, JSON, max_size=6)), max_size=12))
def test_journal_of_anything_gives_a_report(
    lines: list[tuple[str, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("run")
    text = "\n".join(json.dumps({"v": 1, "type": kind, **fields}) for kind, fields in lines)
    (run / "journal.jsonl").write_text(text + "\n")
    for command in (["report"], ["report", "--markdown"], ["live", "--once"]):
        shown = invoke(command[0], run, *command[1:])
        assert shown.exception is None or isinstance(shown.exception, SystemExit), lines


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    content=st.dictionaries(
        st.sampled_from([*GuardConfig.__dataclass_fields__, "x"]), JSON, max_size=4
    )
)
def test_config_file_of_anything_is_a_config_or_one_error(
    content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("config") / "guard.json"
    path.write_text(json.dumps(content))
    try:
        GuardConfig.from_file(path)
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("guard.json", json.dumps({"policy": {"\n": None}})),
        ("guard.json", json.dumps({"run_dir\nx": "a"})),
        ("guard.yaml", '"a\\nb": "1e-4\\n"\n'),
        ("guard.yaml", "policy:\n  1: 2\n"),
        ("guard.yaml", "1: 2\n"),
    ],
)
def test_name_that_is_not_a_word_is_one_line_of_error(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"is not known\.") as raised:
        GuardConfig.from_file(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_many_starts_are_grouped_in_linear_work(tmp_path: Path) -> None:
    """Counted, not timed: twice the starts take twice the lines of Python."""
    assert _work(tmp_path / "many", 400) < 2.2 * _work(tmp_path / "some", 200)


def _work(folder: Path, starts: int) -> int:
    folder.mkdir()
    for rank in ("", ".rank1"):
        with (folder / f"journal{rank}.jsonl").open("w") as file:
            for start in range(starts):
                file.write(f'{{"v":1,"type":"run","time":{start},"run":"r{start}","world":2}}\n')
                file.write('{"v":1,"type":"step","step":0}\n')
    executed = 0

    def trace(*_: object) -> object:
        nonlocal executed
        executed += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        runs = read_story(folder).runs
    finally:
        sys.settrace(before)
    assert len(runs) == starts
    return executed


def test_line_without_an_end_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "CHUNK", 1 << 16)
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 17)
    run = write_run(tmp_path / "run")
    rows = len(read_story(run).latest.steps)
    with (run / "journal.jsonl").open("ab") as file:
        file.truncate(file.tell() + (64 << 20))  # a sparse line of 64 MiB
        file.seek(0, 2)
        file.write(b'\n{"v":1,"type":"step","step":12}\n')
    tracemalloc.start()
    story = read_story(run)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(story.latest.steps) == rows + 1 and story.torn == 1
    assert peak < 8 << 20


@pytest.mark.parametrize("how", ["replaced", "cut", "rewritten"])
def test_journal_that_is_replaced_while_it_is_read_is_started_over(
    tmp_path: Path, how: str
) -> None:
    run = write_run(tmp_path / "run")
    reader = readers.StoryReader(run)
    reader.read()
    before = len(reader.story().latest.steps)
    path = run / "journal.jsonl"
    new = '{"v":1,"type":"run","run":"other"}\n{"v":1,"type":"step","step":0}\n'
    if how == "rewritten":
        new += '{"v":1,"type":"step","step":1}\n' * 4000
    if how == "replaced":
        (run / "new").write_text(new)
        (run / "new").replace(path)
    else:
        path.write_text(new)
    assert reader.read() and reader.restarts == 1
    assert reader.story().latest.id == "other"
    assert len(reader.story().latest.steps) != before


def test_linked_journal_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    write_run(tmp_path / "secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").symlink_to(tmp_path / "secret" / "journal.jsonl")
    with pytest.raises(JournalError):
        read_story(tmp_path / "run")


def test_secret_options_are_masked() -> None:
    line = [
        "--lr",
        "3",
        "--api-key",
        "S",
        "--token=S",
        "wandb.api_key=S",
        "--tokenizer",
        "gpt2",
        "--hub_token",
        "S",
        "--password",
        "S",
        "--keyboard",
        "us",
        "--secret",
    ]
    assert "S" not in masked(line) and masked(line).count("***") == 3
    assert "gpt2" in masked(line) and "us" in masked(line) and "--token=***" in masked(line)
    assert mask_settings({"a": {"wandb_key": "S"}, "key_words": "b"}) == {
        "a": {"wandb_key": "***"},
        "key_words": "b",
    }


@pytest.mark.parametrize(
    "url", ["https://host/SECRET here", "https://host/\nSECRET", "ftp://SECRET"]
)
def test_webhook_address_that_cannot_be_used_is_not_repeated(url: str) -> None:
    with pytest.raises(StepguardError) as caught:
        WebhookSink(url)
    assert "SECRET" not in str(caught.value)


def test_error_about_a_pickled_object_names_its_class_and_no_address(tmp_path: Path) -> None:
    built = named("torch.nn", "Linear") + b")\x81"
    for value in (built, b"](" + built + b"e"):
        path = tmp_path / "model.pt"
        path.write_bytes(b"\x80\x04" + named("numpy", "dtype") + value + b"\x85R.")
        detail = " ".join(invoke("verify", path).output.split())
        assert "an object of torch.nn.Linear" in detail and "0x" not in detail
