"""Draw the pictures of the web page in docs/images, from real runs in a real browser.

python scripts/page_pictures.py          all of them
python scripts/page_pictures.py --site   only pages of the documentation site
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from examples.demo import main as demo  # noqa: E402

import stepguard  # noqa: E402
from browser import SIZE, opened, started  # noqa: E402
from house.test_fresh_process import LOOP, SETUP, WATCH  # noqa: E402
from house.test_fresh_process import run_cells as run_notebook  # noqa: E402
from report.real_runs import restarted, rewound, two_ranks  # noqa: E402
from report.served import serving  # noqa: E402
from stepguard.cli.runs import report_page  # noqa: E402
from stepguard.journal import Journal  # noqa: E402
from stepguard.records import Reading  # noqa: E402

STEPS = "120"
PHONE = {"width": 390, "height": 844}
SITE_PAGES = {
    "index": "index.html",
    "quickstart": "quickstart.html",
    "loss-is-nan": "tasks/loss-is-nan.html",
    "concepts": "concepts.html",
    "finding": "findings/SG204.html",
}
NOTEBOOK_PAGE = """<!doctype html><meta charset="utf-8"><title>notebook</title><style>
body { font-family: sans-serif; margin: 16px; }
.cell { background: #f5f5f5; border: 1px solid #ddd; padding: 8px; white-space: pre-wrap; }
</style>
"""


def main() -> None:
    """Make the runs, open their pages, and photograph each state."""
    with tempfile.TemporaryDirectory() as place, started() as browser:
        _site(browser, Path(place))
        if "--site" in sys.argv[1:]:
            return
        runs = Path(place) / "runs"
        _reports(browser, runs)
        _live(browser, runs)
        _notebook(browser, Path(place))


def _site(browser: Any, folder: Path) -> None:
    """Five pages of the site as a reader sees them first, opened from disk."""
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder / "site"),
    ]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, env=quiet)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    for name, where in SITE_PAGES.items():
        tab.goto((folder / "site" / where).as_uri(), wait_until="networkidle")
        tab.screenshot(path=IMAGES / f"site-{name}.png")
        print(f"wrote docs/images/site-{name}.png")
    context.close()


def _reports(browser: Any, runs: Path) -> None:
    demo(["--steps", STEPS, "--run-dir", str(runs / "demo")])
    rewound(runs / "rewound")
    restarted(runs / "restarted")
    ranks = two_ranks(runs.parent / "ranks")
    _picture(browser, _page(runs / "rewound"), "page-rewound.png")
    _picture(browser, _page(runs / "demo"), "page-incident.png", "n", tall=True)
    _picture(browser, _page(runs / "demo"), "page-dark.png", "n", scheme="dark")
    _picture(browser, _page(runs / "demo"), "page-narrow.png", "n", size=PHONE)
    _picture(browser, _page(runs / "restarted"), "page-restarted.png")
    _picture(browser, _page(ranks), "page-ranks.png", "n")


def _live(browser: Any, runs: Path) -> None:
    journal = Journal(runs / "healthy-so-far")
    journal.write("run", {"stepguard": stepguard.__version__, "time": time.time()})
    for step in range(80):
        reading = Reading(step=step, loss=2.0 * 0.97**step, grad_norm=0.5, lr=(1e-3,))
        journal.step(reading, committed=True)
    journal.close()
    # the same run as if it were not over: the process that its journal names is this one
    training = shutil.copytree(runs / "rewound", runs / "training") / "journal.jsonl"
    lines = training.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["type"] != "end"]
    training.write_text("".join(kept), encoding="utf-8")
    # the list shows the folder as it was typed
    with contextlib.chdir(runs.parent), serving(Path(runs.name)) as address:
        _picture(browser, f"{address}runs/training", "page-live.png")
        context = browser.new_context(viewport={"width": 1000, "height": 420})
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#runs tr")
        page.screenshot(path=IMAGES / "page-list.png")
        page.set_viewport_size(PHONE)
        page.screenshot(path=IMAGES / "page-list-narrow.png")
        context.close()


def _notebook(browser: Any, folder: Path) -> None:
    """The cells of a notebook that a real kernel has run, and the HTML its objects showed."""
    cells = [SETUP, WATCH, LOOP, "guard", "guard.incidents[0]"]
    outputs = run_notebook(folder, *cells)
    parts = []
    for number, (source, shown) in enumerate(zip(cells, outputs, strict=True), start=1):
        parts.append(f"<pre class=cell><b>[{number}]</b> {escape(source.strip())}</pre>")
        for output in shown:
            parts.append(output.get("data", {}).get("text/html", ""))
    page = folder / "notebook.html"
    page.write_text(NOTEBOOK_PAGE + "\n".join(parts), encoding="utf-8")
    context = browser.new_context(viewport={"width": 1000, "height": 600})
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.screenshot(path=IMAGES / "notebook.png", full_page=True)
    context.close()
    print("wrote docs/images/notebook.png")


def _page(run: Path) -> Path:
    path = run / "report.html"
    with contextlib.chdir(run.parents[1]):  # the page shows the path as it was typed
        path.write_text(report_page(run.relative_to(run.parents[1]), None), encoding="utf-8")
    return path


def _picture(
    browser: Any,
    where: Path | str,
    name: str,
    *keys: str,
    scheme: str = "light",
    tall: bool = False,
    size: dict[str, int] = SIZE,
) -> None:
    with opened(browser, where, color_scheme=scheme, viewport=size) as seen:
        for key in keys:
            seen.page.keyboard.press(key)
        seen.settle()
        if isinstance(where, str):
            seen.page.wait_for_selector("#live-state.good")
        seen.page.screenshot(path=IMAGES / name, full_page=tall)
        print(f"wrote docs/images/{name}")


if __name__ == "__main__":
    main()
