"""The page of a run, written and opened, and the live page with many runs and readers.

    python -m benchmarks page              # 100,000 steps of 8 series; 50 runs, 20 open pages

Prints seconds and bytes beside what is promised: written in under 5 s, open in under 3 s, below
6 MB, and no row lost. Needs a Chromium for opening and for the open pages; without one it says so.
"""

from __future__ import annotations

import json
import math
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.parts import runner

STEPS = 100_000
RUNS = 50
PAGES = 20
LIVE_ROWS = 200


def write_journal(folder: Path, steps: int, seed: int = 0) -> Path:
    """A journal with 8 series, one NaN in a thousand steps, and noise that compresses badly."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(seed)
    with (folder / "journal.jsonl").open("w") as file:
        file.write('{"v":1,"type":"run","stepguard":"0","time":1e9}\n')
        for step in range(steps):
            file.write(json.dumps(_line(step, steps, noise)) + "\n")
        file.write('{"v":1,"type":"end","incidents":0,"armed":true}\n')
    return folder


def _line(step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    import numpy as np

    def single(value: float) -> float:
        return float(np.float32(value))

    loss = single(2 * math.exp(-3 * step / steps) * noise.lognormvariate(0, 0.2))
    fields: dict[str, Any] = {
        "loss": loss,
        "components": {"text": single(loss * 0.7), "image": single(loss * 0.3)},
        "followed": {"kl": single(noise.lognormvariate(0, 1))},
        "grad_norm": single(noise.lognormvariate(0, 0.5)),
        "clip_factor": min(1.0, noise.lognormvariate(0, 0.5)),
        "lr": [1e-3 * (1 + math.cos(math.pi * step / steps))],
        "seconds": noise.lognormvariate(-2, 0.1),
    }
    if step % 1000 == 500:
        fields |= {"loss": None, "loss_kind": "nan"}
    return {"v": 1, "type": "step", "step": step, **fields, "committed": step % 1000 != 500}


def measure_report(folder: Path) -> dict[str, Any]:
    """Seconds to write, bytes, and seconds until the browser has drawn it."""
    write_journal(folder, STEPS)
    page = folder / "report.html"
    began = time.perf_counter()
    worked = _processor_seconds()
    command = [sys.executable, "-m", "stepguard", "report", str(folder), "--html"]
    subprocess.run(command, check=True, capture_output=True)
    found = {
        "written_s": round(time.perf_counter() - began, 2),
        "written_cpu_s": round(_processor_seconds() - worked, 2),
        "bytes": page.stat().st_size,
    }
    with browser() as chromium:
        if chromium is not None:
            tab = chromium.new_page()
            asked = tab.context.new_cdp_session(tab)
            asked.send("Performance.enable", {"timeDomain": "threadTicks"})
            began = time.perf_counter()
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("body[data-ready]", timeout=60_000)
            found["opened_s"] = round(time.perf_counter() - began, 2)
            measured = asked.send("Performance.getMetrics")["metrics"]
            used = next(one["value"] for one in measured if one["name"] == "TaskDuration")
            found["opened_cpu_s"] = round(used, 2)
            marks = tab.evaluate("stepguardPage.panels[0].sources[0].lines[0].marks.length")
            found["marks"] = marks
    return found


def _processor_seconds() -> float:
    """What processes that ended have used: a machine that is busy with others says less by time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_live(folder: Path) -> dict[str, Any]:
    """Rows that 20 open pages of 50 runs got, and how many they missed."""
    from stepguard.journal import Journal
    from stepguard.records import Reading

    journals = [Journal(folder / f"run{number:02}") for number in range(RUNS)]
    for journal in journals:
        journal.write("run", {"stepguard": "0", "time": 1e9})
        journal.step(Reading(step=0, loss=1.0), committed=True)
    with browser() as chromium, serving(folder) as address:
        if chromium is None:
            return {"pages": 0}
        # A context has connections of its own: one browser keeps only six streams to a server.
        tabs = [chromium.new_context().new_page() for _ in range(PAGES)]
        for place, tab in enumerate(tabs):
            tab.goto(f"{address}runs/run{place * RUNS // PAGES:02}")
            tab.wait_for_selector("body[data-ready]", timeout=60_000)
        for step in range(1, LIVE_ROWS + 1):
            for journal in journals:
                journal.step(Reading(step=step, loss=1.0 / step), committed=True)
            time.sleep(0.02)
        rows = 0
        lost = 0
        for tab in tabs:
            tab.wait_for_selector(f"body[data-rows='{LIVE_ROWS + 1}']", timeout=60_000)
            steps = tab.evaluate("stepguardPage.runs[0].columns.step.values")
            rows += len(steps)
            lost += steps != list(range(LIVE_ROWS + 1))
            lost += tab.evaluate("stepguardPage.live.lost")
    for journal in journals:
        journal.close()
    return {"runs": RUNS, "pages": PAGES, "rows": rows, "lost": lost}


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, or None where there is none."""
    binary = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        binary = None
    if binary is None:
        print("no Chromium or no playwright: opening is not measured")
        yield None
        return
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of `stepguard serve` over this folder."""
    command = [sys.executable, "-u", "-m", "stepguard", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        yield address[0]
    finally:
        process.terminate()
        process.wait(timeout=30)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both and print them beside what is promised."""
    run = runner.begin("page", __doc__, arguments)
    with tempfile.TemporaryDirectory() as place:
        report = measure_report(Path(place) / "long")
        live = measure_live(Path(place) / "many")
    print(f"report of {STEPS:,} steps x 8 series")
    busy = f"{report['written_cpu_s']} s of processor time"
    print(f"  written in   {report['written_s']:6} s   (promised: under 5; {busy})")
    busy = f"{report.get('opened_cpu_s', '-')} s of processor time"
    print(f"  opened in    {report.get('opened_s', '-'):>6} s   (promised: under 3; {busy})")
    print(f"  size         {report['bytes'] / 1e6:6.2f} MB  (promised: under 6)")
    print(f"live: {RUNS} runs, {live['pages']} open pages")
    print(f"  rows shown   {live.get('rows', '-')}, lost {live.get('lost', '-')}  (promised: 0)")
    run.keep({"report": report, "live": live})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
