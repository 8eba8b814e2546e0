"""Put the measured overhead into docs/evidence.md, between its two markers.

python -m benchmarks table
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts.machine import RESULTS

BEGIN, END = "<!-- overhead:begin -->", "<!-- overhead:end -->"
PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"
KEPT = (
    "The allocator keeps freed memory, as tcmalloc and jemalloc do: page faults would otherwise "
    "hide one per cent. "
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "overhead.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if not options.results.exists():
        return _refuse(
            f"{options.results.name} does not exist; run python -m benchmarks overhead first."
        )
    text = options.page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        return _refuse(
            f"{options.page.name} needs the lines {BEGIN} and {END}, once each, where the table "
            f"goes."
        )
    data = json.loads(options.results.read_text(encoding="utf-8"))
    fresh = replaced(text, "\n".join(lines(data)))
    options.page.write_text(fresh, encoding="utf-8")
    print(f"{options.page.name}: overhead table {'unchanged' if fresh == text else 'rewritten'}")
    return 0


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


def replaced(text: str, table: str) -> str:
    """The text with everything between the markers replaced."""
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{head}{BEGIN}\n{table}\n{tail}"


def lines(data: dict[str, Any]) -> Iterator[str]:
    """Markdown: a line a variant, a column a model, and what it was measured on."""
    workloads = list(data["workloads"].values())
    yield "| step | " + " | ".join(w["what"] for w in workloads) + " |"
    yield "|---" * (len(workloads) + 1) + "|"
    for rows in zip(*(w["rows"] for w in workloads), strict=True):
        name = f"**{rows[0]['what']}**" if rows[0]["ours"] else rows[0]["what"]
        yield f"| {name} | " + " | ".join(cell(row) for row in rows) + " |"
    yield ""
    yield _footnote(workloads)


def cell(row: dict[str, Any]) -> str:
    """`1.004 (0.998-1.011), own +0.3 %`; the bare step in milliseconds."""
    if row["ratio"] is None:
        return row["missing"] or ""
    if row["variant"].startswith("bare"):
        return f"1 ({row['milliseconds']:.0f} ms)"
    low, high = row["interval"]
    text = f"{row['ratio']:.3f} ({low:.3f}-{high:.3f})"
    if row["added_share"] is not None:
        text += f", own {100 * row['added_share']:+.1f} %"
    return f"**{text}**" if row["ours"] else text


def _footnote(workloads: list[dict[str, Any]]) -> str:
    facts = workloads[0]["machine"]
    rounds = ", ".join(map(str, _rounds(workloads)))
    threads = f"{facts['threads']} thread" + ("s" if facts["threads"] > 1 else "")
    return (
        "Each figure is the median time of a step, relative to the unguarded step (forward, "
        "backward, `clip_grad_norm_`, AdamW) that ran next to it. In brackets: the 95 % interval "
        f"of that median over {rounds} rounds. `own` is the time that the check itself adds. "
        "`unguarded again` compares the unguarded step with itself and shows the noise. "
        f"{_looks(workloads)}"
        f"{KEPT if facts.get('memory_kept') else ''}"
        f"torch {facts['torch']}, {facts['processor']}, {threads}, {facts['date']}, "
        f"load {_loads(workloads)} on {facts['cpus']} CPUs."
    )


def _looks(workloads: list[dict[str, Any]]) -> str:
    """What deep looks cost, where that was measured on every model."""
    costs = [workload.get("looks") for workload in workloads]
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return ""
    steps = ", ".join(f"{cost['steps']:.1f}" for cost in known)
    worst = max(cost["amortised"] for cost in known)
    return (
        f"A deep look takes the time of {steps} steps; over a run, after the first, at most "
        f"{worst:.4f} by `look_every='auto'`. "
    )


def _rounds(workloads: list[dict[str, Any]]) -> list[int]:
    """Variants may have been measured at different times, over different numbers of rounds."""
    rows = [row for w in workloads for row in w["rows"] if not row["variant"].startswith("bare")]
    return sorted({row["rounds"] for row in rows if row["rounds"]})


def _loads(workloads: list[dict[str, Any]]) -> str:
    return ", ".join(str(w["machine"]["load"]) for w in workloads)


if __name__ == "__main__":
    raise SystemExit(main())
