"""Lookups and counts: experts, rows of an embedding, states, items, patients, columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, randn, sgd, tokens, uniform, uninitialised


class Gate(nn.Module):
    """Sigmoid scores with a bias for the choice; the two best are renormalised."""

    bias: Tensor

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.score, self.floor = nn.Linear(6, 4, bias=False), floor
        self.register_buffer("bias", torch.tensor([0.01, 0.02, 0.0, -0.01]))
        with torch.no_grad():
            self.score.weight[:, 0] = -1.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        weights = scores.gather(-1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + self.floor), chosen


class Experts(nn.Module):
    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.gate, self.experts = (
            Gate(floor=floor),
            nn.ModuleList(nn.Linear(6, 6) for _ in range(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            row, slot = (chosen == k).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(flat[row]) * weights[row, slot, None])
        return x + out.view_as(x)


class SparseDecoder(nn.Module):
    """Token 9 has an embedding that drives every score of the gate to exactly 0."""

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.emb, self.moe, self.head = nn.Embedding(10, 6), Experts(floor=floor), nn.Linear(6, 10)
        with torch.no_grad():
            self.emb.weight[9] = torch.tensor([300.0, 0, 0, 0, 0, 0])

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.moe(self.emb(ids)))
        return out


def next_token(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten())


@incident(
    "sgl-project/sglang#31017",
    "apple/axlearn#1375",
    expected=Expected(
        step=1, phase="forward", module="moe.gate", op="aten.div", event="nan", sample=3
    ),
    accepted=("SG201",),
)
def moe_gate_renormalised_by_zero(fixed: bool) -> Scene:
    """A glitch token drives every score of a sigmoid router to 0, and the weights of its experts
    are 0 / 0.
    """
    torch.manual_seed(0)
    model = SparseDecoder(floor=1e-20 if fixed else 0.0)

    def batch(step: int) -> Batch:
        ids = tokens(4, 5, seed=step, high=9)
        if step == 1:
            ids[3, 1] = 9
        return {"ids": ids, "y": ids.roll(-1, 1)}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=next_token, optimizer=optimizer, clip=1.0)


class Resized(nn.Module):
    """A vocabulary that grew by four tokens."""

    def __init__(self, *, filled: bool) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)
        old = self.embed.weight.data
        rows = uninitialised(12, 6)
        rows[:8] = old
        if filled:
            rows[8:] = old.mean(0)
        self.embed = nn.Embedding(12, 6)
        self.embed.weight.data = rows

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.mix(self.embed(ids))))
        return out


@incident(
    "hiyouga/LlamaFactory#10547",
    "huggingface/transformers#48932",
    expected=Expected(
        step=0,
        phase="state",
        module="embed",
        op="aten.embedding",
        event="param:embed.weight",
        loss_finite=True,
        grads_finite=True,
    ),
    accepted=("SG601",),
)
def resized_embedding_rows_never_filled(fixed: bool) -> Scene:
    """Rows for new special tokens were never filled, and the first of them is looked up only at
    step 3.
    """
    torch.manual_seed(0)
    model = Resized(filled=fixed)

    def batch(step: int) -> Batch:
        ids = tokens(3, 5, seed=step)
        y = ids.roll(-1, 1)
        if step == 3:
            ids[2, 0] = 9
        return {"ids": ids, "y": y}

    return Scene(model=model, batch=batch, loss=next_token, optimizer=sgd(model), steps=4)


class Aligner(nn.Module):
    """The forward algorithm in log space: stay in a state or move to the next."""

    def __init__(self, *, impossible: float) -> None:
        super().__init__()
        self.stay, self.move = (
            nn.Parameter(torch.full((3,), -0.7)),
            nn.Parameter(torch.full((3,), -0.7)),
        )
        self.impossible = impossible

    def forward(self, emission: Tensor, start: Tensor) -> Tensor:
        alpha = torch.where(start, 0.0, self.impossible) + emission[:, 0]
        wall = torch.full_like(alpha[:, :1], self.impossible)
        for t in range(1, emission.shape[1]):
            came = torch.cat([wall, (alpha + self.move)[:, :-1]], 1)
            alpha = torch.logaddexp(alpha + self.stay, came) + emission[:, t]
        return -alpha[:, -1]


class AlignedText(nn.Module):
    def __init__(self, *, impossible: float) -> None:
        super().__init__()
        self.emb, self.score, self.hmm = (
            nn.Embedding(8, 6),
            nn.Linear(6, 3),
            Aligner(impossible=impossible),
        )

    def forward(self, ids: Tensor, start: Tensor) -> Tensor:
        out: Tensor = self.hmm(self.score(self.emb(ids)).log_softmax(-1), start)
        return out


@incident(
    "pytorch/pytorch#49724",
    "pytorch/pytorch#31829",
    expected=Expected(
        step=1,
        phase="backward",
        module="hmm",
        op="aten.sub",
        node="LogaddexpBackward0",
        event="nan",
        sample=0,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG204", "SG403"),
)
def hmm_aligner_unreachable_state(fixed: bool) -> Scene:
    """logaddexp(-inf, -inf) of a state that cannot be reached is a correct -inf, and its slope is
    NaN.
    """
    torch.manual_seed(0)
    model = AlignedText(impossible=-1e4 if fixed else -INF)

    def batch(step: int) -> Batch:
        start = torch.ones(4, 3, dtype=torch.bool)
        if step == 1:
            start[0, 1:] = False
        return {"ids": tokens(4, 6, seed=step), "start": start}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: model(b["ids"], b["start"]).mean(),
        optimizer=sgd(model, 1e-2),
    )


class TwoTower(nn.Module):
    """Users and items, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(20, 4, sparse=True), nn.Embedding(30, 4, sparse=True)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores: Tensor = self.user(user) @ self.item(item).T
        return scores


