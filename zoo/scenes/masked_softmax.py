"""Masks: actions that cannot be taken, rows without a key, classes that are ruled out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, Attention, chain, randn, sgd, tokens

ACTIONS = torch.tensor([0, 1, 0, 2])


def legal_moves(step: int, bad_step: int, sample: int) -> Batch:
    """States with a mask of legal actions; one sample of the bad step may not take its last one."""
    legal = torch.ones(4, 3, dtype=torch.bool)
    if step == bad_step:
        legal[sample, 2] = False
    return {"x": randn(4, 3, seed=step), "legal": legal, "a": ACTIONS}


@incident(
    "pytorch/pytorch#40553",
    "huggingface/trl#7221",
    expected=Expected(step=1, phase="loss", op="aten.mul", event="nan", sample=2),
    accepted=("SG206",),
)
def entropy_of_masked_action(fixed: bool) -> Scene:
    """Entropy bonus as p * log p where an illegal action has log p = -inf: 0 * -inf."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_p = F.log_softmax(model(b["x"]).masked_fill(~b["legal"], -1e9 if fixed else -INF), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return (-log_p.gather(1, b["a"][:, None])[:, 0] - 0.01 * entropy).mean()

    return Scene(
        model=model, batch=lambda step: legal_moves(step, 1, 2), loss=loss, optimizer=sgd(model)
    )


@incident(
    "hill-a/stable-baselines#505",
    expected=Expected(step=2, phase="loss", op="aten.sub", event="nan", sample=3),
    accepted=("SG206",),
)
def policy_ratio_of_forbidden_action(fixed: bool) -> Scene:
    """PPO ratio exp(new - old): the stored action is forbidden in both policies, and -inf - -inf is
    NaN.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    forbidden = -1e9 if fixed else -INF

    def loss(model: nn.Module, b: Batch) -> Tensor:
        new = F.log_softmax(model(b["x"]).masked_fill(~b["legal"], forbidden), -1).gather(
            1, b["a"][:, None]
        )[:, 0]
        old = (
            torch.zeros(4, 3)[: len(new)]
            .masked_fill(~b["legal"], forbidden)
            .gather(1, b["a"][:, None])[:, 0]
        )
        return -(torch.exp(new - old)).mean()

    return Scene(
        model=model,
        batch=lambda step: legal_moves(step, 2, 3),
        loss=loss,
        optimizer=sgd(model),
        steps=3,
    )


class HandSoftmax(nn.Module):
    """exp(s - max) / sum, as one writes it by hand."""

    def __init__(self, *, low: float) -> None:
        super().__init__()
        self.score, self.low = nn.Linear(4, 1), low

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        scores = self.score(x)[..., 0].masked_fill(pad, self.low)
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
        return ((weights / weights.sum(-1, keepdim=True))[..., None] * x).sum(1)


class Pooler(nn.Module):
    def __init__(self, *, low: float) -> None:
        super().__init__()
        self.pool, self.head = HandSoftmax(low=low), nn.Linear(4, 2)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.head(self.pool(x, pad))


def padded(step: int, bad_step: int, sample: int) -> Batch:
    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[0, 3:] = True
    if step == bad_step:
        pad[sample] = True
    return {"x": randn(3, 5, 4, seed=step), "pad": pad, "y": torch.tensor([0, 1, 1])}


def classify_padded(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"], b["pad"]), b["y"])


@incident(
    "pytorch/pytorch#31829",
    expected=Expected(step=1, phase="forward", module="pool", op="aten.sub", event="nan", sample=1),
    accepted=("SG204",),
)
def attention_pooling_by_hand_of_empty_bag(fixed: bool) -> Scene:
    """The row maximum of an empty bag is -inf, and subtracting it from the row is -inf - -inf."""
    torch.manual_seed(0)
    model = Pooler(low=-1e9 if fixed else -INF)
    return Scene(
        model=model,
        batch=lambda step: padded(step, 1, 1),
        loss=classify_padded,
        optimizer=sgd(model),
    )


class Decoder(nn.Module):
    """Causal attention over left-padded tokens, one score a position."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.emb, self.attn, self.head = (
            nn.Embedding(8, 4),
            Attention(4, safe=safe),
            nn.Linear(4, 8),
        )

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        causal = torch.full((length, length), -INF).triu(1)
        padding = torch.zeros(ids.shape).masked_fill(ids.eq(0), -INF)[:, None, :]
        return self.head(self.attn(self.emb(ids), causal + padding))


