"""Saving only what is good, and going on from it as if the run had never stopped."""

from __future__ import annotations

import gc
import json
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
from forked import FULL
from scenes import (
    FEATURES,
    NAN,
    Scene,
    bare,
    batches,
    difference,
    generators,
    grouped,
    noisy_net,
    plain_net,
    plain_step,
    quiet,
    state_of,
)
from stepguard import ConfigError, Guard, GuardConfig, Policy, StepguardError, TrainingHalted
from stepguard.checkpoints import Background
from stepguard.engine.recover.rewind import attempts_in, failed_starts, past_of
from stepguard.journal import read_run

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
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS if FULL else ["plain", "stateful-workers"])
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


def test_failing_disk_is_said_and_training_goes_on(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path)) as guard:
        guard.step(at.loss_fn, DATA[0])
        (tmp_path / "checkpoints").write_text("in the way")
        assert guard.save() is None
        assert guard.step(at.loss_fn, DATA[1]).committed and guard.armed
    assert any("NOT saved" in line for line in notes(tmp_path, "checkpoint"))


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
    assert any(newer.name in line and "is skipped" in line for line in said)
    assert any(f"restored {older}" in line for line in notes(tmp_path, "restored"))


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


def _names(folder: Path) -> list[str]:
    return sorted(
        (p.name for p in (folder / "checkpoints").glob("step-*")),
        key=lambda n: int(n.split("-")[1]),
    )


# --- checkpoints that the guard takes by itself


def test_checkpoints_are_written_by_themselves_once_they_have_proved_good(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path, checkpoint_every=7, keep=2)) as guard:
        for batch in DATA[:13]:
            guard.step(at.loss_fn, batch)
            assert _names(tmp_path) == []
        guard.step(at.loss_fn, DATA[13])
        guard._saving.wait()
        assert _names(tmp_path) == ["step-7"]
        for batch in DATA[14:30]:
            guard.step(at.loss_fn, batch)
            guard._saving.wait()
    assert _names(tmp_path) == ["step-14", "step-21"]


def test_checkpoint_taken_by_itself_resumes_bit_identically(tmp_path: Path) -> None:
    whole, first, second = scene(), scene(), scene()
    loader = LOADERS["plain"]
    torch.manual_seed(5)
    with guard_of(whole, quiet(), loader()) as guard:
        _train(guard, whole, 1, None, save=False)
    torch.manual_seed(5)
    with guard_of(first, config(tmp_path, checkpoint_every=7), loader()) as guard:
        _train(guard, first, 1, 16, save=False)
    with guard_of(second, config(tmp_path), loader()) as guard:
        assert guard.restore() == 7
        _train(guard, second, 1, None, save=False)
    assert difference(state_of(second), state_of(whole)) == ""


def test_trouble_with_no_snapshot_left_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path, checkpoint_every=5, snapshot_memory=1)) as guard:
        for index, batch in enumerate(DATA[:14]):
            if index == 12:
                _ruin(at)
            guard.step(at.loss_fn, batch)
        (decision,) = [i.decision for i in guard.incidents]
    assert decision is not None and (decision.action, decision.rewound_to) == ("rewind", 10)
    assert all(torch.isfinite(p).all() for p in at.model.parameters())


def test_snapshot_that_is_being_written_is_given_back_after_others_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    busy = [False]

    def offer_job(self: Background, step: int, job: object) -> bool:
        if busy[0]:
            return False
        busy[0] = True
        written.append(step)
        return True

    monkeypatch.setattr(Background, "offer_job", offer_job)
    monkeypatch.setattr(Background, "idle", lambda self: not busy[0])
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = quiet(run_dir=tmp_path, checkpoint_every=4, probation=2, snapshot_every=4)
    with Guard(model, optimizer, config=config) as guard:
        scene = Scene(model, optimizer)
        for number, batch in enumerate(batches(60)):
            if number % 20 == 0:
                busy[0] = False
            guard.step(scene.loss_fn, batch)
        ring = guard._rewinder.snapshots.ring.snapshots
    assert len(written) == 3
    assert sum(snapshot.lent for snapshot in ring) <= 1
    assert max(snapshot.step for snapshot in ring) >= 52


