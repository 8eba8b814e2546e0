"""Saving only what is good, and going on from it as if the run had never stopped."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stepguard
from scenes import (
    FEATURES,
    NAN,
    Scene,
    batches,
    difference,
    generators,
    noisy_net,
    plain_step,
    quiet,
    state_of,
)
from stepguard import ConfigError, Guard, GuardConfig, Policy, StepguardError, TrainingHalted
from stepguard.journal import read_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]
DATA = batches(40)
SAMPLES, BATCH, PASSES, STOP = 40, 4, 3, 13


class Samples(Dataset[Any]):
    """Augmented: each fetch draws a random number, but inside the workers of a loader that cannot
    bring those back.
    """

    def __init__(self, augmented: bool = True) -> None:
        self.augmented = augmented
        source = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=source)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.inputs[index]
        noise = torch.rand(()) if self.augmented else 0.0
        return row + 0.1 * noise, row[:3].argmax()


def scene(*, schedule: bool = True, fused: bool = False, lr: float = 0.02) -> Scene:
    model = noisy_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)
    scheduler = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=60) if schedule else None
    )
    return Scene(model, optimizer, scheduler, ema=torch.optim.swa_utils.AveragedModel(model))


def config(folder: Path, **settings: Any) -> GuardConfig:
    return quiet(**{"run_dir": folder, "snapshot_every": 4, "probation": 6, **settings})


def guard_of(
    at: Scene, settings: GuardConfig, loader: Any = None, make: Callable[..., Guard] = Guard
) -> Guard:
    extra = {"ema": at.ema} if at.ema is not None else None
    guard = make(
        at.model, at.optimizer, loader=loader, state=extra, config=settings, **at.close_over()
    )
    guard.on_commit(lambda: at.ema.update_parameters(at.model))
    return guard


def notes(folder: Path, kind: str) -> list[str]:
    return [str(note.get("summary")) for note in read_run(folder).notes if note.get("kind") == kind]


LOADERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(Samples(), batch_size=BATCH, shuffle=True),
    "workers": lambda: DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=2),
    "stateful": lambda: StatefulDataLoader(Samples(), batch_size=BATCH, shuffle=True),
    "stateful-workers": lambda: StatefulDataLoader(
        Samples(False), batch_size=BATCH, shuffle=True, num_workers=2
    ),
}


def _train(guard: Guard, at: Scene, micro: int, stop: int | None, save: bool) -> None:
    """The loop a user writes: passes over the data, accumulation, perhaps a checkpoint in the
    middle.
    """
    while guard.loader.epoch < PASSES:
        pending: list[Any] = []
        for batch in guard.loader:
            pending.append(batch)
            if len(pending) < micro:
                continue
            guard.step(at.loss_fn, *pending)
            pending = []
            if guard.steps == stop:
                if save:
                    assert guard.save() is not None
                return


@pytest.fixture
def _workers_end() -> Iterator[None]:
    """torchdata's loader keeps its workers until it is collected."""
    yield
    gc.collect()


@pytest.mark.usefixtures("_workers_end")
@pytest.mark.parametrize("loader", LOADERS)
def test_resumed_run_is_bit_identical_to_one_that_never_stopped(
    loader: str, tmp_path: Path
) -> None:
    micro = 2 if loader in ("plain", "stateful") else 1
    torch.manual_seed(5)
    whole = scene()
    with guard_of(whole, quiet(), LOADERS[loader]()) as guard:
        _train(guard, whole, micro, None, save=False)
    end = generators()
    torch.manual_seed(5)
    first = scene()
    with guard_of(first, config(tmp_path), LOADERS[loader]()) as guard:
        _train(guard, first, micro, STOP, save=True)
    torch.manual_seed(77)
    second = scene()
    with guard_of(second, config(tmp_path), LOADERS[loader]()) as guard:
        assert guard.restore() == STOP
        assert difference(state_of(second), state_of(first)) == ""
        _train(guard, second, micro, None, save=False)
    assert difference(state_of(second), state_of(whole)) == ""
    assert difference(generators(), end) == ""
    assert any("fetched again by seed" in line for line in notes(tmp_path, "loader")) == (
        "stateful" not in loader
    )


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_watched_loop_resumes_bit_identically_too(fused: bool, tmp_path: Path) -> None:
    def train(at: Scene, guard: Guard, data: list[Any]) -> None:
        for batch in data:
            plain_step(at, (batch,))

    whole, first, second = scene(fused=fused), scene(fused=fused), scene(fused=fused)
    ema, whole.ema, first.ema, second.ema = None, None, None, None
    assert ema is None
    torch.manual_seed(5)
    train(whole, None, DATA[:20])  # type: ignore[arg-type]
    torch.manual_seed(5)
    with stepguard.watch(
        first.model, first.optimizer, config=config(tmp_path), **first.close_over()
    ) as guard:
        train(first, guard, DATA[:12])
        assert guard.save() is not None
    with stepguard.watch(
        second.model, second.optimizer, config=config(tmp_path), **second.close_over()
    ) as guard:
        assert guard.restore("last-good") == 12
        train(second, guard, DATA[12:20])
    assert difference(state_of(second), state_of(whole)) == ""


