"""Half precision that is easily overlooked: a prior, a schedule, an epsilon, unread rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import randn, sgd, uniform


class TextPrior(nn.Module):
    """Mean and log-scale of the latent from the text; feature 0 makes the scale small."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.proj = nn.Linear(5, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.pre.weight[0] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
            self.pre.bias[0] = 0.0
            self.proj.weight[4:, 0] = -1.0

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_scale = self.proj(F.leaky_relu(self.pre(text), 0.1)).chunk(2, -1)
        return mean, log_scale


class Posterior(nn.Module):
    """A latent from the spectrum, and the log-scale of its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_scale = self.net(spectrum).chunk(2, -1)
        return mean + randn(*mean.shape, seed=4).to(mean.dtype) * log_scale.exp(), log_scale


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior, self.posterior = TextPrior(), Posterior()
        self.flow, self.decoder = nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, text: Tensor, spectrum: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        latent, noise = self.posterior(spectrum)
        return self.decoder(latent), (self.flow(latent), noise, *self.prior(text))


def prior_divergence(latent: Tensor, noise: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    squared = 0.5 * (latent - mean) ** 2 * torch.exp(-2.0 * log_scale)
    return (log_scale - noise - 0.5 + squared).float().mean()


@incident(
    "hcy71o/SC-CNN#4",
    expected=Expected(step=2, phase="loss", op="aten.exp", event="inf", sample=0),
    accepted=("SG301", "SG203"),
)
def vits_kl_exp_in_half(fixed: bool) -> Scene:
    """A prior's scale of e^-6 is harmless, but the divergence needs e^13, which is more than
    float16 holds.
    """
    torch.manual_seed(0)
    model = Speaker()

    def batch(step: int) -> Batch:
        text = randn(3, 4, 5, seed=step) * 0.3
        if step == 2:
            text[0, :, 0] = 6.5
        return {"text": text, "spectrum": randn(3, 4, 6, seed=step + 3)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        decoded, latents = model(b["text"], b["spectrum"])
        if fixed:
            latents = tuple(part.float() for part in latents)
        return 45 * F.l1_loss(decoded.float(), b["spectrum"]) + prior_divergence(*latents)

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd(model, 1e-6),
        steps=3,
        autocast=torch.bfloat16 if fixed else torch.float16,
        scaler={"init_scale": 1.0},
    )


class Half(nn.Module):
    """One side of a pair of encoders."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(features, 16), nn.Linear(16, 16)
        nn.init.constant_(self.outer.bias, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x).relu())
        return out


