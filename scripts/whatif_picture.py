"""Draws docs/images/whatif.svg: what would have helped a run whose learning rate jumps.

python -m scripts.whatif_picture
"""

from __future__ import annotations

import torch
from scripts.picture import ROOT, WIDTH, svg_format, theme
from torch import Tensor, nn

import stepguard
from stepguard.records.probes import WhatIf
from stepguard.report.probes import paint_trials
from stepguard.report.screen import paper

PICTURE = ROOT / "docs" / "images" / "whatif.svg"
TITLE = "What would have helped: the candidates for one incident, the best first"
JUMP = 40


def jumping_rate() -> WhatIf:
    """A regression whose learning rate is set to eight times its value at step 40."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_fn(batch: Tensor) -> Tensor:
        return (model(batch) - 2.0 * batch).square().mean()

    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(90):
            if step == JUMP:
                optimizer.param_groups[0]["lr"] = 0.4
            if guard.incidents:
                break
            guard.step(loss_fn, torch.randn(4, 6))
        return guard.whatif()


def picture() -> str:
    """The table as SVG."""
    console = paper(width=WIDTH, colour=True, record=True)
    paint_trials(jumping_rate(), console)
    return console.export_svg(
        title="guard.whatif()",
        theme=theme(),
        code_format=svg_format(TITLE),
        unique_id="whatif",
    )


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"wrote {PICTURE.name}")


if __name__ == "__main__":
    main()
