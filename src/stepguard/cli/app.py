"""The `stepguard` command. A new command is one new file and one line in COMMANDS.

A command imports torch, and everything that does, inside its function, so that `--help` and
`report` start at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from stepguard import __version__
from stepguard._errors import EXIT_HALTED, EXIT_USAGE, StepguardError, TrainingHalted
from stepguard.cli._results import echo
from stepguard.cli.agents import mcp, schema, skill
from stepguard.cli.check import check, doctor, quarantine, selftest, verify
from stepguard.cli.run import diff, fix, replay, run, whatif
from stepguard.cli.runs import compare, explain, live, look, plot, report, serve

COMMANDS: tuple[Callable[..., None], ...] = (
    run,
    report,
    plot,
    compare,
    live,
    serve,
    look,
    explain,
    replay,
    fix,
    whatif,
    diff,
    verify,
    quarantine,
    doctor,
    check,
    selftest,
    mcp,
    skill,
    schema,
)
"""The function's name is the command's name, its docstring the help, its parameters the options."""


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    """A flag takes no value, and typer would print `<bool>` beside it."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class PlainFlags(TyperCommand):
    """A command whose flags are listed without a type."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


class ErrorsInOneLine(TyperGroup):
    """What stepguard raises on purpose is printed as one line, never as a traceback."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StepguardError as error:
            echo(f"stepguard: error: {error}", err=True)
            code = EXIT_HALTED if isinstance(error, TrainingHalted) else EXIT_USAGE
            raise typer.Exit(code) from error


app = typer.Typer(
    name="stepguard",
    cls=ErrorsInOneLine,
    help="Keeps PyTorch training alive: detects, locates, explains and survives the bad step.",
    epilog="Exit codes: 0 fine, 1 your script failed, 2 usage, 3 the policy stopped the run, "
    "4 a checkpoint is corrupt, 5 a preflight check failed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PASSES_ARGUMENTS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}

for command in COMMANDS:
    settings = PASSES_ARGUMENTS_ON if command is run else None
    app.command(cls=PlainFlags, context_settings=settings)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"stepguard {__version__}")
        raise typer.Exit


@app.callback()
def stepguard(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options that stand before the command."""


def main() -> None:
    """Entry point of the `stepguard` script and of `python -m stepguard`."""
    app(prog_name="stepguard")
