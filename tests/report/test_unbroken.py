"""No name and no path is ever broken inside a cell, however narrow the window and however long the
path.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.text import Text
from typer.testing import CliRunner

from check import saved
from cli.journals import write_run
from report import literals
from stepguard.cli.app import app
from stepguard.report import screen
from stepguard.report.screen import CUT, Unbroken, fitted, middle
from stepguard.report.terminal import paint_incident

WIDTHS = [40, 60, 80, 120]
TENSOR = "transformer.encoder.layers.0.self_attention.query_key_value.weight"


@pytest.mark.parametrize("width", range(3, 40))
def test_middle_fits_and_keeps_both_ends(width: int) -> None:
    short = middle("/a/long/way/to/model.safetensors", width)
    assert len(short) <= width and short.count(CUT) == (width < 32)
    assert short.endswith("s")


def test_file_name_stays_whole_where_there_is_room() -> None:
    assert middle("/scratch/user/experiments/run-17/model.safetensors", 24).endswith(
        "/model.safetensors"
    )
    assert middle("short.pt", 40) == "short.pt"


@pytest.mark.parametrize("width", [10, 25, 44])
def test_long_word_is_shortened_and_the_others_stay(width: int) -> None:
    text = Text.assemble("see ", (TENSOR, "bold"), " and the rest")
    short = fitted(text, width)
    assert short.plain.startswith("see ") and short.plain.endswith(" and the rest")
    assert max(map(len, short.plain.split())) == width
    assert any(span.style == "bold" for span in short.spans)


def shown(command: str, path: Path, width: int) -> str:
    return CliRunner().invoke(app, [command, str(path)], env={"COLUMNS": str(width)}).stdout


def cells(text: str) -> list[str]:
    """Lines that are neither a whole path nor a command to be copied."""
    return [
        line for line in text.splitlines() if not line.lstrip().startswith(("/", "$ ", "next "))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3, 30, 90])
@pytest.mark.parametrize("width", WIDTHS)
def test_verify_shows_every_file_name_on_one_line(tmp_path: Path, width: int, length: int) -> None:
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    saved.save_zip(folder / "good.pt", {"w": torch.ones(3)})
    saved.save_zip(folder / "bad.pt", {TENSOR: torch.tensor([1.0, float("nan")])})
    for path in (folder, folder / "good.pt"):
        text = shown("verify", path, width)
        assert "good.pt" in text and "good" in text
        assert all(len(line) <= width for line in cells(text))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["doctor", "report"])
def test_title_keeps_the_end_of_a_long_path(tmp_path: Path, width: int, command: str) -> None:
    run = write_run(tmp_path / ("long" * 30) / "run7")
    saved.save_zip(run / "good.pt", {"w": torch.ones(3)})
    text = shown(command, run, width)
    title = text.splitlines()[0]
    assert f"stepguard {command}:" in title and len(title) <= width
    assert ("run7" if command == "doctor" else ".jsonl") in title
    assert all(len(line) <= width for line in cells(text))


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_tells_runs_of_one_name_apart(tmp_path: Path, width: int) -> None:
    first, second = write_run(tmp_path / "aaa" / "run"), write_run(tmp_path / "bbb" / "run")
    done = CliRunner().invoke(
        app, ["compare", str(first), str(second)], env={"COLUMNS": str(width)}
    )
    heading = done.stdout.splitlines()[0]
    assert "a/run" in heading and "b/run" in heading
    assert all(len(line) <= width for line in done.stdout.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_incident_panel_breaks_no_name(width: int) -> None:
    console = screen.paper(width=width, colour=False)
    paint_incident(console, literals.MASKED_ROW)
    words = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "aten._softmax" in words


def test_cell_gives_way_to_others_before_it_is_cut() -> None:
    console = screen.paper(width=50, colour=False)
    assert Unbroken(TENSOR).__rich_measure__(console, console.options).minimum < len(TENSOR)


def test_cut_is_a_plain_letter_on_a_stream_without_unicode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import io

    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen.put(f"a{CUT}b\n", stream)
    stream.seek(0)
    assert stream.read() == "a~b\n"
