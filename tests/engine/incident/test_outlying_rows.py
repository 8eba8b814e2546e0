"""A loss that jumps because of a few rows names them, and a jump without such rows names nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import stepguard
from scenes import quiet
from stepguard import Guard, Incident
from stepguard.locate.samples import outlying_rows
from stepguard.records import Sink
from stepguard.records.incident import Origin
from stepguard.tensors.torch_private import LoaderIterator

ROWS, SIZE, BAD = 160, 16, 137
STEPS = 2 * ROWS // SIZE


class Notes(Sink):
    """Keeps the lines about spikes."""

    def __init__(self) -> None:
        self.spikes: list[str] = []

    def incident(self, incident: Incident) -> None:
        self.spikes.append(incident.verdict.summary)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "note" and fields.get("kind") == "spike":
            self.spikes.append(str(fields["summary"]))


class Rows(Dataset[Any]):
    """Samples of one table of tensors, made into the batch's form by `shape`."""

    def __init__(self, x: Tensor, y: Tensor, shape: Callable[[Tensor, Tensor], Any]) -> None:
        self.x, self.y, self.shape = x, y, shape

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.shape(self.x[row], self.y[row])


def as_pair(x: Tensor, y: Tensor) -> Any:
    return x, y


def as_dict(x: Tensor, y: Tensor) -> Any:
    return {"values": x, "target": y}


def table(*shape: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, *shape, generator=source)
    return x, x.flatten(1).sum(1) + 3.0


