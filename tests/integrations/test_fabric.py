"""Fabric under guard: the user's own loop goes on, bad steps are vetoed and explained, bad states
are not saved.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR

from integrations.lightning_scenes import (
    BAD,
    OWN_WARNINGS,
    QUIET,
    STEPS,
    Batch,
    all_masked,
    bad_tensors,
    batches,
    logged,
    waking,
    with_nan,
)
from scenes import difference
from settings_of import changed
from stepguard import ConfigError, Guard
from stepguard.integrations import fabric as integration
from stepguard.integrations.fabric import SaveRefused

pytestmark = OWN_WARNINGS
KINDS = ["plain", "accumulated", "clipped", "bf16", "scaled"]


class Scene:
    """Fabric with a small model, set up."""

    def __init__(self, kind: str = "plain", **settings: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        precision: dict[str, Any] = {}
        if kind == "bf16":
            precision = {"precision": "bf16-mixed"}
        if kind == "scaled":
            scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            precision = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        self.fabric = Fabric(accelerator="cpu", devices=1, **precision, **settings)
        self.model, self.optimizer = self.fabric.setup(
            net, torch.optim.AdamW(net.parameters(), lr=1e-2)
        )
        self.scheduler = LinearLR(self.optimizer.optimizer, start_factor=0.1, total_iters=100)
        self.kind, self.micro = kind, 2 if kind == "accumulated" else 1

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"]) / self.micro

    def train(self, data: list[Batch], told: integration.FabricGuard | None = None) -> None:
        """The loop of Fabric's own examples; `told` hears of every batch."""
        for index, batch in enumerate(data):
            self.fabric.backward(self.loss(batch) if told is None else told.loss(self.loss, batch))
            if (index + 1) % self.micro:
                continue
            if self.kind == "clipped":
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def guard(self, **settings: Any) -> integration.FabricGuard:
        config = changed(QUIET, **settings)
        return integration.guard(
            self.fabric, self.model, self.optimizer, scheduler=self.scheduler, config=config
        )

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.fabric.strategy.precision.state_dict(),
            }
        )


def without(data: list[Batch], micro: int) -> list[Batch]:
    start = BAD - BAD % micro
    return [batch for index, batch in enumerate(data) if not start <= index < start + micro]


def test_unguarded_clipping_ends_the_run_and_a_loop_without_it_saves_nan(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="non-finite"):
        Scene("clipped").train(with_nan(batches()))
    scene = Scene()
    scene.train(with_nan(batches()))
    scene.fabric.save(tmp_path / "last.ckpt", {"model": scene.model})
    assert bad_tensors(torch.load(tmp_path / "last.ckpt", weights_only=False))


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_loop_is_bit_identical_guarded_and_unguarded(kind: str) -> None:
    bare, guarded = Scene(kind), Scene(kind)
    bare.train(batches())
    with guarded.guard() as guard:
        guarded.train(batches())
        assert guard.incidents == ()
    assert not difference(bare.state(), guarded.state())


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_leaves_all_as_if_its_batches_had_never_come(kind: str) -> None:
    guarded, reference = Scene(kind), Scene(kind)
    with guarded.guard() as guard:
        guarded.train(with_nan(batches()))
        (incident,) = guard.incidents
    reference.train(without(batches(), guarded.micro))
    assert not difference(guarded.state(), reference.state())
    assert incident.origin is not None
    assert incident.findings[0].code == "SG101"