# --- what the journal tells of earlier attempts


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_watched_loop_resumes_bit_identically_too(fused: bool, tmp_path: Path) -> None:
    whole, first, second = scene(fused=fused), scene(fused=fused), scene(fused=fused)
    whole.ema = first.ema = second.ema = None
    torch.manual_seed(5)
    bare(whole, grouped(DATA[:20], 1))
    torch.manual_seed(5)
    for at, data in ((first, DATA[:12]), (second, DATA[12:20])):
        with stepguard.watch(
            at.model, at.optimizer, config=config(tmp_path), **at.close_over()
        ) as guard:
            if at is second:
                assert guard.restore("last-good") == 12
            bare(at, grouped(data, 1))
            assert guard.save() is not None
    assert difference(state_of(second), state_of(whole)) == ""


def test_state_after_a_skipped_batch_and_a_rise_of_the_learning_rate_is_saved(
    tmp_path: Path,
) -> None:
    at = scene(schedule=False)
    with guard_of(at, config(tmp_path)) as guard:
        for index, batch in enumerate(DATA[:14]):
            if index == 12:
                at.optimizer.param_groups[0]["lr"] *= 3  # what a schedule of the loop's own may do
            guard.step(at.loss_fn, (batch[0] * NAN, batch[1]) if index == 8 else batch)
        assert len(guard.incidents) == 1 and guard.save() is not None
    for _ in range(3):  # starts that ended without a stop take the same checkpoint again
        with guard_of(scene(schedule=False), config(tmp_path)) as guard:
            assert guard.restore() == 14
    assert notes(tmp_path, "lr_mismatch") != []


def test_what_is_missing_to_save_is_said() -> None:
    with guard_of(scene(), quiet()) as guard:
        for ask in (guard.save, guard.restore):
            with pytest.raises(ConfigError, match="run_dir"):
                ask()
        with pytest.raises(ConfigError, match="loader="):
            _ = guard.loader


def test_archive_gives_back_good_states_of_this_run_up_to_this_step_only(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path)) as guard:
        context, archive = guard._context, guard._saving._archive
        assert archive is not None
        for step, doubt in ((3, ""), (4, "the run has diverged")):
            context.step = step
            state = guard._rewinder.snapshots.present()
            archive.complete(state, [])
            archive.write(step, state, [{}], doubt, later=bool(doubt))
        archive.background.wait()
        assert [entry.step for entry in archive.store.list()] == [4, 3]
        assert archive.steps() == [3] and archive.read(5) is None
        read = archive.read(3)
        weight = next(iter(at.model.parameters()))
        assert read is not None and torch.equal(read.tensors["model/0.weight"], weight)
        context.step = 2
        assert archive.steps() == []
        context.step, context.run.id = 3, "another"
        assert archive.steps() == [] and archive.own_good() == []


def test_journal_tells_how_earlier_attempts_started_and_ended(tmp_path: Path) -> None:
    def incident(step: Any, action: str, left_out: str = "") -> dict[str, Any]:
        decision = {"action": action, "left_out": left_out}
        facts = {"step": step, "decision": decision, "verdict": {"kind": "nonfinite_loss"}}
        return {"type": "incident", "incident": facts}

    start = {"type": "run", "run": "abc"}
    restored = {"type": "note", "kind": "restored", "checkpoint": "step-40"}
    lines = [
        *(start, incident(3, "skip", "the step"), incident(5, "rewind"), incident(7, "stop")),
        *(start, restored, incident(9, "leave_out", "sample 2"), incident(44, "stop")),
        *(start, restored),
        *(start, restored, incident(41, "stop")),
        *(start, incident("4", "stop"), [], {"type": "incident"}),  # cannot be read
        {"type": "incident", "incident": {}},
    ]
    path = tmp_path / "journal.jsonl"
    assert attempts_in(path) == []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{not json\n")
    found = attempts_in(path)
    assert [(a.restored, a.stopped_at) for a in found] == [
        (None, 7),
        ("step-40", 44),
        ("step-40", None),
        ("step-40", 41),
        (None, None),
    ]
    past = past_of(found)
    assert past.lost_steps == {3, 7, 9, 44, 41} and past.stopped_at == {7, 44, 41}
    assert failed_starts(found, "step-40") == 2 and failed_starts(found, "step-20") == 0
