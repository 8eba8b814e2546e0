"""`stepguard doctor DIR`: configuration, checkpoints, fresh model, forward pass, watched values,
recommendations.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepguard._errors import EXIT_CORRUPT, EXIT_OK, EXIT_PREFLIGHT, ConfigError

EXITS = {"corrupt": EXIT_CORRUPT, "failed": EXIT_PREFLIGHT}


def doctor(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder with the run's checkpoints.")
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
        typer.Option(metavar="PATTERN", help="Names of values to show; by default *alpha*."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Examine a run that will not train: six sections from the configuration to the exact next
    commands.
    """
    from stepguard.cli.examination import examine

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the one that holds the run's checkpoints.")
    if build is not None and build.count(":") != 1:
        raise ConfigError(f"--build {build!r} must look like 'package.module:function'.")
    found = examine(folder, config=config, build=build, watch=watch or ["*alpha*"])
    seen = any(section.status != "not checked" for section in found.sections[:-1])
    if not seen and not (folder / "journal.jsonl").is_file():
        raise ConfigError(
            f"nothing to examine in {folder}: it holds no checkpoint. Give the folder of the run's "
            f"checkpoints, or "
            "--config FILE, or --build MODULE:FUNCTION."
        )
    if as_json:
        from stepguard.records.codec import dumps, to_plain

        typer.echo(dumps({"status": found.status, **to_plain(found)}))
    else:
        from stepguard.report import screen
        from stepguard.report.doctor import render_examination

        out = sys.stdout
        colour, unicode = screen.wants_colour(out), screen.takes_unicode(out)
        screen.put(
            render_examination(found, width=screen.columns(out), colour=colour, unicode=unicode),
            out,
        )
    raise typer.Exit(EXITS.get(found.status, EXIT_OK))
