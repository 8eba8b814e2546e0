"""Write the web page of a run, or of two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepguard._errors import ConfigError
from stepguard.cli._run_folder import folder_of, open_story
from stepguard.cli._terminal import echo

if TYPE_CHECKING:
    from stepguard.report.compare import RunComparison

PAGE = "report.html"
COMPARISON = "compare.html"


def write_page(text: str, out: Path) -> None:
    """Write the page to a file and say where, or to stdout for `-`."""
    from stepguard.report.figure import replace_file

    if str(out) == "-":
        echo(text)
        return
    try:
        replace_file(out, text.encode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror or error}; give another file with --out."
        ) from error
    echo(f"wrote {out}")


def report_page(run: Path, rank: int | None) -> str:
    """The page of a run folder, with what lies in the folders of its incidents."""
    from stepguard.report.page_document import run_name, story_document
    from stepguard.report.page_extras import page_extras
    from stepguard.report.run_page import render_page

    story = open_story(run, rank, steps_of="all")
    document = story_document(story, run_name(run), page_extras(story, folder_of(run)))
    return render_page(document)


def comparison_page(runs: tuple[Path, Path], rank: int | None, comparison: RunComparison) -> str:
    """Two runs over the same axis, with the table of `stepguard compare` below."""
    from stepguard.report.page_document import comparison_document, run_name
    from stepguard.report.run_page import render_page

    names = [run_name(run) for run in runs]
    if names[0] == names[1]:
        names = [str(run) for run in runs]
    rows: list[list[str]] = [["", *names]]
    for row in comparison.rows:
        rows.append([row.aspect, row.first, row.second])
    for setting, (mine, other) in comparison.settings.items():
        rows.append([setting, _setting(mine), _setting(other)])
    first, second = (open_story(run, rank, steps_of="all").latest for run in runs)
    return render_page(comparison_document((first, names[0]), (second, names[1]), rows))


def _setting(value: object) -> str:
    return "default" if value is None else str(value)
