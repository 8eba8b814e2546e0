"""Checkpoints under GuardCallback: a bad state is written nowhere, and the last good one stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from integrations.lightning_scenes import (
    BAD,
    OWN_WARNINGS,
    QUIET,
    Net,
    bad_tensors,
    batches,
    everything,
    fit,
    last,
    learned,
    run,
    trainer,
    with_nan,
)
from settings_of import changed
from stepguard import TrainingHalted
from stepguard.integrations.lightning import GuardCallback, GuardedCheckpointIO, SaveRefused

pytestmark = OWN_WARNINGS


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
