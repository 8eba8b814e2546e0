"""Lightning under GuardCallback and Fabric under guard, also on two gloo ranks: what they lose
unguarded, and what is left of that guarded.
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
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins.precision import MixedPrecision as FabricPrecision
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from distributed.launch import launch
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
    fit,
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
from settings_of import changed
from stepguard import ConfigError, Guard, Incident, Policy, TrainingHalted
from stepguard.integrations import fabric as integration
from stepguard.integrations.lightning import (
    AUTOMATIC,
    GuardCallback,
    GuardedCheckpointIO,
    SaveRefused,
    TrainingStep,
)
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
def test_guarded_the_step_is_skipped_explained_as_in_the_plain_loop_and_never_saved(
    name: str, tmp_path: Path
) -> None:
    fault, options, settings, code = FAULTS[name]
    module, callback, data = Net(**options, noisy=False), GuardCallback(QUIET), fault(batches())
    made = run(tmp_path, module, data, callback, **settings)
    (incident,) = callback.incidents
    assert (incident.step, incident.findings[0].code) == (BAD, code)
    assert not bad_tensors(everything(made, module))
    assert not bad_tensors(learned(last(tmp_path)))
    assert made.lr_scheduler_configs[0].scheduler.last_epoch == STEPS - 1
    half = settings.get("precision") == "16-true"
    plain = plain_loop(Net(**options, noisy=False), data, half=half)
    assert [place(incident)] == [place(one) for one in plain]
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


STOPPING = Policy(actions=("stop",))


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
    callback, module = GuardCallback(replace(QUIET, policy=STOPPING)), Net()
    with pytest.raises(TrainingHalted):
        run(tmp_path, module, with_nan(batches()), callback)
    reference = Net()
    run(tmp_path / "short", reference, batches()[:BAD])
    assert not difference(dict(module.state_dict()), dict(reference.state_dict()))
    assert callback.incidents[0].stopped
    callback.close()


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


class Poison(Callback):
    """Makes the weights NaN behind the guard's back, as an unseen fault would, and tries to save
    that.
    """

    def __init__(self, at: int) -> None:
        self._at = at

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step != self._at:
            return
        with torch.no_grad():
            pl_module.net[0].weight[0, 0] = torch.nan
        for weights_only in (False, True):
            with pytest.raises(SaveRefused, match=r"manual.ckpt.*param:net.0.weight"):
                trainer.save_checkpoint(Path(trainer.default_root_dir, "manual.ckpt"), weights_only)


SAVERS: dict[str, dict[str, Any]] = {
    "top 1, last": {"save_top_k": 1, "save_last": True},
    "top 1, link": {"save_top_k": 1, "save_last": "link"},
    "top 2 by a metric, last": {
        "save_top_k": 2,
        "save_last": True,
        "monitor": "step",
        "mode": "max",
    },
    "all, weights only": {"save_top_k": -1, "save_last": True, "save_weights_only": True},
    "on exception": {"save_top_k": 1, "save_last": True, "save_on_exception": True},
}


@pytest.mark.parametrize("name", SAVERS)
def test_a_bad_state_is_saved_nowhere_and_rotation_keeps_the_last_good_one(
    name: str, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=1, **SAVERS[name])
    callback = GuardCallback(changed(QUIET, snapshots=0))  # nothing to repair it from
    with pytest.raises(TrainingHalted):
        run(tmp_path, Net(), batches(), callbacks=[callback, Poison(5), saves])
    files = [path for path in (tmp_path / "saves").iterdir() if not path.is_symlink()]
    assert len(files) >= 1
    assert not (tmp_path / "manual.ckpt").exists()
    for path in [*files, tmp_path / "saves" / "last.ckpt"]:
        assert not bad_tensors(learned(torch.load(path, weights_only=False)))
    assert last(tmp_path)["global_step"] == 4
    callback.close()


def test_checkpoints_stay_protected_after_the_fit_until_close(tmp_path: Path) -> None:
    callback, module = GuardCallback(QUIET), Net()
    made = run(tmp_path, module, batches(), callback)
    with torch.no_grad():
        module.extra.weight.fill_(torch.inf)
    with pytest.raises(SaveRefused, match=r"param:extra.weight"):
        made.save_checkpoint(tmp_path / "after.ckpt")
    assert not (tmp_path / "after.ckpt").exists()
    callback.close()
    made.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()


def test_rotation_goes_on_once_a_good_save_follows_a_refused_one() -> None:
    class Folder:
        def __init__(self) -> None:
            self.files: set[str] = set()

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.files.add(str(path))

        def remove_checkpoint(self, path: Any) -> None:
            self.files.remove(str(path))

    folder = Folder()
    state: list[str] = []
    io = GuardedCheckpointIO(folder, lambda path: bool(state))
    io.save_checkpoint({}, "/a")
    state.append("param:weight")
    io.save_checkpoint({}, "/b")
    io.remove_checkpoint("/a")
    assert folder.files == {"/a"}
    state.clear()
    io.save_checkpoint({}, "/c")
    assert folder.files == {"/c"}


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_of_a_skipped_step_holds_the_schedule_from_before_it(
    fused: bool, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(
        tmp_path / "saves", filename="{step}", save_top_k=-1, every_n_train_steps=1
    )
    callback = GuardCallback(QUIET)
    run(tmp_path, Net(fused=fused, noisy=False), with_nan(batches()), callbacks=[callback, saves])
    callback.close()
    found = {
        n: torch.load(tmp_path / "saves" / f"step={n}.ckpt", weights_only=False)
        for n in (BAD, BAD + 1, BAD + 2)
    }
    assert [state["lr_schedulers"][0]["last_epoch"] for state in found.values()] == [
        BAD,
        BAD,
        BAD + 1,
    ]


def test_a_run_goes_on_from_a_checkpoint_with_its_step_numbers(tmp_path: Path) -> None:
    run(tmp_path, Net(), batches(4))
    callback = GuardCallback(QUIET)
    made = trainer(tmp_path / "again", callback, max_epochs=2)
    with pytest.warns(UserWarning, match="dirpath has changed"):
        fit(
            made,
            Net(),
            with_nan(batches(4), at=1),
            ckpt_path=tmp_path / "saves" / "last.ckpt",
            weights_only=False,
        )
    assert [incident.step for incident in callback.incidents] == [5]
    callback.close()


@pytest.mark.parametrize("fused", [False, True])
def test_weights_hurt_between_two_steps_are_rewound_and_saving_goes_on(
    fused: bool, tmp_path: Path
) -> None:
    callback, module = (
        GuardCallback(changed(QUIET, snapshot_every=2, probation=3)),
        Net(fused=fused),
    )
    made = run(tmp_path, module, batches(16), callback, Poison(10))
    (incident,) = callback.incidents
    assert incident.decision is not None
    assert (incident.step, incident.decision.action) == (10, "rewind")
    assert not bad_tensors(everything(made, module))
    state = last(tmp_path)
    assert not bad_tensors(learned(state))
    assert state["global_step"] == 16
    assert made.lr_scheduler_configs[0].scheduler.last_epoch < 16 - 3
    callback.close()


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
            precision = {"plugins": [FabricPrecision("16-mixed", "cpu", scaler)]}
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


WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario, run by one pair of processes."""
    folder = tmp_path_factory.mktemp("lightning")
    code, said = launch(WORKER, folder, ["lightning"], 150, imports=("lightning",))
    assert code == 0, said[-4000:]
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> list[dict[str, Any]]:
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("bare", "guarded"),
    [
        ("bare", "healthy"),
        ("bare accumulated", "healthy accumulated"),
        ("fabric bare", "fabric healthy"),
    ],
)
def test_a_healthy_run_is_bit_identical_on_both_ranks(
    found: list[dict[str, Any]], bare: str, guarded: str
) -> None:
    for rank in found:
        assert not difference(rank[bare]["state"], rank[guarded]["state"])
        assert rank[guarded]["incidents"] == []


