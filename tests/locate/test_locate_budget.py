"""Locating an incident must not stop a run: the step is run at most six times over.

Times and memory are measured by `python -m benchmarks.location`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard.locate import locate
from stepguard.locate.replay import FLOOR, LocateBudget, Ran, Replayer
from stepguard.locate.samples import MOST_FRUITLESS
from stepguard.records import Origin, Reading
from stepguard.state.batch import Step

from . import loop as loops
from .cases import noise

WIDTH, LENGTH, WORDS = 128, 64, 1000
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


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


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every batch that is run again. Counted outside the loss function, whose own counters
    are put back.
    """
    rows: list[int] = []
    original = Replayer._run

    def counted(replayer: Replayer, micro: int, batch: dict[str, Tensor], *how: Any) -> Ran:
        rows.append(len(next(iter(batch.values()))))
        return original(replayer, micro, batch, *how)

    monkeypatch.setattr(Replayer, "_run", counted)
    return rows


def test_diagnosis_of_a_bad_gradient_runs_the_step_at_most_six_times(
    monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(
            model(batch["ids"], batch["gain"]).flatten(0, 1), batch["ids"].flatten()
        )

    ids = torch.randint(0, WORDS, (8, LENGTH))
    kept: list[tuple[object, object]] = []
    monkeypatch.setattr(loops, "locate", lambda step, reading: kept.append((step, reading)))
    gain = torch.ones(8, 1, 1)
    gain[5] = 0.0
    loops.Loop(model, optimizer, loss).step(0, [{"ids": ids, "gain": gain}])
    origin = locate(*kept[0])  # type: ignore[arg-type]
    assert (origin.node, origin.samples) == ("SqrtBackward0", (5,))
    assert (
        8 < sum(replays) <= 6 * 8
    )  # counted in samples: the search for the guilty one runs parts of the batch


class Case:
    """A bad step. Every replay of it takes a second of the clock's time."""

    def __init__(self, replays: list[int], batch: dict[str, Tensor], loss: Loss) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        self.replays = replays
        loop = loops.Loop(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda batch: loss(model, batch)
        )
        assert loop.step(0, [batch]) is not None and loop.last is not None
        self.step: Step = loop.last[0]
        self.reading: Reading = loop.last[1]

    def effort(self, steps: float = 6.0, second: float = 1.0) -> LocateBudget:
        effort = LocateBudget(steps, clock=lambda: len(self.replays) * second)
        for _ in range(4):
            effort.recent.append(second)
        return effort

    def locate(self, effort: LocateBudget) -> tuple[Origin, int]:
        before = len(self.replays)
        return locate(self.step, self.reading, effort), len(self.replays) - before


def graph(replays: list[int], nodes: int) -> Case:
    """Every node attends to its neighbours, and one has none: there is no batch with only some of
    the nodes.
    """

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model(batch["x"])
        return (
            torch.softmax((h @ h.T).masked_fill(batch["edges"] == 0, -math.inf), -1)
            .matmul(h)
            .pow(2)
            .mean()
        )

    edges = torch.eye(nodes)
    edges[7] = 0.0
    return Case(replays, {"x": noise(nodes, 3), "edges": edges}, loss)


def transposed(replays: list[int], samples: int, guilty: int) -> Case:
    """The sample's row is lost in the operation that overflows, so it takes a search."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).t().contiguous().pow(2).sum(0).mean()

    x = noise(samples, 3)
    x[guilty] = 1e25
    return Case(replays, {"x": x}, loss)


def test_a_batch_that_cannot_be_cut_is_not_searched_row_by_row_and_not_tried_again(
    replays: list[int],
) -> None:
    case = graph(replays, 64)
    effort = case.effort(steps=100.0)
    first, runs = case.locate(effort)
    assert (first.op, first.samples) == ("aten._softmax", ())
    assert any("this batch only as a whole" in remark for remark in first.remarks)
    assert runs <= 6
    again, runs = case.locate(effort)
    assert (again.op, again.evidence, again.remarks) == (first.op, first.evidence, first.remarks)
    assert runs == 1  # the traced one


def test_the_search_for_samples_ends_with_the_budget_and_says_so(replays: list[int]) -> None:
    case = transposed(replays, 64, guilty=40)
    origin, runs = case.locate(case.effort(steps=6.0))
    assert (origin.op, origin.samples) == ("aten.pow", ())
    assert any("cut short" in remark and "6 unguarded steps" in remark for remark in origin.remarks)
    assert runs <= 1 + 6  # the traced run, without which nothing is known, and the budget


def test_with_a_larger_budget_the_same_search_comes_to_its_end(replays: list[int]) -> None:
    case = transposed(replays, 64, guilty=40)
    origin, _ = case.locate(case.effort(steps=20.0))
    assert origin.samples == (40,)
    assert not any("cut short" in remark for remark in origin.remarks)


def test_where_steps_are_short_the_floor_is_the_budget(replays: list[int]) -> None:
    case = transposed(replays, 64, guilty=40)
    assert case.locate(case.effort(second=FLOOR / 20))[0].samples == (40,)


def test_place_where_no_sample_was_found_is_not_searched_again_and_again(
    replays: list[int],
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).pow(2).mean() + batch["w"].log().mean()

    case = Case(replays, {"x": noise(4, 3), "w": torch.zeros(4)}, loss)
    effort = case.effort(steps=100.0)
    searches = [case.locate(effort) for _ in range(MOST_FRUITLESS + 1)]
    assert all(runs > 1 for _, runs in searches[:-1])
    last, runs = searches[-1]
    assert runs == 1
    assert last.op == "aten.log"
    assert any("no sample was searched for" in remark for remark in last.remarks)


def test_traced_steps_do_not_count_as_bare_ones() -> None:
    effort = LocateBudget()
    effort.recent.append(1.0)
    effort.tracing = True
    for _ in range(20):
        effort.took_traced(13.0)
    assert effort.bare_seconds == 1.0
