"""Draws docs/images/forecast.svg: a quantity on its way to its limit, and what was told of it.

python -m scripts.forecast_picture
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.parts.failing_trainings import attention_logits

from stepguard import Guard, GuardConfig, Probes, Snapshots
from stepguard.records import Sink
from stepguard.records.probes import Look
from stepguard.report.plot import AMBER, BLUE, GREY, INK, RED

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "forecast.svg"
SEED = 0
STEPS = 150
LOOK_EVERY = 5
CODE = "SG953"
MODULE = "layers.1"


@dataclass
class Seen(Sink):
    """What a run told, and the largest float16 value of the module in each look."""

    told: list[dict[str, Any]] = field(default_factory=list)
    largest: list[tuple[int, float]] = field(default_factory=list)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if fields.get("kind") == "forecast":
            self.told.append(dict(fields))

    def look(self, look: Look) -> None:
        for row in look.tensors:
            if (row.module, row.stage, row.dtype) == (MODULE, "forward", "float16"):
                self.largest.append((look.step, row.largest))


def run() -> tuple[Seen, int]:
    """Train until the first bad step; returns what was seen, and that step."""
    seen = Seen()
    training = attention_logits(SEED)
    config = GuardConfig(
        probes=Probes(look_every=LOOK_EVERY, locate_budget=0),
        terminal="quiet",
        snapshots=Snapshots(count=0),
        sinks=(seen,),
    )
    with Guard(training.model, training.optimizer, config=config) as guard:
        for step in range(STEPS):
            result = guard.step(training.loss, training.batch(step))
            if result.incident is not None:
                return seen, step
    raise SystemExit("the run did not break; there is nothing to draw")


def draw(seen: Seen, broke: int, path: Path = PICTURE) -> None:
    """One curve, the limit, the forecast at the moment it was told, and where the run broke."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # the same bytes for the same run
    matplotlib.rcParams.update({"svg.hashsalt": "stepguard", "font.size": 11})
    forecast = next(note["forecast"] for note in seen.told if note["code"] == CODE)
    now = (forecast["now"], forecast["value"])
    limit = forecast["limit"]
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    axes.plot(*zip(*seen.largest, strict=True), color=BLUE, marker="o", label="largest value seen")
    axes.axhline(limit, color=INK, linewidth=1.2)
    axes.text(1, limit * 0.6, f"the end of float16: {limit:.0f}", color=INK)
    ends = [forecast["earliest"], forecast["latest"]]
    axes.fill([now[0], *ends], [now[1], limit, limit], color=AMBER, alpha=0.25)
    axes.plot(
        [now[0], forecast["step"]],
        [now[1], limit],
        color=AMBER,
        linestyle="--",
        label=f"predicted at step {now[0]}: step {forecast['step']} ({ends[0]} to {ends[1]})",
    )
    axes.axvline(broke, color=RED, linewidth=1.5, label=f"loss is nan at step {broke}")
    axes.set(yscale="log", xlabel="step", xlim=(0, max(broke, ends[1]) * 1.05))
    axes.set_title(
        f"{MODULE} of a small transformer under a high learning rate", color=GREY, pad=12
    )
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> int:
    torch.set_num_threads(1)
    seen, broke = run()
    for note in seen.told:
        print(f"step {note['step']}: {note['summary']}")
    draw(seen, broke)
    print(f"wrote {PICTURE.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
