"""Verified checkpoints as text."""

from __future__ import annotations

from stepguard.records.checks import Problem, Verification
from stepguard.report.checks import render_results

BAD = Problem(
    file="run/a/optimizer.pt",
    kind="nan",
    tensor="state/0/exp_avg",
    detail="1 NaN of 3",
    role="optimizer",
)
GOOD = Verification(path="run/b", format="DCP", tensors=1200, bytes=2_100_000_000, step=40)
PART = Verification(
    path="run/a", format="transformers", problems=(BAD,), tensors=3, bytes=100, step=20
)
LINK = Problem(file="run/x", kind="link", detail="is a link out of the folder", severity="warning")
FOLDER = Verification(
    path="run", format="folder", problems=(LINK, BAD), parts=(PART, GOOD), seconds=2.0
)


def test_every_checkpoint_has_a_line_and_every_problem_its_place() -> None:
    text = render_results([FOLDER], width=100, colour=False)
    for words in (
        "run/b",
        "DCP",
        "1,200",
        "2.1 GB",
        "corrupt, 1 error",
        "optimizer.pt: state/0/exp_avg (optimizer): 1 NaN of 3",
    ):
        assert words in text
    assert "link out of the folder" in text
    assert "2 checkpoints, 1 good, 1 corrupt; 1,203 tensors, 2.1 GB in 2.0 s (1.05 GB/s)" in text


def test_problem_of_a_part_is_told_once() -> None:
    assert render_results([FOLDER], width=100, colour=False).count("1 NaN of 3") == 1


def test_long_lists_are_cut_and_say_so() -> None:
    many = tuple(Problem(file="a", kind="nan", tensor=f"w{n}", detail="bad") for n in range(30))
    text = render_results(
        [Verification(path="a", format="x", problems=many)], width=80, colour=False
    )
    assert "and 18 more; --json lists all" in text


def test_narrow_window_holds_everything() -> None:
    lines = render_results([FOLDER], width=60, colour=False).splitlines()
    assert all(len(line) <= 60 for line in lines)
