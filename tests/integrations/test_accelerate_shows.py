"""What an accelerate script does to itself on a bad step, and what a guarded one does: a tiny
Llama, on a CPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from integrations.trainers import HALTING, bad_tensors, llama, quiet, texts
from stepguard import TrainingHalted
from stepguard.integrations.accelerate import AcceleratorGuard, guard


class Script:
    """Trains a few steps and saves its state after each."""

    def __init__(
        self,
        folder: Path,
        *,
        half: bool = False,
        masked: Any = lambda row: False,
        eps: float = 1e-8,
    ) -> None:
        self.folder, self.accelerator = folder, Accelerator(cpu=True)
        model = llama().half() if half else llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, eps=eps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        loader = torch.utils.data.DataLoader(texts(16, masked), batch_size=4)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.losses: list[float] = []

    def loss_fn(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def train(self, watching: AcceleratorGuard | None = None) -> None:
        for number, batch in enumerate(self.loader):
            loss = (
                watching.loss(self.loss_fn, batch) if watching is not None else self.loss_fn(batch)
            )
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
            self.accelerator.save_state(str(self.folder / f"step-{number}"))

    def bad_saves(self) -> list[int]:
        saved = sorted(self.folder.glob("step-*/model.safetensors"))
        return [
            sum(not bool(torch.isfinite(t).all()) for t in load_file(path).values())
            for path in saved
        ]


OPTIMIZER_FAULTS = {"fp16 weights": {"half": True}, "no epsilon": {"eps": 0.0}}


@pytest.mark.parametrize("name", OPTIMIZER_FAULTS)
def test_an_optimizer_made_nan_ruins_an_unguarded_script_and_its_saves(
    tmp_path: Path, name: str
) -> None:
    script = Script(tmp_path, **OPTIMIZER_FAULTS[name])
    script.train()
    assert math.isfinite(script.losses[0]) and all(math.isnan(loss) for loss in script.losses[1:])
    assert len(script.bad_saves()) == 4 and all(script.bad_saves())


@pytest.mark.parametrize("name", OPTIMIZER_FAULTS)
def test_an_optimizer_made_nan_is_taken_back_named_and_never_saved(
    tmp_path: Path, name: str
) -> None:
    script = Script(tmp_path, **OPTIMIZER_FAULTS[name])
    with (
        guard(script.accelerator, quiet(policy=HALTING)) as watching,
        pytest.raises(TrainingHalted),
    ):
        script.train(watching)
    first = watching.incidents[0]
    assert first.origin is not None
    assert (first.step, first.origin.phase, first.origin.op) == (0, "optimizer", "aten.addcdiv_")
    assert first.findings[0].code == "SG502"
    assert [i.decision.action for i in watching.incidents if i.decision] == [
        "undo",
        "undo",
        "undo",
        "stop",
    ]
    assert bad_tensors(script.model) == 0
    assert set(script.bad_saves()) <= {0}
    assert script.schedule.scheduler.last_epoch == 0


def test_a_batch_without_labels_gives_a_nan_loss_and_is_skipped_under_a_guard(
    tmp_path: Path,
) -> None:
    def masked(row: int) -> bool:
        return 8 <= row < 12

    bare = Script(tmp_path / "bare", masked=masked)
    bare.train()
    assert [math.isnan(loss) for loss in bare.losses] == [False, False, True, False]
    assert bare.schedule.scheduler.last_epoch == 4
    script = Script(tmp_path / "guarded", masked=masked)
    with guard(script.accelerator, quiet()) as watching:
        script.train(watching)
    (incident,) = watching.incidents
    assert (incident.step, incident.findings[0].code) == (2, "SG102")
    assert incident.origin is not None and incident.origin.reproduced
    assert script.schedule.scheduler.last_epoch == 3
    assert script.bad_saves() == [0, 0, 0, 0]
