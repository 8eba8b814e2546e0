"""The command as a whole: help, version, exit codes, and errors in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import typer
from typer.testing import CliRunner

from cli.journals import run_stepguard
from stepguard import __version__
from stepguard._errors import ConfigError, JournalError, TrainingHalted
from stepguard.cli.app import COMMANDS, app
from stepguard.records import Incident, Reading, Verdict

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


def test_version() -> None:
    done = run_stepguard("--version")
    assert (done.returncode, done.stdout) == (0, f"stepguard {__version__}\n")


def test_help_names_every_command_and_the_exit_codes() -> None:
    done = run_stepguard("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert command.__name__ in done.stdout
    assert "Exit codes: 0 fine" in done.stdout


@pytest.mark.parametrize("command", [[], ["run"], ["report"]])
def test_flags_are_listed_without_a_type(command: list[str]) -> None:
    assert "<bool>" not in CliRunner().invoke(app, [*command, "--help"]).output


def test_no_command_shows_the_help_and_is_a_usage_error() -> None:
    done = run_stepguard()
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words", [["no-such-command"], ["report"], ["report", "x", "--no-such-option"]]
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(words: list[str]) -> None:
    done = run_stepguard(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("bad value"), 2), (JournalError("no journal"), 2), (HALTED, 3)]
)
def test_errors_of_stepguard_are_one_line(
    failing: Callable[[Exception], None], error: Exception, code: int
) -> None:
    failing(error)
    done = CliRunner().invoke(app, ["fail"])
    assert done.exit_code == code
    assert done.stderr == f"stepguard: error: {error}\n"


def test_other_errors_are_not_hidden(failing: Callable[[Exception], None]) -> None:
    failing(ZeroDivisionError("ours"))
    assert isinstance(CliRunner().invoke(app, ["fail"]).exception, ZeroDivisionError)


def test_exit_codes_of_a_command_pass_through(failing: Callable[[Exception], None]) -> None:
    failing(typer.Exit(4))
    assert CliRunner().invoke(app, ["fail"]).exit_code == 4
