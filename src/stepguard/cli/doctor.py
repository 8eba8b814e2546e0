"""`stepguard doctor DIR`: examine a run that will not train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_PREFLIGHT, ConfigError
from stepguard.cli._terminal import echo

if TYPE_CHECKING:
    from stepguard.records.examination import Examination

EXITS = {"corrupt": EXIT_CORRUPT, "failed": EXIT_PREFLIGHT}


def doctor(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The run's folder, or that of its checkpoints."),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="JSON, TOML, YAML or Python (read, not run)."
        ),
    ] = None,
    build: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function that returns the model, or (model, inputs)."
        ),
    ] = None,
    watch: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Show values of this name, such as '*gate*'."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Examine a run that will not train: its journal, capsules and checkpoints, and the exact next
    commands.
    """
    from stepguard.cli._checkpoint_results import Bar
    from stepguard.preflight.doctor import examine

    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the one that holds the run's checkpoints."
        )
    if build is not None and build.count(":") != 1:
        raise ConfigError(f"--build {build!r} must look like 'package.module:function'.")
    with Bar("verifying") as bar:
        found = examine(
            folder,
            config=config,
            build=build,
            watch=watch or [],
            plan=bar.plan,
            progress=bar.advance,
        )
    if all(section.status == "not checked" for section in found.sections[:-1]):
        raise ConfigError(
            f"nothing to examine in {folder}: it holds neither a journal nor a checkpoint. Give "
            "the folder of the run, or --config FILE, or --build MODULE:FUNCTION."
        )
    _show(found, as_json=as_json)
    raise typer.Exit(EXITS.get(found.status, EXIT_OK))


def _show(found: Examination, *, as_json: bool) -> None:
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import screen
    from stepguard.report.doctor import render_examination

    if as_json:
        echo(dumps({"status": found.status, **to_plain(found)}))
        return
    out = sys.stdout
    text = render_examination(
        found,
        width=screen.columns(out),
        colour=screen.wants_colour(out),
        unicode=screen.takes_unicode(out),
    )
    screen.put(text, out)
