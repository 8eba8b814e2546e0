"""`stepguard plot RUN`: the loss curve of a run as a picture or a web page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._run_folder import RankOption, RunArgument, folder_of, open_run


class PlotFormat(StrEnum):
    """What `stepguard plot` can write."""

    PNG = "png"
    HTML = "html"


def plot(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write; loss_curve.png inside RUN.")
    ] = None,
    kind: Annotated[
        PlotFormat | None,
        typer.Option("--format", help="By default what --out ends with, else png."),
    ] = None,
    rank: RankOption = 0,
) -> None:
    """Draw loss, gradient norm and learning rate over the steps, with every incident marked."""
    from stepguard.report.plot import write_html, write_png

    chosen, path = choose_output(folder_of(run), out, kind)
    record = open_run(run, rank)
    if not record.steps:
        raise ConfigError(f"{record.path} holds no step yet, so there is nothing to draw.")
    write = write_png if chosen is PlotFormat.PNG else write_html
    try:
        write(
            record.steps,
            record.incidents,
            path,
            title=f"training loss: {folder_of(run).resolve().name}",
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    typer.echo(f"wrote {path}")


def choose_output(
    folder: Path, out: Path | None, kind: PlotFormat | None
) -> tuple[PlotFormat, Path]:
    """The format and the file: `--format` and the file's ending must not contradict each other."""
    by_name = (
        {".png": PlotFormat.PNG, ".html": PlotFormat.HTML}.get(out.suffix.lower()) if out else None
    )
    if kind is not None and by_name is not None and kind is not by_name:
        raise ConfigError(
            f"--format {kind} does not fit --out {out}; leave --format out or change the ending."
        )
    chosen = kind or by_name or PlotFormat.PNG
    if out is not None and by_name is None and kind is None:
        raise ConfigError(
            f"--out {out} does not end with .png or .html; change the ending or give --format."
        )
    return chosen, out or folder / f"loss_curve.{chosen}"