def test_resumed_guard_remembers_what_the_run_looked_like(tmp_path: Path) -> None:
    first, second = scene(), scene()
    with guard_of(first, config(tmp_path)) as guard:
        for batch in DATA[:12]:
            guard.step(first.loss_fn, batch)
        history, path = guard._context.history, guard.save()
    with guard_of(second, config(tmp_path)) as guard:
        assert path is not None
        guard.restore(path)
        assert guard._context.history.losses == history.losses and guard.steps == 12
        assert guard._context.run.resumed


# --- only what is good
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def _ruin(at: Scene) -> None:
    at.model[0].weight[0, 0] = NAN


def test_state_that_is_not_finite_is_refused_and_the_last_good_one_stays(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path)) as guard:
        for batch in DATA[:8]:
            guard.step(at.loss_fn, batch)
        saved = guard.save()
        before = state_of(at)
        _ruin(at)
        assert guard.save() is None
        assert guard.restore() == 8
        assert difference(state_of(at), before) == ""
    assert saved is not None and saved.is_dir()
    assert any(
        "NOT saved" in line and "0.weight is not finite" in line
        for line in notes(tmp_path, "checkpoint")
    )


def test_state_after_a_rise_of_the_learning_rate_is_saved(tmp_path: Path) -> None:
    at = scene(schedule=False)
    with guard_of(at, config(tmp_path)) as guard:
        for index, batch in enumerate(DATA[:14]):
            if index == 12:
                at.optimizer.param_groups[0]["lr"] *= 3  # what a schedule of the loop's own may do
            guard.step(at.loss_fn, batch)
        assert guard.save() is not None


def test_skipped_batch_does_not_make_a_state_bad(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path)) as guard:
        for batch in DATA[:8]:
            guard.step(at.loss_fn, batch)
        guard.step(at.loss_fn, (DATA[8][0] * NAN, DATA[8][1]))
        assert guard.save() is not None


def test_mask_that_is_infinite_on_purpose_is_saved_and_restored(tmp_path: Path) -> None:
    def masked() -> Scene:
        at = scene()
        at.model.register_buffer("mask", torch.full((3,), -torch.inf))
        at.ema = torch.optim.swa_utils.AveragedModel(at.model)
        return at

    first, second = masked(), masked()
    with guard_of(first, config(tmp_path)) as guard:
        for batch in DATA[:4]:
            guard.step(first.loss_fn, batch)
        assert guard.save() is not None
    with guard_of(second, config(tmp_path)) as guard:
        assert guard.restore() == 4
    assert difference(state_of(second), state_of(first)) == ""


def test_saving_without_a_folder_says_what_is_missing() -> None:
    at = scene()
    with guard_of(at, quiet()) as guard:
        with pytest.raises(ConfigError, match="run_dir"):
            guard.save()
        with pytest.raises(ConfigError, match="run_dir"):
            guard.restore()
        with pytest.raises(ConfigError, match="loader="):
            _ = guard.loader


def test_failing_disk_is_said_and_training_goes_on(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path)) as guard:
        guard.step(at.loss_fn, DATA[0])
        (tmp_path / "checkpoints").write_text("in the way")
        assert guard.save() is None
        assert guard.step(at.loss_fn, DATA[1]).committed and guard.armed
    assert any("NOT saved" in line for line in notes(tmp_path, "checkpoint"))