class Waking(nn.Module):
    """A part of it takes no part until a batch brings its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.late = nn.Linear(6, 3), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor, extra: Tensor | None) -> Tensor:
        return self.body(x) if extra is None else self.body(x) + self.late(extra)


def _wake(precision: Any, eps: float, *, guarded: bool) -> tuple[list[str], tuple[Any, ...]]:
    """Bad parameters at the end, and the incidents."""
    torch.manual_seed(0)
    fabric, net = Fabric(accelerator="cpu", devices=1, precision=precision), Waking()
    model, optimizer = fabric.setup(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=eps, foreach=True)
    )
    guard = integration.guard(fabric, model, optimizer, config=QUIET) if guarded else None

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch.get("extra")), batch["y"])

    for batch in waking(batches()):
        fabric.backward(loss(batch) if guard is None else guard.loss(loss, batch))
        optimizer.step()
        optimizer.zero_grad()
    found = guard.incidents if guard is not None else ()
    if guard is not None:
        guard.close()
    return [name for name, p in net.named_parameters() if not bool(torch.isfinite(p).all())], found


@pytest.mark.parametrize(
    ("precision", "eps"), [("32-true", 0.0), ("16-true", 1e-8)], ids=["eps 0", "fp16 underflow"]
)
def test_nan_that_the_optimizer_makes_is_undone_and_explained(precision: str, eps: float) -> None:
    assert _wake(precision, eps, guarded=False)[0] == ["late.weight"]
    bad, incidents = _wake(precision, eps, guarded=True)
    assert bad == []
    assert incidents[0].step == BAD
    assert incidents[0].findings[0].code == "SG502"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [with_nan, all_masked], ids=["NaN batch", "all labels masked"])
def test_a_told_batch_is_replayed_exactly_and_named_as_in_the_plain_loop(
    fault: Any, kind: str
) -> None:
    guarded, plain, data = Scene(kind), Scene(), fault(batches())
    with guarded.guard() as guard:
        guarded.train(data, guard)
        (incident,) = guard.incidents
    with Guard(plain.model.module, plain.optimizer.optimizer, config=QUIET) as ours:
        for i in range(0, STEPS, guarded.micro):
            ours.step(
                lambda b: F.cross_entropy(plain.model.module(b["x"]), b["y"]),
                *data[i : i + guarded.micro],
            )
        (expected,) = ours.incidents
    assert guarded.scheduler.last_epoch == STEPS // guarded.micro - 1
    assert incident.origin is not None
    assert expected.origin is not None
    for name in ("step", "phase", "module", "op", "tensor", "samples", "micro_batch", "reproduced"):
        assert getattr(incident.origin, name) == getattr(expected.origin, name), name
    assert [f.code for f in incident.findings] == [f.code for f in expected.findings]


def test_a_bad_state_is_not_saved_and_the_last_good_file_stays(tmp_path: Path) -> None:
    scene, path = Scene(), tmp_path / "last.ckpt"
    with scene.guard(snapshots=0):  # nothing to repair it from
        scene.train(batches())
        scene.fabric.save(path, {"model": scene.model, "optimizer": scene.optimizer})
        with torch.no_grad():
            next(scene.model.parameters())[0] = torch.nan
        with pytest.raises(SaveRefused, match=r"last.ckpt.*param:0.weight"):
            scene.fabric.save(path, {"model": scene.model, "optimizer": scene.optimizer})
    assert not bad_tensors(torch.load(path, weights_only=False))
    scene.fabric.save(path, {"model": scene.model})  # closed: Fabric is as it was
    assert bad_tensors(torch.load(path, weights_only=False))
    assert not {"save", "clip_gradients"} & set(vars(scene.fabric))


def test_the_loggers_of_fabric_get_the_numbers(tmp_path: Path) -> None:
    scene = Scene(loggers=CSVLogger(tmp_path, name="", version=""))
    with scene.guard():
        scene.train(with_nan(batches()))
    scene.fabric.logger.finalize("success")
    rows = logged(tmp_path)
    assert [float(row["stepguard/nonfinite"]) for row in rows] == [
        float(step == BAD) for step in range(STEPS)
    ]


def test_what_did_not_come_from_setup_is_refused() -> None:
    scene = Scene()
    with pytest.raises(ConfigError, match=r"give what `model, optimizer = fabric.setup"):
        integration.guard(scene.fabric, scene.model.module, scene.optimizer.optimizer)


def test_settings_that_fabric_itself_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"use fabric.clip_gradients"):
        Scene().guard(clip_norm=1.0)
