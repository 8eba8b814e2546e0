"""Healthy runs with infinities, zeros and NaNs where they belong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Scene, control
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, Lambda, chain, randn, regression, sgd, tokens

LABELS = torch.tensor([0, 1, 0, 1])


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def labelled(step: int) -> Batch:
    return {"x": randn(4, 3, seed=step), "y": LABELS}


class FusedAttention(nn.Module):
    """scaled_dot_product_attention with a boolean mask that may close a whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.qkv, self.head = nn.Embedding(8, 4), nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.emb(ids))[:, None].chunk(3, -1)
        keep = ids.ne(0)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=keep)[:, 0].mean(1))


@control("pytorch/pytorch#41508")
def ok_fused_attention_over_empty_sample(fixed: bool) -> Scene:
    """scaled_dot_product_attention answers a fully masked row with 0."""
    torch.manual_seed(0)
    model = FusedAttention()

    def batch(step: int) -> Batch:
        ids = tokens(4, 5, seed=step, low=1)
        ids[1] = 0
        return {"ids": ids, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@control("pytorch/pytorch#31829")
def ok_logsumexp_of_nothing_behind_masked_fill(fixed: bool) -> Scene:
    """logsumexp over -inf gives NaN slopes, which the backward of masked_fill throws away."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def batch(step: int) -> Batch:
        negative = torch.ones(4, 4, dtype=torch.bool)
        negative[2] = False
        return {"x": randn(4, 3, seed=step), "negative": negative}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.softplus(
            torch.logsumexp(model(b["x"]).masked_fill(~b["negative"], -INF), -1)
        ).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@control("speechbrain/speechbrain#181")
def ok_complex_magnitude_of_silence(fixed: bool) -> Scene:
    """|z| of a complex spectrum has the subgradient 0 at 0."""
    torch.manual_seed(0)
    model = chain(
        inp=nn.Linear(8, 8, bias=False),
        mag=Lambda(lambda w: torch.fft.rfft(w, dim=-1).abs()),
        out=nn.Linear(5, 1),
    )

    def batch(step: int) -> Batch:
        data = regression(step, features=8)
        data["x"][1] = 0
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=3)


@control("pytorch/pytorch#19126")
def ok_distances_of_identical_points(fixed: bool) -> Scene:
    """cdist, norm and F.normalize are all defined at zero."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        x[0] = 0
        x[3] = x[2]
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        return (
            torch.cdist(out, out).mean()
            + out.norm(dim=-1).mean()
            + F.normalize(out, dim=-1).sum() * 1e-12
        )

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


class Sentinels(nn.Module):
    """Buffers that are infinite or NaN until they are first used, and are never used in arithmetic
    before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.register_buffer("best", torch.tensor(INF))
        self.register_buffer("calibrated", torch.full((3,), NAN))
        self.register_buffer("causal", torch.full((4, 4), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.best.copy_(torch.minimum(self.best, x.abs().max()))
        return self.lin(x)


@control("ecmwf/WeatherGenerator#2724")
def ok_sentinel_buffers(fixed: bool) -> Scene:
    """A best-so-far that begins at inf, a calibration that is still NaN, a causal mask."""
    torch.manual_seed(0)
    model = Sentinels()
    return Scene(model=model, batch=labelled, loss=classify, optimizer=sgd(model), steps=4)


@control("pytorch/pytorch#52248")
def ok_missing_values_behind_where(fixed: bool) -> Scene:
    """NaN features are replaced by a learned value before anything is computed from them."""
    torch.manual_seed(0)

    class Imputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.missing, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.where(x.isnan(), self.missing, x))

    model = Imputed()

    def batch(step: int) -> Batch:
        data = labelled(step)
        data["x"][step % 4, 1] = NAN
        return data

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), steps=4)


@control("pytorch/pytorch#41508")
def ok_infinite_mask_in_the_batch(fixed: bool) -> Scene:
    """The collate function ships a -inf mask; every query keeps a key, and padding rows are dropped
    by indexing.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def batch(step: int) -> Batch:
        mask = torch.zeros(4, 4)
        mask[torch.arange(4), (torch.arange(4) + step) % 4] = -INF
        return {
            "x": randn(4, 3, seed=step),
            "mask": mask,
            "keep": torch.tensor([True, True, False, True]),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_p = torch.log_softmax(model(b["x"]) + b["mask"], -1)[b["keep"]]
        return -torch.where(torch.isinf(log_p), torch.zeros_like(log_p), log_p).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=4)


@control("pytorch/pytorch#134106")
def ok_half_precision_square_is_absorbed(fixed: bool) -> Scene:
    """A square overflows in fp16, rsqrt(inf) is 0 and so are its slopes: nothing non-finite is
    left.
    """
    torch.manual_seed(0)
    norm = Lambda(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))
    model = chain(norm=norm, head=nn.Linear(4, 2)).half()

    def batch(step: int) -> Batch:
        x = randn(4, 4, seed=step).half()
        x[1, 0] = 400.0
        return {"x": x, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]).float(), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3), steps=3)


@control("pytorch/pytorch#70348")
def ok_steps_without_labels(fixed: bool) -> Scene:
    """Some batches have no label; the sum is divided by at least 1 and gives loss 0 with gradient
    0.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))

    def batch(step: int) -> Batch:
        ids = tokens(2, 4, seed=step)
        return {"ids": ids, "y": torch.full_like(ids, -100) if step % 2 else ids.roll(-1, 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        y = b["y"].flatten()
        return F.cross_entropy(model(b["ids"]).flatten(0, 1), y, reduction="sum") / y.ne(
            -100
        ).sum().clamp_min(1)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=8)


@control("InsaneLife/dssm#17")
def ok_sparse_embedding_with_max_norm(fixed: bool) -> Scene:
    """max_norm renormalises rows in forward, gradients are sparse, one row is zero."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = (
                nn.Embedding(8, 4, sparse=True, max_norm=1.0, padding_idx=0),
                nn.Linear(4, 2),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.emb(ids).mean(1))

    model = Net()

    def batch(step: int) -> Batch:
        return {"x": tokens(4, 3, seed=step), "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), steps=4)
