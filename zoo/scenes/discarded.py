"""NaN that the forward makes and drops later: indexed away, masked, passed over. The loss is
finite, the gradient not.

No public threads: the cases were written after such incidents had been given the wrong place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, Lambda, chain, randn, regression, sgd


def unit(x: Tensor, *, safe: bool) -> Tensor:
    """Every row by its length."""
    length = x.norm(dim=-1, keepdim=True)
    return x / length.clamp_min(1e-6) if safe else x / length


def normalising(fixed: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return chain(inp=nn.Linear(3, 4, bias=False), unit=Lambda(lambda x: unit(x, safe=fixed)))


def one_empty(step: int, row: int = 2) -> Batch:
    """A batch whose sample `row` is all zero in step 1, and is marked as such."""
    batch = {"x": randn(4, 3, seed=step), "keep": torch.ones(4, dtype=torch.bool)}
    if step == 1:
        batch["x"][row], batch["keep"][row] = 0.0, False
    return batch


DIVIDED = Expected(
    step=1, phase="forward", module="unit", op="aten.div", event="nan", sample=2, loss_finite=True
)


@incident(expected=DIVIDED, accepted=("SG201",))
def normalised_row_indexed_away(fixed: bool) -> Scene:
    """(x / |x|)[keep]: the mask knows the empty row, the division does not."""
    model = normalising(fixed)
    return Scene(
        model=model,
        batch=one_empty,
        loss=lambda model, b: model(b["x"])[b["keep"]].sum(-1).pow(2).mean(),
        optimizer=sgd(model, 1e-3),
    )


@incident(expected=DIVIDED, accepted=("SG201",))
def normalised_row_patched_in_place(fixed: bool) -> Scene:
    """h[h.isnan()] = 0 after the division."""
    model = normalising(fixed)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        unit_rows = model(b["x"]).clone()
        unit_rows[unit_rows.isnan()] = 0.0
        return unit_rows.sum(-1).pow(2).mean()

    return Scene(model=model, batch=one_empty, loss=loss, optimizer=sgd(model, 1e-3))


@incident(expected=DIVIDED, accepted=("SG201",))
def normalised_row_left_out_by_nanmean(fixed: bool) -> Scene:
    """nanmean passes over the NaN; its gradient does not."""
    model = normalising(fixed)
    return Scene(
        model=model,
        batch=one_empty,
        loss=lambda model, b: model(b["x"]).nanmean(),
        optimizer=sgd(model, 1e-3),
    )


@incident(expected=DIVIDED, accepted=("SG201",))
def best_rows_gathered(fixed: bool) -> Scene:
    """The three largest rows are gathered; the fourth is 0 / 0."""
    model = normalising(fixed)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        best = b["x"].abs().sum(-1).topk(3).indices
        return model(b["x"]).gather(0, best[:, None].expand(-1, 4)).sum(-1).pow(2).mean()

    return Scene(model=model, batch=one_empty, loss=loss, optimizer=sgd(model, 1e-3))


class Weights(nn.Module):
    """Attention weights over five keys, with an additive mask."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(3, 5)
        self.safe = safe

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(x) + mask
        if self.safe:
            scores = scores.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
        return torch.softmax(scores, -1)


def one_closed(step: int, row: int = 1) -> Batch:
    mask = torch.zeros(4, 5)
    mask[:, 4] = -INF
    if step == 1:
        mask[row] = -INF
    return {"x": randn(4, 3, seed=step), "mask": mask}


SOFTMAX = Expected(
    step=1, phase="forward", module="", op="aten._softmax", event="nan", sample=1, loss_finite=True
)


@incident(expected=SOFTMAX, accepted=("SG204",))
def closed_row_under_where(fixed: bool) -> Scene:
    """Weights of a row without keys are set to 0 by `where`, after the softmax."""
    model = Weights(safe=fixed)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        closed = torch.isneginf(b["mask"]).all(-1, keepdim=True)
        return torch.where(closed, 0.0, model(b["x"], b["mask"])).pow(2).mean()

    return Scene(model=model, batch=one_closed, loss=loss, optimizer=sgd(model))


@incident(expected=SOFTMAX, accepted=("SG204",))
def closed_row_filled_where_nan(fixed: bool) -> Scene:
    """weights.masked_fill(weights.isnan(), 0)."""
    model = Weights(safe=fixed)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        weights = model(b["x"], b["mask"])
        return weights.masked_fill(weights.isnan(), 0.0).pow(2).mean()

    return Scene(model=model, batch=one_closed, loss=loss, optimizer=sgd(model))


