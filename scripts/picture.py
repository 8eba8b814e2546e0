"""Draws docs/images/demo.svg: what the demo's terminal shows, from a fresh run of it.

    python -m scripts.picture

Same code, same torch, same picture. The SVG names only fonts a reader's machine may have, none from
the network.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from examples import demo
from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from stepguard.report.screen import paper
from stepguard.report.terminal import paint_incident

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "demo.svg"
WIDTH = 100
FONTS = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
NORMAL = ("#16181d", "#f06262", "#7ec778", "#e5c068", "#6aa5f0", "#c686dd", "#56c2c8", "#d6d9de")
BRIGHT = ("#6e7480", "#ff7b7b", "#98dc92", "#f6d582", "#8abbff", "#d9a0ec", "#76d6dc", "#ffffff")
TITLE = "A training step meets NaN; its sample is named and dropped, and the run continues"
# rich's own format fetches a font from a content network; this one is the same picture without it
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>TITLE</title>
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; \
line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: FONTS; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g>
</g>
</svg>
""".replace("FONTS", FONTS)


def svg_format(title: str) -> str:
    """The format of an SVG that says what it shows."""
    return FORMAT.replace("TITLE", title)


def theme() -> TerminalTheme:
    """A dark terminal whose sixteen colours keep their contrast."""
    normal, bright = (
        [parse_rgb_hex(colour[1:]) for colour in colours] for colours in (NORMAL, BRIGHT)
    )
    return TerminalTheme(normal[0], normal[7], list(normal), list(bright))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.picture", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(picture(options.steps), encoding="utf-8")
    print(f"wrote {options.output.name}")
    return 0


def picture(steps: int) -> str:
    """The demo's incident and its table as SVG."""
    console = paper(width=WIDTH, colour=True, record=True)
    with contextlib.chdir(ROOT), tempfile.TemporaryDirectory() as folder, _one_thread():
        outcomes = [
            demo.train(loop, steps, Console(file=io.StringIO())) for loop in _loops(Path(folder))
        ]
    _draw(console, outcomes, steps)
    return console.export_svg(
        title="make demo", theme=theme(), code_format=svg_format(TITLE), unique_id="stepguard"
    )


def _draw(console: Console, outcomes: Sequence[demo.Outcome], steps: int) -> None:
    unguarded, guarded, repaired = outcomes
    console.print(_bar(unguarded, steps))
    if guarded.incidents:
        paint_incident(console, replace(guarded.incidents[0], run="demo_run"))
    console.print(_bar(guarded, steps))
    console.print(_bar(repaired, steps))
    console.print()
    console.print(demo.comparison(outcomes, steps))


def _bar(outcome: demo.Outcome, steps: int) -> Text:
    """A finished progress bar, as the terminal leaves it."""
    loss = Text(f" loss {outcome.last_loss:.4f}", style="" if outcome.alive else "bold red")
    bar = Text("━" * 40, style="green" if outcome.alive else "red")
    return Text.assemble(f"{outcome.name:<12} ", bar, f" {steps}/{steps}", loss)


def _loops(run_dir: Path) -> Iterator[demo.Loop]:
    yield demo.Loop()
    yield demo.GuardedLoop(run_dir, quiet=True)
    yield demo.RepairedLoop()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    raise SystemExit(main())