class Retriever(nn.Module):
    """Every query is scored against every passage; `wide` does it in float32."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.query, self.passage, self.wide = Half(5), Half(7), wide

    def forward(self, query: Tensor, passage: Tensor) -> Tensor:
        left: Tensor = self.query(query)
        right: Tensor = self.passage(passage)
        if self.wide:
            with torch.autocast("cpu", enabled=False):
                return left.float() @ right.float().T
        return left @ right.T


@incident(
    "facebookresearch/dpr-scale#12",
    expected=Expected(step=2, phase="forward", module="", op="aten.mm", event="inf", sample=2),
    accepted=("SG301",),
)
def retrieval_scores_overflow_half(fixed: bool) -> Scene:
    """Scores are plain dot products, and one long document exceeds 65504 with the query of another
    pair.
    """
    torch.manual_seed(0)
    model = Retriever(wide=fixed)

    def batch(step: int) -> Batch:
        query, passage = randn(4, 5, seed=step), randn(4, 7, seed=step + 1)
        if step == 2:
            query[1] *= 60
            passage[2] *= 3e4
        return {"query": query, "passage": passage}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores = model(b["query"], b["passage"]).float()
        return F.cross_entropy(scores, torch.arange(len(scores)))

    optimizer = sgd(model, 1e-8)
    return Scene(
        model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3, autocast=torch.float16
    )


class TimedDenoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.inner, self.outer = nn.Embedding(20, 6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = self.outer(F.gelu(self.inner(x + self.time(t))))
        return out


class Diffusion(nn.Module):
    """A cosine schedule, kept in float64 and looked up in the precision of the image."""

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.net = TimedDenoiser()
        t = torch.arange(1, 21, dtype=torch.float64) / 20
        self.kept = torch.cos(t * math.pi / 2).pow(2).clamp(min=least)

    def forward(self, image: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        noisy = (
            self._at(t, self.kept.sqrt(), image) * image
            + self._at(t, (1 - self.kept).sqrt(), image) * noise
        )
        guess: Tensor = self.net(noisy, t)
        grown, shift = (1 / self.kept).sqrt(), (1 / self.kept - 1).sqrt()
        return guess, self._at(t, grown, noisy) * noisy - self._at(t, shift, noisy) * guess

    def _at(self, t: Tensor, table: Tensor, like: Tensor) -> Tensor:
        return table[t].to(like.dtype)[:, None]


@incident(
    "LTH14/mar#70",
    expected=Expected(
        step=2, phase="forward", module="", op="aten._to_copy", event="inf", sample=2
    ),
    accepted=("SG301",),
)
def x0_from_eps_half_schedule(fixed: bool) -> Scene:
    """The last step of a cosine schedule keeps almost nothing of the image: 1 over it is 1e16, and
    no float16.
    """
    torch.manual_seed(0)
    model = Diffusion(least=1e-3 if fixed else 0.0).half()

    def batch(step: int) -> Batch:
        t = torch.tensor([3, 7, 11, 5]) + step
        if step == 2:
            t[2] = 19
        return {
            "image": randn(4, 6, seed=step).half(),
            "noise": randn(4, 6, seed=step + 9).half(),
            "t": t,
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        guess, restored = model(b["image"], b["noise"], b["t"])
        clean = F.l1_loss(restored.float(), b["image"].float())
        return F.mse_loss(guess.float(), b["noise"].float()) + 0.1 * clean

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3), steps=3)


def area(sides: Tensor) -> Tensor:
    return sides[:, 0] * sides[:, 1]


def overlap(box: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and the distance of the centres over the diagonal of both; boxes are
    cx, cy, w, h.
    """
    low, high = (
        torch.stack([b[:, :2] + side * b[:, 2:] / 2 for b in (box, truth)]) for side in (-1, 1)
    )
    inside = area((high.amin(0) - low.amax(0)).clamp(min=0))
    union = area(box[:, 2:]) + area(truth[:, 2:]) - inside
    hull = (high.amax(0) - low.amin(0)).pow(2).sum(1)
    return inside / (union + 1e-7), (box[:, :2] - truth[:, :2]).pow(2).sum(1) / (hull + 1e-7)


class CompleteIoU(nn.Module):
    """Overlap, distance and shape of two boxes; `wide` does it in float32."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, raw: Tensor, truth: Tensor) -> Tensor:
        if self.wide:
            raw, truth = raw.float(), truth.float()
        box = torch.cat([raw[:, :2], raw[:, 2:].exp()], 1)
        shared, apart = overlap(box, truth)
        with torch.no_grad():
            angles = [torch.atan(b[:, 2] / b[:, 3].clamp(1e-16)) for b in (truth, box)]
            shape = 4 / math.pi**2 * (angles[0] - angles[1]).pow(2)
            weight = shape / (1 - shared + shape).clamp(1e-16)
        return (1 - (shared - apart) + weight * shape).mean()


class BoxHead(nn.Module):
    """A large first channel of the stem makes the boxes small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.xy, self.wh = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        with torch.no_grad():
            self.stem.weight[0].fill_(1.0)
            self.wh.weight[:, 0].fill_(-1.0)

    def forward(self, features: Tensor) -> Tensor:
        hidden = F.silu(self.stem(features))
        return torch.cat([self.xy(hidden), self.wh(hidden)], 1)


