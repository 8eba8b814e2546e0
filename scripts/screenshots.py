"""Draw every picture of docs/images again, from real runs: terminal screens and the web page.

    python -m scripts.screenshots              all of them; the web page needs Chromium
    python -m scripts.screenshots --terminal   only the terminal screens

A picture says what the code says today. Look at them before you commit them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from examples.demo import main as demo
from scripts import check_picture, picture, whatif_picture
from torch import nn

import stepguard
from stepguard import GuardConfig, Probes
from stepguard.journal import read_run
from stepguard.report.probes import paint_looks
from stepguard.report.run_report import paint_summary
from stepguard.report.screen import paper
from stepguard.report.story import read_story
from stepguard.report.summary import summarize

REPORT = picture.ROOT / "docs" / "images" / "report.svg"
LOOK = picture.ROOT / "docs" / "images" / "look.svg"
LOOK_TITLE = "Health probes: room left in each dtype, updates, attention, with their history"
LOOKED_STEPS = 72
TITLE = "What happened in a run: counts, incidents with place and cause, what led to what"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.screenshots", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--terminal", action="store_true", help="only the terminal screens")
    options = parser.parse_args(arguments)
    picture.main([])
    check_picture.main()
    whatif_picture.main()
    REPORT.write_text(report_picture(), encoding="utf-8")
    print(f"wrote {REPORT.name}")
    LOOK.write_text(look_picture(), encoding="utf-8")
    print(f"wrote {LOOK.name}")
    if not options.terminal:
        from scripts import page_pictures

        page_pictures.main()
    return 0


def report_picture(steps: int = 120) -> str:
    """`stepguard report` of a short run of the demo, as SVG."""
    console = paper(width=picture.WIDTH, colour=True, record=True)
    with tempfile.TemporaryDirectory() as folder:
        # Places in the source are told from the current directory, and so are files of the run.
        with contextlib.chdir(picture.ROOT), contextlib.redirect_stdout(io.StringIO()):
            demo(["--steps", str(steps), "--run-dir", str(Path(folder) / "demo_run")])
        with contextlib.chdir(folder):
            story = read_story(Path("demo_run"), None)
            summary = summarize(story.latest, story)
    settings = {**summary.changed_settings, "run_dir": "demo_run"}
    paint_summary(console, replace(summary, changed_settings=settings))
    return console.export_svg(
        title="stepguard report demo_run",
        theme=picture.theme(),
        code_format=picture.svg_format(TITLE),
        unique_id="report",
    )


def look_picture() -> str:
    """`stepguard look` of a small transformer in float16 whose attention runs away, as SVG."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(16, 32), body, nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        config = GuardConfig(run_dir=Path(folder), probes=Probes(look_every=10), terminal="quiet")
        with stepguard.watch(model, optimizer, config=config):
            for _ in range(LOOKED_STEPS + 1):
                batch = torch.randn(16, 12, 16)
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    logits = model(batch)
                targets = (batch.sum(-1) > 0).long()
                nn.functional.cross_entropy(logits.float().transpose(1, 2), targets).backward()
                optimizer.step()
        looks = read_run(Path(folder)).looks
    console = paper(width=picture.WIDTH, colour=True, record=True)
    paint_looks(looks, console, most=6)
    return console.export_svg(
        title="stepguard look runs/a",
        theme=picture.theme(),
        code_format=picture.svg_format(LOOK_TITLE),
        unique_id="look",
    )


if __name__ == "__main__":
    raise SystemExit(main())
