"""An incident is rare, but a diagnosis must not stop a run: the step is run at most six times over.

Times and memory are measured by `python -m benchmarks.location`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard.locate import locate
from stepguard.locate.effort import FLOOR, MOST_FRUITLESS, Effort
from stepguard.records import Origin, Reading
from stepguard.state.step import Step

from . import loop as loops
from .cases import noise

WIDTH, LENGTH, WORDS = 128, 64, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.n1(x)
        x = x + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor, gain: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, torch.full((LENGTH, LENGTH), -math.inf).triu(1))
        return self.head(x + (gain * x).pow(2).sum(-1, keepdim=True).sqrt())


def test_diagnosis_of_a_bad_gradient_runs_the_step_at_most_six_times(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = []

    def loss(batch: dict[str, Tensor]) -> Tensor:
        rows.append(len(batch["ids"]))
        return F.cross_entropy(model(batch["ids"], batch["gain"]).flatten(0, 1), batch["ids"].flatten())

    ids = torch.randint(0, WORDS, (8, LENGTH))
    kept: list[tuple[object, object]] = []
    monkeypatch.setattr(loops, "locate", lambda step, reading: kept.append((step, reading)))
    gain = torch.ones(8, 1, 1)
    gain[5] = 0.0
    loops.Loop(model, optimizer, loss).step(0, [{"ids": ids, "gain": gain}])
    rows.clear()
    origin = locate(*kept[0])  # type: ignore[arg-type]
    assert (origin.node, origin.samples) == ("SqrtBackward0", (5,))
    assert sum(rows) <= 6 * 8  # counted in samples: the search for the guilty one runs parts of the batch


class Case:
    """A bad step whose loss function counts its runs and takes a second of the clock's time for each."""

    def __init__(self, batch: dict[str, Tensor], loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.runs = 0
        self._loss = loss
        loop = loops.Loop(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), self.loss)
        assert loop.step(0, [batch]) is not None and loop.last is not None
        self.step: Step = loop.last[0]
        self.reading: Reading = loop.last[1]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.runs += 1
        return self._loss(self.model, batch)

    def effort(self, steps: float = 6.0) -> Effort:
        effort = Effort(steps, clock=lambda: float(self.runs))
        for _ in range(4):
            effort.took(1.0)
        return effort

    def locate(self, effort: Effort) -> tuple[Origin, int]:
        before = self.runs
        return locate(self.step, self.reading, effort), self.runs - before


def graph(nodes: int) -> Case:
    """Every node attends to its neighbours, and one has none: there is no batch with only some of the nodes."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model(batch["x"])
        return torch.softmax((h @ h.T).masked_fill(batch["edges"] == 0, -math.inf), -1).matmul(h).pow(2).mean()

    edges = torch.eye(nodes)
    edges[7] = 0.0
    return Case({"x": noise(nodes, 3), "edges": edges}, loss)


def transposed(samples: int, guilty: int) -> Case:
    """The sample's row is lost in the operation that overflows, so it takes a search."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).t().contiguous().pow(2).sum(0).mean()

    x = noise(samples, 3)
    x[guilty] = 1e25
    return Case({"x": x}, loss)


def test_a_batch_that_cannot_be_cut_is_not_searched_row_by_row_and_not_tried_again() -> None:
    case = graph(64)
    effort = case.effort(steps=100.0)
    first, runs = case.locate(effort)
    assert (first.op, first.samples) == ("aten._softmax", ())
    assert any("takes this batch whole" in note for note in first.notes)
    assert runs <= 6
    again, runs = case.locate(effort)
    assert (again.op, again.notes) == (first.op, first.notes)
    assert runs == 1  # the traced one


def test_the_search_for_samples_ends_with_the_budget_and_says_so() -> None:
    case = transposed(64, guilty=40)
    origin, runs = case.locate(case.effort(steps=6.0))
    assert (origin.op, origin.samples) == ("aten.pow", ())
    assert any("cut short" in note and "6 bare steps" in note for note in origin.notes)
    assert runs <= 1 + 6  # the traced run, without which nothing is known, and the budget


def test_with_a_larger_budget_the_same_search_comes_to_its_end() -> None:
    case = transposed(64, guilty=40)
    origin, _ = case.locate(case.effort(steps=20.0))
    assert origin.samples == (40,)
    assert not any("cut short" in note for note in origin.notes)


def test_where_steps_are_short_the_floor_is_the_budget() -> None:
    case = transposed(64, guilty=40)
    effort = Effort(6.0, clock=lambda: case.runs * FLOOR / 20)
    effort.took(1e-4)
    assert case.locate(effort)[0].samples == (40,)


def test_a_place_where_no_sample_could_be_told_is_not_searched_for_ever() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).pow(2).mean() + batch["w"].log().mean()

    case = Case({"x": noise(4, 3), "w": torch.zeros(4)}, loss)
    effort = case.effort(steps=100.0)
    searches = [case.locate(effort) for _ in range(MOST_FRUITLESS + 1)]
    assert all(runs > 1 for _, runs in searches[:-1])
    last, runs = searches[-1]
    assert runs == 1
    assert last.op == "aten.log"
    assert any("no sample was searched for" in note for note in last.notes)


def test_traced_steps_do_not_count_as_bare_ones() -> None:
    effort = Effort()
    effort.took(1.0)
    effort.tracing = True
    for _ in range(20):
        effort.took(13.0)
    assert effort.bare_seconds == 1.0
