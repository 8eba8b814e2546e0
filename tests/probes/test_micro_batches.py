"""SG933: micro-batches whose means are added up, and losses that only look like them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stepguard
from stepguard import GuardConfig
from stepguard.engine.protect import PartFailed
from stepguard.journal import read_run
from stepguard.probes.micro_batches import LossFactors

UPDATES, PARTS = 24, 3
Loss = Callable[[Tensor], Tensor]


def batches() -> Iterator[Tensor]:
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    return itertools.chain.from_iterable(
        (part for (part,) in DataLoader(TensorDataset(x), batch_size=8)) for _ in itertools.count()
    )


def silent(folder: Path) -> list[str]:
    notes = read_run(folder).notes
    assert not [note for note in notes if note.get("kind") == "fault"]
    return [str(note["summary"]) for note in notes if note.get("kind") == "silent"]


def watched(folder: Path, loss: Loss, before_update: Callable[[nn.Module], object]) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream = batches()
    with stepguard.watch(model, optimizer, config=GuardConfig(run_dir=folder, terminal="quiet")):
        for _ in range(UPDATES):
            optimizer.zero_grad()
            for _ in range(PARTS):
                loss(model(next(stream))).backward()  # type: ignore[no-untyped-call]
            before_update(model)
            optimizer.step()
    return silent(folder)


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def nothing(model: nn.Module) -> None:
    pass


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def divided(model: nn.Module) -> None:
    for one in model.parameters():
        assert one.grad is not None
        one.grad /= PARTS


ADDED: dict[str, tuple[Loss, Callable[[nn.Module], object]]] = {
    "mean": (mean, nothing),
    "clipped": (mean, clipped),
    "criterion": (lambda out: F.cross_entropy(out, out.new_zeros(len(out)).long()), nothing),
    "with a penalty": (lambda out: F.l1_loss(out, out * 0.0) + 0.1 * out.sum(), nothing),
}
DIVIDED: dict[str, tuple[Loss, Callable[[nn.Module], object]]] = {
    "the loss": (lambda out: mean(out) / PARTS, nothing),
    "by a factor": (lambda out: (1 / PARTS) * mean(out), clipped),
    "by a tensor": (lambda out: mean(out) / torch.tensor(24.0), nothing),
    "the gradients": (mean, divided),
    "the gradients, then clipped": (mean, lambda model: (divided(model), clipped(model))),
    "a sum": (lambda out: out.square().sum(), nothing),
    "a sum of a criterion": (lambda out: F.mse_loss(out, out * 0.0, reduction="sum"), nothing),
}


@pytest.mark.parametrize(("loss", "before"), ADDED.values(), ids=ADDED)
def test_means_of_micro_batches_that_are_added_up_are_told(
    loss: Loss, before: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    (only,) = watched(tmp_path, loss, before)
    assert only.startswith("SG933") and f"{PARTS} micro-batches" in only


@pytest.mark.parametrize(("loss", "before"), DIVIDED.values(), ids=DIVIDED)
def test_what_is_divided_or_no_mean_is_not_told(
    loss: Loss, before: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    assert watched(tmp_path, loss, before) == []


@pytest.mark.parametrize("count", [1, PARTS])
def test_micro_batches_of_guard_step_need_no_loader(count: int, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=tmp_path, terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for _ in range(UPDATES):
            guard.step(lambda x: mean(model(x)), *(torch.randn(8, 4) for _ in range(count)))
    assert [one[:5] for one in silent(tmp_path)] == (["SG933"] if count > 1 else [])


def test_losses_whose_gradients_are_dropped_are_no_micro_batches(tmp_path: Path) -> None:
    """An attack on the inputs calls backward several times, and zeroes before the step."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stepguard.watch(model, optimizer, config=GuardConfig(run_dir=tmp_path, terminal="quiet")):
        for _ in range(UPDATES):
            x = torch.randn(8, 4, requires_grad=True)
            for _ in range(4):
                mean(model(x)).backward()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            mean(model(x.detach())).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert silent(tmp_path) == []


@pytest.mark.parametrize("moment", ["called", "loss_seen", "backward_over", "before_update"])
def test_fault_of_ours_does_not_reach_the_loop(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(LossFactors, moment, broken)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=tmp_path, terminal="quiet")
    with (
        pytest.warns(PartFailed, match="a fault of ours"),
        stepguard.watch(model, optimizer, config=config) as guard,
    ):
        for _ in range(3):
            optimizer.zero_grad()
            mean(model(torch.randn(8, 4))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert guard.armed
    assert len(read_run(tmp_path).steps) == 3