# --- restoring
# --------------------------------------------------------------------------------------------------


def _two_checkpoints(folder: Path) -> list[Path]:
    at, found = scene(), []
    with guard_of(at, config(folder)) as guard:
        for index, batch in enumerate(DATA[:8]):
            guard.step(at.loss_fn, batch)
            if index in (3, 7):
                found.append(guard.save())
    assert None not in found
    return found  # type: ignore[return-value]


def test_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    older, newer = _two_checkpoints(tmp_path)
    for file in newer.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    at = scene()
    with guard_of(at, config(tmp_path)) as guard:
        assert guard.restore() == 4
    said = notes(tmp_path, "checkpoint")
    assert any(newer.name in line and "passed over" in line for line in said)
    assert any(f"restored {older}" in line for line in notes(tmp_path, "restored"))


def test_starts_that_ended_without_a_stop_take_the_same_checkpoint_again(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    for _ in range(4):
        with guard_of(scene(), config(tmp_path)) as guard:
            assert guard.restore() == 8


def test_checkpoint_that_leads_to_a_stop_again_and_again_is_left_for_an_older_one(
    tmp_path: Path,
) -> None:
    _two_checkpoints(tmp_path)
    began = []
    for _ in range(3):
        at = scene()
        settings = config(tmp_path, snapshots=0, policy=Policy(actions=("skip", "stop")))
        with guard_of(at, settings) as guard, pytest.raises(TrainingHalted):
            began.append(guard.restore())
            guard.step(at.loss_fn, DATA[8])
            _ruin(at)
            guard.step(at.loss_fn, DATA[9])
    assert began == [8, 8, 4]
    assert any(
        "has led to a stop 2 times: going back to step-4" in line
        for line in notes(tmp_path, "checkpoint")
    )


def test_nothing_usable_is_one_error(tmp_path: Path) -> None:
    for path in _two_checkpoints(tmp_path):
        shutil.rmtree(path)
    with guard_of(at := scene(), config(tmp_path)) as guard, pytest.raises(StepguardError):
        guard.restore()
    assert at.optimizer.state_dict()["state"] == {}


def test_checkpoint_of_another_model_is_refused_with_the_name_that_differs(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    other = nn.Linear(6, 3)
    with Guard(other, torch.optim.SGD(other.parameters(), 0.1), config=config(tmp_path)) as guard:
        before = other.weight.clone()
        with pytest.raises(StepguardError, match="does not fit"):
            guard.restore()
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize("schedule", [False, True], ids=["constant", "onecycle"])
@pytest.mark.parametrize("choice", ["checkpoint", "config"])
def test_new_learning_rate_in_the_configuration_is_compared_and_applied_if_asked(
    choice: str, schedule: bool, tmp_path: Path
) -> None:
    first = scene(schedule=schedule)
    with guard_of(first, config(tmp_path)) as guard:
        for batch in DATA[:8]:
            guard.step(first.loss_fn, batch)
        guard.save()
    old = first.optimizer.param_groups[0]["lr"]
    second = scene(schedule=schedule, lr=0.005)
    with guard_of(second, config(tmp_path, resume_lr=choice)) as guard:
        guard.restore()
        wanted = old if choice == "checkpoint" else old / 4
        assert second.optimizer.param_groups[0]["lr"] == pytest.approx(wanted)
        for batch in DATA[8:10]:
            guard.step(second.loss_fn, batch)
            guard.step(first.loss_fn, batch) if False else plain_step(first, (batch,))
        assert second.optimizer.param_groups[0]["lr"] == pytest.approx(
            first.optimizer.param_groups[0]["lr"] * wanted / old
        )
    (said,) = notes(tmp_path, "lr_mismatch")
    assert "SG802" in said and ("is applied" in said) == (choice == "config")


def test_same_learning_rate_is_not_talked_about(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    with guard_of(scene(), config(tmp_path)) as guard:
        guard.restore()
    assert notes(tmp_path, "lr_mismatch") == []


# --- by itself
# --------------------------------------------------------------------------------------------------


def _names(folder: Path) -> list[str]:
    return sorted(
        (p.name for p in (folder / "checkpoints").glob("step-*")),
        key=lambda n: int(n.split("-")[1]),
    )
