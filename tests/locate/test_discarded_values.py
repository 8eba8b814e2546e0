"""A NaN that the forward drops is named where it was made; a guarded pole is another cause."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .guarded import code, evidence, first_incident, noise

INF = math.inf
Drop = Callable[[Tensor, Tensor], Tensor]

DROPS: dict[str, Drop] = {
    "boolean index": lambda rows, keep: rows[keep],
    "integer index": lambda rows, keep: rows[keep.nonzero().flatten()],
    "index_select": lambda rows, keep: rows.index_select(0, keep.nonzero().flatten()),
    "where": lambda rows, keep: torch.where(keep[:, None], rows, 0.0),
    "masked_fill": lambda rows, keep: rows.masked_fill(~keep[:, None], 0.0),
    "index_fill": lambda rows, keep: rows.index_fill(0, (~keep).nonzero().flatten(), 0.0),
    "fill where nan": lambda rows, keep: rows.masked_fill(rows.isnan(), 0.0),
    "index where not nan": lambda rows, keep: rows[~rows.isnan().any(-1)],
    "nan_to_num": lambda rows, keep: rows.nan_to_num(0.0),
    "masked_select": lambda rows, keep: rows.masked_select(keep[:, None]),
}


def batch(step: int) -> dict[str, Tensor]:
    """Sample 2 is empty in step 1, and said to be."""
    x, keep = noise(step), torch.ones(4, dtype=torch.bool)
    if step == 1:
        x[2], keep[2] = 0.0, False
    return {"x": x, "keep": keep}


@pytest.mark.parametrize("name", DROPS)
def test_zero_by_zero_dropped_later_is_a_division_by_zero(name: str) -> None:
    model = nn.Linear(3, 4, bias=False)

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        return DROPS[name](out / out.norm(dim=-1, keepdim=True), b["keep"]).sum()

    incident = first_incident(model, loss_fn, batch)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.op, incident.origin.samples) == (
        "loss",
        "aten.div",
        (2,),
    )
    assert code(incident) == "SG201"


@pytest.mark.parametrize("name", DROPS)
def test_fully_masked_row_dropped_later_is_a_fully_masked_row(name: str) -> None:
    model = nn.Linear(3, 4)

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        closed = torch.zeros(b["keep"].shape).masked_fill(~b["keep"], -INF)
        return (
            DROPS[name](torch.softmax(model(b["x"]) + closed[:, None], -1), b["keep"]).pow(2).mean()
        )

    incident = first_incident(model, loss_fn, batch)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.op, incident.origin.samples) == (
        "loss",
        "aten._softmax",
        (2,),
    )
    assert code(incident) == "SG204"


def test_evidence_says_who_dropped_it() -> None:
    model = nn.Linear(3, 4, bias=False)

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        return (out / out.norm(dim=-1, keepdim=True))[b["keep"]].sum()

    assert "aten.index dropped the NaN from the loss" in evidence(
        first_incident(model, loss_fn, batch)
    )


LOG_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "LogaddexpBackward0": lambda score: torch.logaddexp(score[:, 0], score[:, 1]),
    "LogsumexpBackward0": lambda score: torch.logsumexp(score, -1),
}


@pytest.mark.parametrize("node", LOG_SUMS)
@pytest.mark.parametrize("how", ["where", "index"])
def test_log_sum_of_only_minus_infinity_is_not_an_unselected_branch(node: str, how: str) -> None:
    model = nn.Linear(3, 2)

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        closed = torch.zeros(b["keep"].shape).masked_fill(~b["keep"], -INF)
        total = LOG_SUMS[node](model(b["x"]) + closed[:, None])
        return (torch.where(b["keep"], total, 0.0) if how == "where" else total[b["keep"]]).mean()

    incident = first_incident(model, loss_fn, batch)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.node, code(incident)) == (
        "backward",
        node,
        "SG204",
    )
    assert incident.origin.samples == (2,)


POLES: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(x > 0, x.sqrt(), 0.0),
    "index": lambda x: x.sqrt()[x > 0],
    "masked_fill": lambda x: x.sqrt().masked_fill(~(x > 0), 0.0),
    "two conditions": lambda x: torch.where((x > 0) & (x < 9), x.sqrt(), 0.0),
}


@pytest.mark.parametrize("name", POLES)
def test_function_kept_from_its_own_pole_stays_an_unselected_branch(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    incident = first_incident(model, lambda x: POLES[name](model(x)).mean(), noise)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.node, code(incident)) == (
        "backward",
        "SqrtBackward0",
        "SG402",
    )


class Block(nn.Module):
    """A residual block around a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.mix(x))


class Stack(nn.Module):
    """Four blocks of one class, plain or checkpointed."""

    def __init__(self, function: Callable[[Tensor], Tensor], reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(function) for _ in range(4))
        self.out = nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        out: Tensor = self.out(x)
        return out


CHECKPOINTED = pytest.mark.parametrize(
    "reentrant", [None, False, True], ids=["plain", "checkpointed", "checkpointed reentrant"]
)


@CHECKPOINTED
@pytest.mark.parametrize("name", ["where", "masked_fill"])
def test_block_named_is_the_first_to_break_in_the_backward(
    name: str, reentrant: bool | None
) -> None:
    model = Stack(POLES[name], reentrant)
    incident = first_incident(model, lambda x: model(x).pow(2).mean(), noise)
    assert incident.origin is not None
    assert (incident.origin.module, incident.origin.node) == ("blocks.3", "SqrtBackward0")
    assert code(incident) == "SG402"


@CHECKPOINTED
def test_singular_slope_is_placed_in_the_last_block(reentrant: bool | None) -> None:
    model = Stack(lambda h: (h * h).sum(-1, keepdim=True).sqrt(), reentrant)
    incident = first_incident(model, lambda b: model(b["x"]).pow(2).mean(), batch)
    assert incident.origin is not None
    assert (incident.origin.module, code(incident)) == ("blocks.3", "SG401")


@CHECKPOINTED
def test_infinity_absorbed_in_several_blocks_is_placed_where_it_was_born_first(
    reentrant: bool | None,
) -> None:
    model = Stack(lambda h: 1 / (1 + torch.exp(h.abs() * 1e4 + 1e4)), reentrant)
    incident = first_incident(model, lambda x: model(x).pow(2).mean(), noise)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.module, incident.origin.op) == (
        "forward",
        "blocks.0",
        "aten.exp",
    )


@CHECKPOINTED
def test_slope_that_breaks_before_an_unselected_branch_comes_first(reentrant: bool | None) -> None:
    model = Stack(torch.tanh, reentrant)
    model.blocks[0].function = POLES["where"]
    model.blocks[3].function = lambda h: (h * h).sum(-1, keepdim=True).sqrt()
    nn.init.zeros_(model.blocks[3].mix.weight)
    incident = first_incident(model, lambda x: model(x).pow(2).mean(), noise)
    assert incident.origin is not None
    assert (incident.origin.module, code(incident)) == ("blocks.3", "SG401")
