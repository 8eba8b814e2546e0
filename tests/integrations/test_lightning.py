"""Lightning's Trainer under GuardCallback: what it loses unguarded, and what is left of that
guarded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from integrations.lightning_scenes import (
    BAD,
    OWN_WARNINGS,
    QUIET,
    STEPS,
    Batch,
    Batches,
    Net,
    all_masked,
    bad_tensors,
    batches,
    everything,
    last,
    learned,
    logged,
    plain_loop,
    run,
    trainer,
    waking,
    with_nan,
)
from scenes import difference
from stepguard import ConfigError, Incident, Policy, TrainingHalted
from stepguard.integrations import lightning as integration
from stepguard.integrations._parts import Framework
from stepguard.integrations.lightning import AUTOMATIC, GuardCallback, TrainingStep
from stepguard.journal import read_run

pytestmark = OWN_WARNINGS
Fault = Callable[[list[Batch]], list[Batch]]
FAULTS: dict[str, tuple[Fault, dict[str, Any], dict[str, Any], str]] = {
    "NaN batch": (with_nan, {}, {}, "SG101"),
    "all labels masked": (all_masked, {}, {}, "SG102"),
    "fp16 optimizer underflow": (waking, {}, {"precision": "16-true"}, "SG502"),
    "NaN made by the optimizer": (waking, {"eps": 0.0}, {}, "SG502"),
}
"""What is done to the data, to the module and to the Trainer, and the cause that must be found."""


def scaled() -> MixedPrecision:
    """fp16 with a loss scale on a CPU, where precision="16-mixed" would fall back to bf16."""
    return MixedPrecision(
        "16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    )


def place(incident: Incident) -> tuple[Any, ...]:
    origin = incident.origin
    assert origin is not None
    return (
        incident.step,
        incident.verdict.kind,
        [finding.code for finding in incident.findings],
        *(
            origin.phase,
            origin.module,
            origin.op,
            origin.source,
            origin.tensor,
            origin.samples,
            origin.reproduced,
        ),
    )


# --- damage and protection
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_unguarded_the_last_checkpoint_is_nan(name: str, tmp_path: Path) -> None:
    fault, module, settings, _ = FAULTS[name]
    run(tmp_path, Net(**module), fault(batches()), **settings)
    assert bad_tensors(last(tmp_path)["state_dict"])
    assert [path.name for path in (tmp_path / "saves").iterdir()].count("last.ckpt") == 1


@pytest.mark.parametrize("name", FAULTS)
def test_guarded_the_step_is_skipped_explained_and_never_saved(name: str, tmp_path: Path) -> None:
    fault, options, settings, code = FAULTS[name]
    module, callback = Net(**options), GuardCallback(QUIET)
    made = run(tmp_path, module, fault(batches()), callback, **settings)
    (incident,) = callback.incidents
    assert (incident.step, incident.findings[0].code) == (BAD, code)
    assert not bad_tensors(everything(made, module))
    assert not bad_tensors(learned(last(tmp_path)))
    assert made.lr_scheduler_configs[0].scheduler.last_epoch == STEPS - 1
    callback.close()


@pytest.mark.parametrize("name", FAULTS)
def test_origin_sample_and_cause_are_those_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    fault, options, settings, _ = FAULTS[name]
    callback, data = GuardCallback(QUIET), fault(batches())
    run(tmp_path, Net(**options, noisy=False), data, callback, **settings)
    plain = plain_loop(
        Net(**options, noisy=False), data, half=settings.get("precision") == "16-true"
    )
    assert [place(i) for i in callback.incidents] == [place(i) for i in plain]
    callback.close()


def test_the_log_shows_the_true_loss_beside_a_finite_companion(tmp_path: Path) -> None:
    callback = GuardCallback(QUIET)
    run(tmp_path, Net(), with_nan(batches()), callback)
    callback.close()
    rows = [row for row in logged(tmp_path) if row["stepguard/loss"]]
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert [math.isnan(float(row["stepguard/loss"])) for row in rows] == [
        step == BAD for step in range(STEPS)
    ]
    for name in ("stepguard/nonfinite", "stepguard/skipped"):
        assert [float(row[name]) for row in rows] == [float(step == BAD) for step in range(STEPS)]


@pytest.mark.parametrize("kind", ["accumulated", "clipped", "bf16", "scaled", "fused", "sgd"])
def test_a_skipped_step_leaves_all_as_if_its_batches_had_never_come(
    kind: str, tmp_path: Path
) -> None:
    data = batches()
    settings = _settings(kind)
    options: dict[str, Any] = {
        "noisy": False,
        "fused": kind == "fused",
        "optimizer": "sgd" if kind == "sgd" else "adamw",
    }
    module, callback = Net(**options), GuardCallback(QUIET)
    made = run(tmp_path / "guarded", module, with_nan(data), callback, **settings)
    gone = (BAD, BAD + 1) if kind == "accumulated" else (BAD,)
    rest = [batch for index, batch in enumerate(data) if index not in gone]
    reference = Net(**options)
    other = run(tmp_path / "without", reference, rest, **settings)
    assert not difference(everything(made, module), everything(other, reference))
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert (incident.origin.tensor, incident.origin.samples, incident.origin.reproduced) == (
        "batch:x",
        (2,),
        True,
    )
    callback.close()


def _settings(kind: str) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = {
        "accumulated": {"accumulate_grad_batches": 2},
        "clipped": {"gradient_clip_val": 0.1},
        "bf16": {"precision": "bf16-mixed"},
        "scaled": {"plugins": [scaled()]},
    }
    return known.get(kind, {})


# --- healthy runs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "accumulated", "clipped", "bf16", "scaled", "fused"])
def test_a_healthy_run_is_bit_identical_guarded_and_unguarded(kind: str, tmp_path: Path) -> None:
    states = []
    for name, callbacks in (("bare", []), ("guarded", [GuardCallback(QUIET)])):
        module = Net(fused=kind == "fused")
        made = run(tmp_path / name, module, batches(), *callbacks, **_settings(kind))
        states.append((everything(made, module), last(tmp_path / name)["state_dict"]))
        for callback in callbacks:
            assert callback.incidents == ()
            callback.close()
    assert not difference(*states)


def test_everything_is_undone_by_close(tmp_path: Path) -> None:
    callback, module = GuardCallback(QUIET), Net()
    made = run(tmp_path, module, batches(), callback)
    assert "training_step" not in vars(made.strategy)
    assert "update_lr_schedulers" not in vars(made.fit_loop.epoch_loop)
    callback.close()
    callback.close()
    assert type(made.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"
    assert "save_checkpoint" not in vars(made)
    assert not any(name in vars(saver) for saver in made.checkpoint_callbacks for name in AUTOMATIC)
    assert not made.optimizers[0]._optimizer_step_pre_hooks


# --- company
# --------------------------------------------------------------------------------------------------


def test_the_halt_reaches_the_caller_and_leaves_the_weights_from_before(tmp_path: Path) -> None:
    callback, module = GuardCallback(_stopping()), Net()
    with pytest.raises(TrainingHalted):
        run(tmp_path, module, with_nan(batches()), callback)
    reference = Net()
    run(tmp_path / "short", reference, batches()[:BAD])
    assert not difference(dict(module.state_dict()), dict(reference.state_dict()))
    assert callback.incidents[0].stopped
    callback.close()


def _stopping() -> Any:
    from dataclasses import replace

    return replace(QUIET, policy=Policy(actions=("stop",)))


def test_an_average_of_the_weights_never_sees_the_bad_step(tmp_path: Path) -> None:
    class Ema(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None

    callback, module = GuardCallback(QUIET), Net()
    made = run(tmp_path, module, with_nan(batches()), callback, Ema(use_buffers=True))
    assert not bad_tensors(everything(made, module))
    assert len(callback.incidents) == 1
    callback.close()


class Counting(Net):
    """Logs, counts and measures in its training step, as people do."""

    def __init__(self) -> None:
        super().__init__(noisy=False)
        self.seen, self.mean = 0, MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        loss = self.loss(batch)
        self.mean.update(batch["y"].float())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "scores": loss.detach()}


def test_a_replay_is_neither_logged_nor_measured(tmp_path: Path) -> None:
    callback, module = GuardCallback(QUIET), Counting()
    run(tmp_path, module, with_nan(batches()), callback)
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert incident.origin.samples == (2,)
    assert module.mean._update_count == 0  # Lightning resets it at the end of the epoch
    # a metric of the module is put back with the rest of it: the vetoed batch is not measured at
    # all
    counted = torch.cat(
        [batch["y"].float() for index, batch in enumerate(batches()) if index != BAD]
    )
    (shown,) = [float(row["mean"]) for row in logged(tmp_path) if row["mean"]]
    assert shown == pytest.approx(float(counted.mean()), abs=1e-5)
    callback.close()


class LineSearch(Net):
    """An optimizer that evaluates the training step several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=4)


