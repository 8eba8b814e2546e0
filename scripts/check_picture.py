"""Draws docs/images/check.svg: the preflight of the fixture project with several planted faults.

python -m scripts.check_picture
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from scripts.picture import ROOT, WIDTH, svg_format, theme

from stepguard.check.preflight import check, resolve
from stepguard.report.checks import paint_preflight
from stepguard.report.screen import paper

PICTURE = ROOT / "docs" / "images" / "check.svg"
PROJECT = ROOT / "tests" / "check" / "project"
SHOWN = (
    "precision.*",
    "scaler.missing",
    "optimizer.*",
    "lr",
    "labels",
    "data.finite",
    "data.range",
    "model.*",
)
TITLE = "A preflight: the state of the run, failures with evidence and fix, what passed"


def picture() -> str:
    """The table as SVG."""
    console = paper(width=WIDTH, colour=True, record=True)
    torch.manual_seed(0)
    with contextlib.chdir(PROJECT):
        subject = resolve(
            "tinychat.faults:several_at_once", Path("config.json"), Path("launch.json")
        )
        result = check(subject, only=SHOWN, target="train:build")
    paint_preflight(console, result)
    return console.export_svg(
        title="stepguard check train:build --config config.json --launcher launch.json",
        theme=theme(),
        code_format=svg_format(TITLE),
        unique_id="check",
    )


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"wrote {PICTURE.name}")


if __name__ == "__main__":
    main()
