"""SG932: evaluation data that is trained on, and passes over training data that are meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import stepguard
from stepguard import GuardConfig
from stepguard.journal import read_run
from stepguard.probes.overlap import row_keys

ROWS, EPOCHS = 240, 6
Sets = tuple[Dataset[object], list[Dataset[object]]]


def rows(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


class Noisy(Dataset[object]):
    """Other values at every reading."""

    def __init__(self) -> None:
        self.rows = rows(ROWS, 0)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> object:
        x, y = self.rows[index]
        return x + 0.1 * torch.randn(4), y


def silent(folder: Path, train: Dataset[object], evaluated: list[Dataset[object]]) -> list[str]:
    """What a run of some epochs is told, each with an evaluation at its end."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stepguard.watch(model, optimizer, config=GuardConfig(run_dir=folder, terminal="quiet")):
        for _ in range(EPOCHS):
            for x, y in DataLoader(train, batch_size=12, shuffle=True):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for one in evaluated:
                    for x, y in DataLoader(one, batch_size=32):
                        F.mse_loss(model(x), y)
            model.train()
    notes = read_run(folder).notes
    assert not [note for note in notes if note.get("kind") == "fault"]
    return [str(note["summary"]) for note in notes if note.get("kind") == "silent"]


def few_values() -> Sets:
    data = rows(2 * ROWS, 3)
    coarse = TensorDataset(*(one.sign() for one in data.tensors))
    return Subset(coarse, range(ROWS)), [TensorDataset(*coarse[ROWS:])]


NOISY, PLAIN = Noisy(), rows(ROWS, 0)
OVERLAPS: dict[str, tuple[Callable[[], Sets], str]] = {
    "equal values": (
        lambda: (
            PLAIN,
            [ConcatDataset([TensorDataset(*PLAIN[:20]), rows(60, 1)])],
        ),
        "20 of 80 rows",
    ),
    "equal indices": (
        lambda: (Subset(NOISY, range(180)), [Subset(NOISY, range(160, 240))]),
        "20 of 80 rows",
    ),
    "only training rows": (lambda: (PLAIN, [TensorDataset(*PLAIN[:])]), "240 of 240 rows"),
}
MEANT: dict[str, Callable[[], Sets]] = {
    "a split": lambda: (Subset(NOISY, range(160)), [Subset(NOISY, range(160, 240))]),
    "the training set itself": lambda: (PLAIN, [PLAIN]),
    "training rows beside others": lambda: (PLAIN, [rows(60, 1), TensorDataset(*PLAIN[:60])]),
    "few values": few_values,
    "a few rows": lambda: (PLAIN, [ConcatDataset([rows(100, 1), TensorDataset(*PLAIN[:5])])]),
}


@pytest.mark.parametrize(("sets", "said"), OVERLAPS.values(), ids=OVERLAPS)
def test_evaluated_rows_that_are_trained_on_are_counted(
    sets: Callable[[], Sets], said: str, tmp_path: Path
) -> None:
    (only,) = silent(tmp_path, *sets())
    assert only.startswith("SG932") and said in only


@pytest.mark.parametrize("sets", MEANT.values(), ids=MEANT)
def test_data_that_is_meant_to_be_evaluated_is_not_told(
    sets: Callable[[], Sets], tmp_path: Path
) -> None:
    assert silent(tmp_path, *sets()) == []


def test_padding_does_not_matter_and_order_does() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [6, 5, 7, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    left = torch.tensor([[0, 0, 5, 6, 7]])
    one, other = row_keys({"input_ids": ids, "attention_mask": mask}, [])
    (again,) = row_keys({"input_ids": left, "attention_mask": (left > 0).long()}, [])
    assert one == again != other


def test_rows_with_other_signs_have_other_digests() -> None:
    x = torch.ones(2, 8)
    x[1, [1, 5]] = -1.0
    one, other = row_keys((x, torch.zeros(2)), [])
    assert one != other


def test_batches_without_rows_are_left_alone() -> None:
    assert row_keys((torch.randn(4, 2), torch.randn(3)), []) == []
    assert row_keys({"text": ["a", "b"]}, []) == []
    assert row_keys(torch.randn(0, 3), []) == []
