"""The command as a whole, and commands that read runs: report, plot, compare, live."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from cli.journals import invoke, run_stepguard, write_run
from stepguard import __version__
from stepguard._errors import ConfigError, JournalError, TrainingHalted
from stepguard.cli.app import COMMANDS, app
from stepguard.cli.runs import follow
from stepguard.journal import Journal
from stepguard.records import Incident, Reading, Verdict
from stepguard.report.story import StoryReader

HALTED = TrainingHalted(
    Incident(id="x", step=3, verdict=Verdict(summary="loss is nan"), reading=Reading(step=3))
)


@pytest.fixture
def failing() -> Iterator[Callable[[Exception], None]]:
    """Adds a command `fail` that raises, and takes it away again."""
    before = list(app.registered_commands)

    def register(error: Exception) -> None:
        @app.command()
        def fail() -> None:
            raise error

    yield register
    app.registered_commands[:] = before


def test_help_names_every_command_and_the_exit_codes() -> None:
    assert run_stepguard("--version").stdout == f"stepguard {__version__}\n"
    done = invoke("--help")
    assert done.exit_code == 0
    for command in COMMANDS:
        assert command.__name__ in done.stdout
    assert "Exit codes: 0 fine" in done.stdout
    for command in ((), ("run",), ("report",)):
        assert "<bool>" not in invoke(*command, "--help").output


@pytest.mark.parametrize(
    "words", [[], ["no-such-command"], ["report"], ["report", "x", "--no-such-option"]]
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(words: list[str]) -> None:
    done = invoke(*words)
    assert done.exit_code == 2 and "Usage" in done.output


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("bad value"), 2), (JournalError("no journal"), 2), (HALTED, 3)]
)
def test_errors_of_stepguard_are_one_line(
    failing: Callable[[Exception], None], error: Exception, code: int
) -> None:
    failing(error)
    done = invoke("fail")
    assert done.exit_code == code
    assert done.stderr == f"stepguard: error: {error}\n"


def test_other_endings_pass_through(failing: Callable[[Exception], None]) -> None:
    failing(ZeroDivisionError("ours"))
    assert isinstance(invoke("fail").exception, ZeroDivisionError)
    app.registered_commands.pop()
    failing(typer.Exit(4))
    assert invoke("fail").exit_code == 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_report_shows_the_incident(run: Path) -> None:
    done = invoke("report", str(run))
    assert done.exit_code == 0, done.output
    for text in (
        "12 seen, 11 committed, 1 skipped",
        "SG204",
        "model.py:88",
        "0.0001",
        "clip_norm=1",
    ):
        assert text in done.stdout
    assert invoke("report", run / "journal.jsonl").exit_code == 0
    assert json.loads(invoke("report", run, "--json").stdout)["first_bad"] == 8
    with (run / "journal.jsonl").open("a") as file:
        file.write('{"v":1,"type":"st')
    torn = invoke("report", run)
    assert "warning: 1 line of the journal could not be read" in torn.stdout


@pytest.mark.parametrize("setting", [{}, {"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}])
def test_piped_report_is_plain(run: Path, setting: dict[str, str]) -> None:
    done = invoke("report", run, **setting)
    assert done.exit_code == 0 and "\x1b" not in done.stdout and done.stderr == ""


def test_markdown_goes_to_a_file_or_to_stdout(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.md"
    assert invoke("report", str(run), "--markdown", str(page)).exit_code == 0
    assert page.read_text(encoding="utf-8") == invoke("report", str(run), "--markdown", "-").stdout
    assert "SG204" in page.read_text(encoding="utf-8")


def test_folder_of_runs_is_listed(run: Path) -> None:
    write_run(run.parent / "group" / "other")
    done = invoke("report", str(run.parent))
    assert done.exit_code == 0, done.output
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["run", "state", "steps", "loss", "incidents", "last", "started"]
    assert [row.split()[0] for row in rows] == ["group/other", "run"]
    listed = invoke("report", str(run.parent), "--json")
    assert [one["incidents"] for one in json.loads(listed.stdout)["runs"]] == [1, 1]


@pytest.mark.parametrize("command", ["report", "plot"])
@pytest.mark.parametrize("text", ["import torch\nmodel = 1\n", "", '{"a": 1}\n[]\n'])
def test_file_that_is_no_journal_is_one_line_and_exit_code_2(
    tmp_path: Path, text: str, command: str
) -> None:
    (tmp_path / "vit.py").write_text(text)
    done = invoke(command, str(tmp_path / "vit.py"))
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "is not a journal of stepguard" in done.stderr


def test_reader_that_stops_early_is_no_traceback(run: Path) -> None:
    quoted = f"'{sys.executable}' -m stepguard report '{run}' | head -n 1"
    done = subprocess.run(["sh", "-c", quoted], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr


def _healthy(folder: Path, steps: int = 12) -> Path:
    journal = Journal(folder)
    journal.write("run", {"stepguard": "0.1.0"})
    for step in range(steps):
        journal.step(
            Reading(step=step, loss=2.0 - step / 10, grad_norm=0.5, lr=(1e-4,)), committed=True
        )
    journal.close()
    return folder


def test_live_gives_its_verdict_as_exit_code(tmp_path: Path) -> None:
    run = str(_healthy(tmp_path / "run"))
    healthy = invoke("live", run, "--steps", "12", "--stage", "0-11: loss<1, incidents=0")
    assert healthy.exit_code == 0, healthy.output
    assert "healthy" in healthy.stdout
    failed = invoke("live", run, "--steps", "12", "--stage", "0-11: loss<0.5")
    assert failed.exit_code == 1
    assert "unhealthy" in failed.stdout
    unknown = invoke("live", run, "--once", "--stage", "0-10: nosuch<3")
    assert unknown.exit_code == 1 and unknown.stdout.endswith("unhealthy\n")
    missing = "no step of this run has a value named 'nosuch'; it has loss"
    assert missing in " ".join(unknown.stdout.split())
    fresh = invoke("live", _healthy(tmp_path / "new", steps=0), "--once", "--json")
    expected = {"verdict": "waiting", "steps": 0, "incidents": 0, "concerns": [], "stages": []}
    assert fresh.exit_code == 0 and json.loads(fresh.stdout) == expected


def test_live_follows_lines_that_come_later_and_takes_no_half_line(tmp_path: Path) -> None:
    run = _healthy(tmp_path / "run", steps=3)
    path = run / "journal.jsonl"
    line = json.dumps({"v": 1, "type": "step", "step": 3, "loss": 1.0, "committed": True})
    pieces = [line[:10], line[10:] + "\n"]
    seen: list[int] = []
    follower = StoryReader(run)

    def wait(seconds: float) -> None:
        seen.append(len(follower.story().latest.steps))
        with path.open("a") as file:
            file.write(pieces.pop(0))

    assert follow(follower, [], 4, once=False, quiet=True, wait=wait).verdict == "healthy"
    assert seen == [3, 3]
    assert follower.story().torn == 0


def test_live_ends_quietly_on_ctrl_c(tmp_path: Path) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    assert (
        follow(
            StoryReader(tmp_path / "run"), [], None, once=False, quiet=True, wait=interrupted
        ).verdict
        == "waiting"
    )


def test_plot_works_in_a_process_of_its_own_without_torch(run: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_stepguard("plot", str(run), PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "matplotlib.figure" in imported and "torch" not in imported
    assert done.stdout == f"wrote {run / 'loss_curve.png'}\n"
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "nothing"), "does not exist; give a run directory"),
        (("report", "empty"), "holds no run; give a run directory"),
        (("report", "newer"), "schema 999"),
        (("report", "run", "--rank", "3"), "journal.rank3.jsonl does not exist"),
        (("report", "run", "--json", "--markdown", "x.md"), "--json and --markdown exclude each"),
        (
            ("report", "run", "--markdown", "no/such/x.md"),
            "cannot be written: No such",
        ),
        (("compare", "none", "none"), "does not exist"),
        (("live", "typo", "--once"), "does not exist"),
        (("live", "typo"), "does not exist; give a run directory"),
        (("live", "empty", "--once"), "does not exist"),
        (("live", "script.py", "--once"), "is not a journal of stepguard"),
        (("live", "run", "--stage", "nonsense"), "nonsense"),
        (
            ("plot", "run", "--out", "a.svg"),
            "does not end with .png; for a web page: stepguard report",
        ),
        (("plot", "begun"), "nothing to draw"),
        (("plot", "run"), "stepguard[plot]"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_exit_code_2(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(run.parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Path("empty").mkdir()
    Journal(Path("begun")).close()
    write_run(Path("newer"))
    Path("newer/journal.jsonl").write_text('{"v":999,"type":"step"}\n')
    Path("script.py").write_text("import torch\n")
    done = invoke(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("stepguard: error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_compare_prints_one_table_of_both_runs(tmp_path: Path) -> None:
    bad, good = write_run(tmp_path / "a"), _healthy(tmp_path / "b")
    done = invoke("compare", bad, good)
    assert done.exit_code == 0, done.stderr
    for words in ("11 of 12 committed", "12 of 12 committed", "SG204"):
        assert words in done.stdout
    told = invoke("compare", bad, bad, "--json").stdout
    rows = json.loads(told, parse_constant=pytest.fail)["rows"]
    assert all(row["first"] == row["second"] for row in rows)


def test_report_for_an_ascii_stream_is_ascii(run: Path) -> None:
    done = run_stepguard("report", str(run), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii(), done.stderr