class FromIterator(Net):
    """Takes its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.parametrize("kind", [LineSearch, FromIterator])
def test_odd_training_steps_are_guarded_too(kind: type[Net], tmp_path: Path) -> None:
    callback, module = GuardCallback(QUIET), kind(noisy=False)
    made = run(tmp_path, module, with_nan(batches()), callbacks=[callback])
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert (incident.step, incident.origin.tensor, incident.origin.samples) == (
        BAD,
        "batch:x",
        (2,),
    )
    assert not bad_tensors(everything(made, module))
    callback.close()


class Scheduled(Net):
    """Three schedules for one optimizer, one of which counts epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        made = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for _ in range(3)]
        intervals = ("epoch", "step", "step")
        pairs = zip(made, intervals, strict=True)
        return [optimizer], [{"scheduler": one, "interval": interval} for one, interval in pairs]


def test_every_schedule_that_counts_steps_is_held_and_no_other(tmp_path: Path) -> None:
    callback = GuardCallback(QUIET)
    made = run(tmp_path, Scheduled(), with_nan(batches()), callback)
    assert [config.scheduler.last_epoch for config in made.lr_scheduler_configs] == [
        1,
        STEPS - 1,
        STEPS - 1,
    ]
    callback.close()


class Again(Callback):
    """Runs every training step once more and compares the loss with the one that backward starts
    from.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step, self._batch = TrainingStep(trainer, pl_module), batch
        self._step.about_to_run(batch, (batch_idx,), 0)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self.pairs.append((loss.item(), self._step(self._batch).item()))


@pytest.mark.parametrize("kind", ["accumulated", "bf16"])
def test_a_replay_gives_the_loss_that_backward_starts_from(kind: str, tmp_path: Path) -> None:
    again = Again()
    run(tmp_path, Counting(), batches(), again, **_settings(kind))
    assert len(again.pairs) == STEPS
    assert all(first == second for first, second in again.pairs)


class Manual(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__(noisy=False)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            loss = self.loss({**batch, "extra": batch["x"]})
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net, self.extra)]


def test_manual_optimization_has_a_guard_an_optimizer_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    callback, module = GuardCallback(QUIET), Manual()
    with pytest.warns(RuntimeWarning, match="manual optimization"):
        made = run(tmp_path, module, with_nan(batches()), callbacks=[callback])
    assert len(callback.guards) == 2
    assert [incident.verdict.kind for incident in callback.incidents] == ["nonfinite_input"] * 2
    assert not bad_tensors(everything(made, module))
    callback.close()


def test_a_version_nobody_has_looked_at_is_refused_with_those_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = integration.LIGHTNING
    assert not known.supports("2.6.2")
    assert not known.supports("3.0")
    other = Framework("lightning", first="1.0", before="2.0", tested="1.9")
    with pytest.raises(
        ConfigError,
        match=r"lightning .* is not known to this guard, which works with lightning 1.0",
    ):
        other.require()


def test_one_callback_guards_one_fit_after_the_other(tmp_path: Path) -> None:
    callback = GuardCallback(QUIET)
    for number in range(2):
        run(tmp_path / str(number), Net(), with_nan(batches()), callback)
    assert [incident.step for incident in callback.incidents] == [BAD, BAD]
    callback.close()


def test_the_callback_can_be_copied_before_the_fit() -> None:
    assert copy.deepcopy(GuardCallback(QUIET)).incidents == ()


def test_row_that_nobody_normalised_is_named_by_its_row_in_the_data_set(tmp_path: Path) -> None:
    samples = [{"x": x, "y": y} for b in batches(30) for x, y in zip(b["x"], b["y"], strict=True)]
    samples[77]["x"] = 2e4 * samples[77]["x"]
    data: Any = DataLoader(Batches(samples), batch_size=8, shuffle=True)
    guarding = GuardCallback(replace(QUIET, run_dir=tmp_path / "run"))
    torch.manual_seed(1)
    trainer(tmp_path, guarding, max_epochs=3).fit(Net(noisy=False), data)
    notes = [
        str(n["summary"]) for n in read_run(tmp_path / "run").notes if n.get("kind") == "spike"
    ]
    assert any("(row 77) reaches" in note and "in batch:x" in note for note in notes)