def test_unguarded_one_rank_s_batch_ruins_the_last_checkpoint(
    out: Path, found: list[dict[str, Any]]
) -> None:
    assert all(bad_tensors(rank["damaged"]["state"]["module"]) for rank in found)
    assert bad_tensors(last(out / "damaged")["state_dict"])


@pytest.mark.parametrize(
    ("name", "step"),
    [("bad", BAD), ("bad fused", BAD), ("bad accumulated", BAD // 2), ("fabric bad", BAD)],
)
def test_both_ranks_skip_the_step_and_name_rank_1_and_its_sample(
    found: list[dict[str, Any]], name: str, step: int
) -> None:
    for rank in found:
        assert rank[name]["incidents"] == [(step, (1,), 1, "batch:x", (2,), True)]
        assert not bad_tensors(rank[name]["state"])
    assert not difference(_learned(found[0][name]), _learned(found[1][name]))


def _learned(outcome: dict[str, Any]) -> dict[str, Any]:
    """What ranks share: BatchNorm's statistics are each rank's own."""
    state = outcome["state"].get("module") or outcome["state"]["model"]
    return {key: value for key, value in state.items() if "running" not in key}


@pytest.mark.parametrize(
    ("folder", "steps"), [("bad", STEPS), ("fused", STEPS), ("bad2", STEPS // 2)]
)
def test_the_last_checkpoint_is_good_and_the_schedule_held(
    out: Path, folder: str, steps: int
) -> None:
    state = last(out / folder)
    assert not bad_tensors(learned(state))
    assert (state["global_step"], state["lr_schedulers"][0]["last_epoch"]) == (steps, steps - 1)