@incident(
    "tensorflow/recommenders#441",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=3),
    accepted=("SG202", "SG104"),
)
def new_item_without_popularity(fixed: bool) -> Scene:
    """The scores of a batch are corrected by log q; an item listed after the count has q = 0."""
    torch.manual_seed(0)
    model = TwoTower()
    share = torch.arange(1.0, 31.0) / 465
    share[29] = 0.0

    def batch(step: int) -> Batch:
        item = tokens(6, seed=step, high=29)
        if step == 1:
            item[3] = 29
        return {"user": tokens(6, seed=step + 5, high=20), "item": item, "share": share[item]}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores = model(b["user"], b["item"]) - torch.log(
            b["share"].clamp_min(1e-6) if fixed else b["share"]
        )
        return F.cross_entropy(scores, torch.arange(len(scores)))

    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer)


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.wide = nn.Embedding(15, 4), nn.Linear(3, 4)
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, item: Tensor, dense: Tensor) -> Tensor:
        out: Tensor = self.deep(torch.cat([self.item(item), self.wide(dense)], -1))[:, 0]
        return out


@incident(
    "RUCAIBox/RecBole#1062",
    "sktime/pytorch-forecasting#528",
    expected=Expected(
        step=2, phase="forward", module="wide", op="aten._to_copy", event="inf", sample=3
    ),
    accepted=("SG103", "SG301"),
)
def epoch_seconds_in_a_day_column(fixed: bool) -> Scene:
    """One row has its date in epoch seconds instead of days: finite, but not in the float16 of
    autocast.
    """
    torch.manual_seed(0)
    model = WideAndDeep()

    def batch(step: int) -> Batch:
        dense = uniform(6, 3, seed=step)
        dense[:, 2] *= 30
        if step == 2 and not fixed:
            dense[3, 2] = 1.7e9
        return {
            "item": tokens(6, seed=step, high=15),
            "dense": dense,
            "click": tokens(6, seed=step, high=2).float(),
        }

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.binary_cross_entropy_with_logits(
            model(b["item"], b["dense"]).float(), b["click"]
        ),
        optimizer=sgd(model),
        steps=3,
        autocast=torch.float16,
    )


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.site = nn.Embedding(4, 3)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, values: Tensor, site: Tensor) -> Tensor:
        risk: Tensor = self.mlp(torch.cat([values, self.site(site)], -1)).squeeze(-1)
        return risk


class PartialLikelihood(nn.Module):
    """Cox: the mean over the patients whose event was seen."""

    def __init__(self, *, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
        order = time.argsort(descending=True)
        each = (torch.logcumsumexp(risk[order], 0) - risk[order])[event[order]]
        return each.sum() / max(len(each), self.least) if self.least else each.mean()


@incident(
    "havakv/pycox#124",
    "liupei101/TFDeepSurv#15",
    "lasso-net/lassonet#52",
    expected=Expected(
        step=4, phase="loss", module="criterion", op="aten.mean", event="nan", grads_finite=True
    ),
    accepted=("SG102",),
)
def cox_batch_all_censored(fixed: bool) -> Scene:
    """Every patient of a small batch is censored: the likelihood is a mean over no event."""
    torch.manual_seed(0)
    model, criterion = Tabular(), PartialLikelihood(least=1 if fixed else 0)

    def batch(step: int) -> Batch:
        event = torch.tensor([True, False, True, False, False, True]) & torch.tensor(step != 4)
        site = tokens(6, seed=step, high=4)
        return {
            "values": randn(6, 5, seed=step),
            "site": site,
            "time": uniform(6, seed=step),
            "event": event,
        }

    return Scene(
        model=model,
        criterion=criterion,
        batch=batch,
        loss=lambda model, b: criterion(model(b["values"], b["site"]), b["time"], b["event"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        steps=5,
    )