@incident(
    "Megvii-BaseDetection/YOLOX#1565",
    expected=Expected(
        step=1,
        phase="loss",
        module="criterion",
        op="aten.div",
        event="nan",
        sample=1,
        grads_finite=True,
    ),
    accepted=("SG302",),
)
def yolox_ciou_half_eps(fixed: bool) -> Scene:
    """A box shrinks to 0 by 0, and the clamp at 1e-16 that guards its aspect ratio is 0 in half
    precision.
    """
    torch.manual_seed(0)
    model, criterion = BoxHead().half(), CompleteIoU(wide=fixed)
    truth = torch.tensor([[0.1, 0.1, 0.8, 0.7], [0.2, -0.1, 0.6, 0.9], [0.0, 0.0, 0.5, 0.5]]).half()

    def batch(step: int) -> Batch:
        features = 0.3 * randn(3, 6, seed=step)
        if step == 1:
            features[1] = 4.0
        return {"features": features.half(), "box": truth}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        total: Tensor = criterion(model(b["features"]), b["box"])
        return total.float()

    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model, 1e-3)
    )


class HalfLoRA(nn.Module):
    """A frozen float16 layer and a float32 update of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).half().requires_grad_(False)
        self.down, self.up = (
            nn.Parameter(randn(2, 6, seed=5) * 0.1),
            nn.Parameter(torch.zeros(6, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.base(x)
        return frozen + (x.float() @ self.down.T @ self.up.T).to(x.dtype)


class ModulatedBlock(nn.Module):
    """Scales its normalised input by what the condition says; `limit` bounds that before it is
    cast.
    """

    def __init__(self, text_gain: float, *, limit: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6).half().requires_grad_(False)
        self.modulation = nn.Linear(3, 6).requires_grad_(False)
        self.proj, self.limit = HalfLoRA(), limit
        with torch.no_grad():
            self.modulation.weight[:, 2] = text_gain

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale: Tensor = self.modulation(condition)
        if self.limit is not None:
            scale = scale.clamp(-self.limit, self.limit)
        added: Tensor = self.proj(self.norm(x) * (1 + scale.to(x.dtype)))
        return x + added * 0.01


class VideoTransformer(nn.Module):
    """Rows of text and of video run through the same blocks; only the video is read out."""

    def __init__(self, *, limit: float | None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(
            [ModulatedBlock(0.5, limit=limit), ModulatedBlock(9e4, limit=limit)]
        )
        self.outer = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, text: Tensor, video: Tensor, t: Tensor) -> Tensor:
        rows = torch.cat([text, video], 1)
        count, when = text.shape[1], t.expand(-1, rows.shape[1])
        is_text = (torch.arange(rows.shape[1]) < count).float().expand(len(rows), -1)
        x, condition = self.inner(rows).half(), torch.stack([when, 1 - when, is_text], -1)
        for block in self.blocks:
            x = block(x, condition)
        out: Tensor = self.outer(x[:, count:].float())
        return out


@incident(
    "ostris/ai-toolkit#1046",
    expected=Expected(
        step=0,
        phase="forward",
        module="blocks.1",
        op="aten._to_copy",
        event="inf",
        loss_finite=True,
    ),
    accepted=("SG301", "SG403"),
)
def lora_adaln_half_overflow_on_unread_rows(fixed: bool) -> Scene:
    """The text's modulation does not fit into float16 in the last block, whose text nobody reads: 0
    * inf backward.
    """
    torch.manual_seed(0)
    model = VideoTransformer(limit=100.0 if fixed else None)

    def batch(step: int) -> Batch:
        return {
            "text": randn(2, 3, 4, seed=step),
            "video": randn(2, 4, 4, seed=step + 1),
            "t": uniform(2, 1, seed=step),
            "target": randn(2, 4, 4, seed=step + 2),
        }

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.mse_loss(model(b["text"], b["video"], b["t"]), b["target"]),
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        steps=1,
    )