def guarded(data: Rows, *, watched: bool, told: bool = True, given: bool = True) -> list[str]:
    """Two passes; `told`: the loop calls guard.loss, `given`: the guard is given the loader."""
    torch.manual_seed(0)
    features = data.x[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loader = DataLoader(data, SIZE, shuffle=True)
    notes = Notes()
    settings: dict[str, Any] = {"config": quiet(locate=True, sinks=(notes,))}
    if given:
        settings["loader"] = loader

    def loss_fn(batch: Any) -> Tensor:
        x, y = batch.values() if isinstance(batch, dict) else batch
        loss: Tensor = (model(x).squeeze(1) - y).pow(2).mean()
        return loss

    build = stepguard.watch if watched else Guard
    with build(model, optimizer, **settings) as guard:
        for _ in range(2):
            for batch in guard.loader if given else loader:
                if not watched:
                    guard.step(loss_fn, batch)
                    continue
                optimizer.zero_grad()
                (guard.loss(loss_fn, batch) if told else loss_fn(batch)).backward()
                optimizer.step()
    return notes.spikes


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("shape", [as_pair, as_dict])
@pytest.mark.parametrize("where", ["input", "target"])
def test_row_of_a_table_is_named(where: str, shape: Any, watched: bool) -> None:
    x, y = table(4)
    if where == "input":
        x[BAD] *= 20000
    else:
        y[BAD] = 3e6
    spikes = guarded(Rows(x, y, shape), watched=watched)
    named = [line for line in spikes if "times all others" in line]
    assert len(named) == 2
    keys = {"input": ("batch:0", "batch:values"), "target": ("batch:1", "batch:target")}
    for line in named:
        assert f"(row {BAD}) reaches" in line
        assert any(key in line for key in keys[where])


@pytest.mark.parametrize("watched", [False, True])
def test_image_is_named(watched: bool) -> None:
    x, y = table(3, 6, 6)
    x[BAD, 1, 2, 2] = 1e5
    spikes = guarded(Rows(x, y, as_pair), watched=watched)
    assert any(f"(row {BAD}) reaches 100000 in batch:0" in line for line in spikes)


def test_target_that_the_model_never_sees_is_found_in_the_delivered_batch() -> None:
    x, y = table(4)
    y[BAD] = 3e6
    spikes = guarded(Rows(x, y, as_pair), watched=True, told=False)
    assert any(f"(row {BAD}) reaches 3000000 in batch tensor 2 of 2" in line for line in spikes)


@pytest.mark.parametrize("watched", [False, True])
def test_rows_are_known_without_a_loader_given_to_the_guard(watched: bool) -> None:
    x, y = table(4)
    y[BAD] = 3e6
    plain = dict(vars(LoaderIterator))
    spikes = guarded(Rows(x, y, as_pair), watched=watched, told=False, given=False)
    assert any(f"(row {BAD}) reaches 3000000" in line for line in spikes)
    assert dict(vars(LoaderIterator)) == plain


def test_heavy_tailed_rows_are_not_outliers() -> None:
    x, y = table(4)
    x[BAD] *= 10
    assert not any("all others" in line for line in guarded(Rows(x, y, as_pair), watched=False))


def test_spike_without_outlying_rows_names_nobody() -> None:
    torch.manual_seed(0)
    x, y = table(4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    notes = Notes()
    with Guard(model, optimizer, config=quiet(locate=True, sinks=(notes,))) as guard:
        for step in range(60):
            rows = slice(step % 10 * SIZE, step % 10 * SIZE + SIZE)
            factor = 1000.0 if step == 50 else 1.0

            def loss_fn(batch: Any, factor: float = factor) -> Tensor:
                return factor * (model(batch[0]).squeeze(1) - batch[1]).pow(2).mean()

            guard.step(loss_fn, (x[rows], y[rows]))
    assert notes.spikes
    assert not any("all others" in line for line in notes.spikes)


def test_incident_after_an_outlier_is_not_put_on_the_learning_rate() -> None:
    torch.manual_seed(0)
    x, y = table(4)
    x[BAD] *= 1e4
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Guard(model, optimizer, config=quiet(locate=True)) as guard:
        for step in range(40):
            rows = slice(step % 10 * SIZE, step % 10 * SIZE + SIZE)
            guard.step(lambda b: (model(b[0]).squeeze(1) - b[1]).pow(2).mean(), (x[rows], y[rows]))
            if guard.incidents:
                break
    first = guard.incidents[0]
    assert first.findings[0].code == "SG103"
    assert first.findings[0].certainty == "likely"
    assert "times all others" in first.findings[0].evidence[0]
    assert all(f.certainty == "possible" for f in first.findings if f.code == "SG505")


def found_in(*batches: Any) -> Origin | None:
    return outlying_rows(0, batches)


def test_rows_of_all_micro_batches_are_compared() -> None:
    parts = [torch.ones(1, 4) for _ in range(6)]
    parts[4] = 1e4 * parts[4]
    found = found_in(*parts)
    assert found is not None
    assert (found.micro_batch, found.samples, found.tensor) == (4, (0,), "batch")


def test_column_of_large_numbers_does_not_hide_the_others() -> None:
    x, _ = table(4)
    x[:, 2] = 1.7e9
    x[5, 0] = 4000.0
    found = found_in((x, torch.zeros(ROWS)))
    assert found is not None
    assert (found.samples, found.evidence.sample_max) == ((5,), 4000.0)


def test_what_looks_like_an_outlier_and_is_none() -> None:
    source = torch.Generator().manual_seed(0)
    mask = torch.zeros(8, 1, 5, 5)
    mask[3, ..., 4] = torch.finfo(torch.float32).min
    reward = torch.zeros(32)
    reward[7] = 1.0
    tokens = torch.randint(50_000, (32, 12), generator=source)
    ignored = torch.randint(2, (32,), generator=source)
    ignored[4] = -100
    halves = torch.cat([torch.ones(4, 3), 1e4 * torch.ones(4, 3)])
    for batch in (mask, reward, tokens, ignored, halves, torch.tensor([1.0, 1e9])):
        assert found_in(batch) is None


def test_graph_names_the_tensor_and_no_sample() -> None:
    nodes = torch.ones(40, 3)
    nodes[8] = 1e6
    found = found_in({"nodes": nodes, "edges": torch.zeros(2, 90, dtype=torch.long)})
    assert found is not None
    assert (found.tensor, found.samples) == ("batch:nodes", ())
