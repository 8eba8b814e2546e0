"""SG923: what a resume left behind is named with numbers, and nothing is said of other starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR

import stepguard
from stepguard import GuardConfig
from stepguard.journal import read_run

Built = tuple[nn.Module, Optimizer]
Schedule = Callable[[Optimizer], Any]


def build(seed: int = 0, lr: float = 1e-2) -> Built:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def batch(number: int) -> Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(number))


def train(
    built: Built, folder: Path, first: int = 0, schedule: Any = None, steps: int = 40, **more: Any
) -> list[dict[str, Any]]:
    """Watch a run over these batches; what it was told so far in this folder, with SG923."""
    model, optimizer = built
    config = GuardConfig(run_dir=folder, terminal="quiet")
    with stepguard.watch(model, optimizer, config=config, **more) as guard:
        for number in range(first, first + steps):
            rows = batch(number)
            optimizer.zero_grad()
            (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        assert guard.armed
    notes = read_run(folder).notes
    assert not [note for note in notes if note.get("kind") == "fault"]
    return [note for note in notes if note.get("code") == "SG923"]


def loaded(before: Built, *, optimizer: bool, **settings: Any) -> Built:
    built = build(1, **settings)
    built[0].load_state_dict(before[0].state_dict())
    if optimizer:
        built[1].load_state_dict(before[1].state_dict())
    return built


def test_empty_moments_are_named_once(tmp_path: Path) -> None:
    before = build()
    assert train(before, tmp_path) == []
    (told,) = train(loaded(before, optimizer=False), tmp_path, 40, steps=100)
    assert told["certainty"] == "likely"
    assert told["step"] == 2
    assert "the moments of Adam are empty at the first step" in told["summary"]
    assert "learning rate" not in told["summary"]


def test_restarted_schedule_is_named_with_both_rates(tmp_path: Path) -> None:
    def warm_up(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    before = build()
    train(before, tmp_path, schedule=warm_up(before[1]))
    built = loaded(before, optimizer=True)
    (told,) = train(built, tmp_path, 40, warm_up(built[1]))
    said = "the learning rate was 0.01 at the last step of the previous run and is 0.0005 now"
    assert said in told["summary"]
    assert "has counted 40 updates" in told["summary"]
    assert "moments" not in told["summary"]


def same(before: Built) -> Built:
    return loaded(before, optimizer=True)


def another_rate(before: Built) -> Built:
    """Lowered on purpose: not the rate that the run before began with."""
    built = loaded(before, optimizer=True)
    for group in built[1].param_groups:
        group["lr"] = 1e-3
    return built


def another_optimizer(before: Built) -> Built:
    model, _ = loaded(before, optimizer=False)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def no_moments_to_keep(before: Built) -> Built:
    model, _ = loaded(before, optimizer=False)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def same_objects_with_a_new_optimizer(before: Built) -> Built:
    return before[0], torch.optim.Adam(before[0].parameters(), lr=1e-2)


@pytest.mark.parametrize(
    "start",
    [
        same,
        another_rate,
        another_optimizer,
        no_moments_to_keep,
        same_objects_with_a_new_optimizer,
        lambda before: build(0),
        lambda before: build(3),
    ],
)
def test_healthy_starts_in_the_same_folder(start: Callable[[Built], Built], tmp_path: Path) -> None:
    before = build()
    train(before, tmp_path)
    assert train(start(before), tmp_path, 40) == []


def test_new_folder_declares_a_new_run(tmp_path: Path) -> None:
    before = build()
    train(before, tmp_path / "pretraining")
    assert train(loaded(before, optimizer=False), tmp_path / "fine-tuning") == []


def test_cycle_that_ends_where_the_run_was_stopped(tmp_path: Path) -> None:
    before = build()
    schedule = CosineAnnealingWarmRestarts(before[1], T_0=20)
    train(before, tmp_path, schedule=schedule)
    built = loaded(before, optimizer=True)
    again = CosineAnnealingWarmRestarts(built[1], T_0=20)
    again.load_state_dict(schedule.state_dict())
    assert train(built, tmp_path, 40, again) == []


def test_restored_run_has_everything(tmp_path: Path) -> None:
    config = GuardConfig(run_dir=tmp_path, terminal="quiet", checkpoint_every=20)

    def run(built: Built, *, restore: bool) -> None:
        model, optimizer = built

        def loss(rows: Tensor) -> Tensor:
            return (model(rows) - rows.sum(1, keepdim=True)).square().mean()

        with stepguard.Guard(model, optimizer, config=config) as guard:
            first = guard.restore() if restore else 0
            for number in range(first, first + 40):
                guard.step(loss, batch(number))

    run(build(), restore=False)
    run(build(1), restore=True)
    assert [note for note in read_run(tmp_path).notes if note.get("kind") == "silent"] == []


@pytest.mark.parametrize(
    "damage", [b"\x00\xff{", b'{"v":2,"type":"step"}\n', b'{"v":2,"type":"look"}\n']
)
def test_torn_journal_costs_nothing(damage: bytes, tmp_path: Path) -> None:
    before = build()
    train(before, tmp_path)
    with (tmp_path / "journal.jsonl").open("ab") as journal:
        journal.write(damage)
    train(loaded(before, optimizer=False), tmp_path, 40)


def test_guarded_resume_is_bit_identical(tmp_path: Path) -> None:
    before = build()
    train(before, tmp_path)
    watched, free = loaded(before, optimizer=False), loaded(before, optimizer=False)
    assert train(watched, tmp_path, 40)
    model, optimizer = free
    for number in range(40, 80):
        rows = batch(number)
        optimizer.zero_grad()
        (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    for one, other in zip(watched[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["", "optimizer.pt"])
def test_trainer_that_resumes_without_its_optimizer(lost: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from integrations.trainers import llama, quiet, texts, trainer
    from stepguard.integrations.transformers import guard

    config = quiet(run_dir=tmp_path / "run")
    settings = {"save_strategy": "steps", "save_steps": 10, "max_steps": 20, "warmup_steps": 5}
    first = trainer(tmp_path / "trainer", llama(), texts(128), **settings)
    with guard(first, config):
        first.train()
    checkpoint = tmp_path / "trainer" / "checkpoint-10"
    if lost:
        (checkpoint / lost).unlink()
    second = trainer(tmp_path / "trainer", llama(), texts(128), **settings)
    with guard(second, config):
        second.train(resume_from_checkpoint=str(checkpoint))
    notes = [note for note in read_run(tmp_path / "run").notes if note.get("code") == "SG923"]
    assert len(notes) == (1 if lost else 0)
    for note in notes:
        assert note["certainty"] == "certain"
        assert "continues at step 10" in note["summary"]
        assert "the moments of AdamW are empty" in note["summary"]