@incident(expected=SOFTMAX, accepted=("SG204",))
def closed_row_not_selected(fixed: bool) -> Scene:
    """Rows with at least one key are chosen by index_select."""
    model = Weights(safe=fixed)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        open_rows = (b["mask"] == 0).any(-1).nonzero().flatten()
        return model(b["x"], b["mask"]).index_select(0, open_rows).pow(2).mean()

    return Scene(model=model, batch=one_closed, loss=loss, optimizer=sgd(model))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.std", event="nan", sample=1, loss_finite=True),
    accepted=("SG205",),
)
def spread_of_one_frame_left_out(fixed: bool) -> Scene:
    """The standard deviation of every clip, of which only those longer than one frame count."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def batch(step: int) -> Batch:
        length = torch.tensor([4, 1 if step == 1 else 3, 2, 2])
        return {"x": randn(4, 3, seed=step), "length": length}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        frames = model(b["x"])
        several = b["length"] > 1
        if fixed:
            return torch.stack(
                [frames[i, : b["length"][i]].std() for i in several.nonzero().flatten()]
            ).mean()
        spreads = torch.stack(
            [row[:n].std() for row, n in zip(frames, b["length"].tolist(), strict=True)]
        )
        return spreads[several].mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan", sample=2, loss_finite=True),
    accepted=("SG201", "SG102"),
)
def sample_variance_of_one_under_where(fixed: bool) -> Scene:
    """sum of squares / (n - 1) for a sample of one, replaced by 0 afterwards."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def batch(step: int) -> Batch:
        return {"x": randn(4, 3, seed=step), "n": torch.tensor([4, 3, 1 if step == 1 else 2, 4])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        inside = (torch.arange(4)[None] < b["n"][:, None]).float()
        out = model(b["x"])
        centre = (out * inside).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)
        others = inside.sum(-1) - 1
        variance = ((out - centre) * inside).pow(2).sum(-1) / (
            others.clamp_min(1) if fixed else others
        )
        return torch.where(b["n"] > 1, variance, 0.0).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


def log_sum(node: str) -> Expected:
    return Expected(
        step=1, phase="backward", op="aten.sub", node=node, event="nan", sample=2, loss_finite=True
    )


def paths(step: int) -> Batch:
    """Two paths a sample; both of sample 2 are closed in step 1."""
    closed = torch.zeros(4, 1)
    if step == 1:
        closed[2] = -INF
    return {"x": randn(4, 3, seed=step), "closed": closed}


@incident(expected=log_sum("LogaddexpBackward0"), accepted=("SG204", "SG206"))
def two_closed_paths_left_out(fixed: bool) -> Scene:
    """logaddexp(-inf, -inf) is -inf, rightly, and is left out; its slope is NaN all the same."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        score = model(b["x"]) + (b["closed"].clamp_min(-1e4) if fixed else b["closed"])
        return torch.logaddexp(score[:, 0], score[:, 1])[b["closed"][:, 0] == 0].mean()

    return Scene(model=model, batch=paths, loss=loss, optimizer=sgd(model))


@incident(expected=log_sum("LogsumexpBackward0"), accepted=("SG204", "SG206"))
def closed_log_sum_under_where(fixed: bool) -> Scene:
    """logsumexp of a closed row, replaced by 0 with `where`."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        score = model(b["x"]) + (b["closed"].clamp_min(-1e4) if fixed else b["closed"])
        return torch.where(b["closed"][:, 0] == 0, torch.logsumexp(score, -1), 0.0).mean()

    return Scene(model=model, batch=paths, loss=loss, optimizer=sgd(model))


class Root(nn.Module):
    """where(x > 0, sqrt(x), 0)."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False)
        self.safe = safe

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x)
        return x + torch.where(
            mixed > 0, torch.sqrt(mixed.clamp_min(1e-6) if self.safe else mixed), 0.0
        )


class Recomputed(nn.Module):
    """Three blocks that are not kept for the backward but computed again there."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Root(safe=safe) for _ in range(3))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        predicted: Tensor = self.out(x)
        return predicted


@incident(
    expected=Expected(
        step=0,
        phase="backward",
        module="blocks.2",
        op="aten.div",
        node="SqrtBackward0",
        event="seen",
        loss_finite=True,
    ),
    accepted=("SG402",),
)
def recomputed_roots_under_where(fixed: bool) -> Scene:
    """The same root in every checkpointed block: in the backward, the last block is the first to
    break.
    """
    model = Recomputed(safe=fixed)
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model, 1e-3), steps=1)