@incident(
    "huggingface/transformers#25284",
    "pytorch/pytorch#41508",
    expected=Expected(
        step=2,
        phase="forward",
        module="attn",
        op="aten._softmax",
        event="nan",
        sample=0,
        loss_finite=True,
    ),
    accepted=("SG204",),
)
def left_padding_under_causal_mask(fixed: bool) -> Scene:
    """The first row of a left-padded sample sees only itself, a pad. Labels ignore it, so only
    gradients are NaN.
    """
    torch.manual_seed(0)
    model = Decoder(safe=fixed)

    def batch(step: int) -> Batch:
        ids = tokens(2, 4, seed=step, low=1)
        if step == 2:
            ids[0, 0] = 0
        return {"ids": ids, "y": ids.roll(-1, 1).masked_fill(ids.eq(0), -100)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten())

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


class Masked(nn.Module):
    """The additive mask comes with the batch, -inf and all."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.inp, self.attn, self.out = nn.Linear(3, 4), Attention(4, safe=safe), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.attn(self.inp(x), mask).mean(1))


@incident(
    "pytorch/pytorch#160064",
    expected=Expected(
        step=1, phase="forward", module="attn", op="aten._softmax", event="nan", sample=3
    ),
    accepted=("SG204",),
)
def collated_mask_closes_a_row(fixed: bool) -> Scene:
    """-inf in the batch is meant, until the collate function masks every key of one query."""
    torch.manual_seed(0)
    model = Masked(safe=fixed)

    def batch(step: int) -> Batch:
        mask = torch.zeros(4, 3, 3)
        mask[:, :, 2] = -INF
        if step == 1:
            mask[3, 1] = -INF
        return {"x": randn(4, 3, 3, seed=step), "mask": mask, "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"], b["mask"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#31829",
    "pytorch/pytorch#49724",
    expected=Expected(
        step=1,
        phase="backward",
        op="aten.sub",
        node="LogsumexpBackward0",
        event="nan",
        sample=2,
        loss_finite=True,
    ),
    accepted=("SG204", "SG402"),
)
def logsumexp_of_no_negatives(fixed: bool) -> Scene:
    """No negatives: logsumexp over -inf is -inf, which softplus makes 0; backward subtracts
    infinities.
    """
    torch.manual_seed(0)
    model = chain(a=nn.Linear(3, 4), b=nn.Linear(4, 4))

    def batch(step: int) -> Batch:
        negative = torch.ones(4, 4, dtype=torch.bool)
        if step == 1:
            negative[2] = False
        return {"x": randn(4, 3, seed=step), "negative": negative}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        closed = torch.zeros(b["negative"].shape).masked_fill(
            ~b["negative"], -1e9 if fixed else -INF
        )
        scores = model(b["x"]) + closed
        return F.softplus(torch.logsumexp(scores, -1)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "huggingface/transformers#17306",
    expected=Expected(
        step=1, phase="loss", op="aten.nll_loss_forward", event="seen", sample=1, grads_finite=True
    ),
    accepted=("SG104",),
)
def label_is_a_masked_class(fixed: bool) -> Scene:
    """Logits of classes outside the task are -inf, and one label is such a class: its loss is
    infinite.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    allowed = torch.tensor([True, True, True, False])

    def batch(step: int) -> Batch:
        return {"x": randn(3, 3, seed=step), "y": torch.tensor([0, 3 if step == 1 else 1, 2])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        keep = allowed[b["y"]] if fixed else torch.ones(len(b["y"]), dtype=torch.bool)
        return F.cross_entropy(model(b["x"]).masked_fill(~allowed, -INF)[keep], b["y"][keep])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "huggingface/transformers#17306",
    expected=Expected(step=0, phase="loss", op="aten.sum", event="seen", grads_finite=True),
    accepted=("SG206", "SG104"),
)
def label_smoothing_over_masked_classes(fixed: bool) -> Scene:
    """Label smoothing gives every class some probability, also the one whose logit is -inf."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def batch(step: int) -> Batch:
        return {"x": randn(3, 3, seed=step), "y": torch.tensor([0, 1, 2])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        ruled_out = torch.tensor([False, False, False, True])
        logits = model(b["x"]).masked_fill(ruled_out, -INF)
        return F.cross_entropy(logits, b["y"], label_smoothing=0.0 if fixed else 0.1)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)
