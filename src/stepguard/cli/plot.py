"""`stepguard plot RUN`: the loss curve of a run as a picture or a web page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._run_folder import RankOption, RunArgument, WhichOption, folder_of, open_run
from stepguard.cli._terminal import echo

if TYPE_CHECKING:
    from stepguard.report.figure import RunFigure


class PlotFormat(StrEnum):
    """What `stepguard plot` can write."""

    PNG = "png"
    HTML = "html"


ENDINGS = {".png": PlotFormat.PNG, ".html": PlotFormat.HTML}


def plot(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="Where to write; by default loss_curve.png inside RUN.",
        ),
    ] = None,
    kind: Annotated[
        PlotFormat | None,
        typer.Option(
            "--format", metavar="png|html", help="By default what --out ends with, else png."
        ),
    ] = None,
    rank: RankOption = None,
    which: WhichOption = None,
) -> None:
    """Draw loss, gradient norm and learning rate over the steps, with every incident marked."""
    from stepguard.report.figure import describe

    chosen, path = choose_output(folder_of(run), out, kind)
    told = open_run(run, rank, which)
    if not len(told.steps):
        raise ConfigError(f"{told.path} holds no step yet, so there is nothing to draw.")
    title = f"training loss: {folder_of(run).resolve().name}"
    shown = describe(told, title)
    try:
        _write(shown, chosen, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    echo(f"wrote {path}")


def _write(shown: RunFigure, kind: PlotFormat, path: Path) -> None:
    if kind is PlotFormat.PNG:
        from stepguard.report.plot_png import write_png

        write_png(shown, path)
    else:
        from stepguard.report.plot_html import write_html

        write_html(shown, path)


def choose_output(
    folder: Path, out: Path | None, kind: PlotFormat | None
) -> tuple[PlotFormat, Path]:
    """Choose format and file; `--format` and the ending of `--out` must not contradict."""
    if out is None:
        chosen = kind or PlotFormat.PNG
        return chosen, folder / f"loss_curve.{chosen}"
    by_ending = ENDINGS.get(out.suffix.lower())
    if kind is None and by_ending is None:
        raise ConfigError(
            f"--out {out} does not end with .png or .html; change the ending or give --format."
        )
    if kind is not None and by_ending is not None and kind is not by_ending:
        raise ConfigError(
            f"--format {kind} does not fit --out {out}; leave --format out or change the ending."
        )
    return kind or by_ending or PlotFormat.PNG, out
