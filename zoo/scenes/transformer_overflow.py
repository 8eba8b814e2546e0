"""Transformers: rotary tables after a load, residual streams and scores in half precision."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, new_memory_is_nan, randn, sgd, tokens


class RotaryTable(nn.Module):
    """Rotary positions by complex multiplication; the frequencies are in no checkpoint."""

    inv_freq: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer(
            "inv_freq", 1.0 / 10000 ** (torch.arange(0, width, 2) / width), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq)
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)


class RotaryDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rope = nn.Embedding(10, 8), RotaryTable(8)
        self.qkv, self.head = nn.Linear(8, 24, bias=False), nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.rope(q) @ self.rope(k).transpose(1, 2) / math.sqrt(q.shape[-1])
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        out: Tensor = self.head(x + scores.masked_fill(ahead, -INF).softmax(-1) @ v)
        return out


@incident(
    "huggingface/transformers#45902",
    "OpenMOSS/MOSS-TTS-Nano#28",
    "macwiatrak/Bacformer#33",
    expected=Expected(
        step=0, phase="state", module="rope", op="aten.mul", event="buffer:rope.inv_freq"
    ),
    accepted=("SG602",),
)
def rope_inv_freq_after_meta_load(fixed: bool) -> Scene:
    """Built on meta, made real by to_empty and loaded: what the checkpoint does not hold is never
    filled.
    """
    torch.manual_seed(0)
    model = RotaryDecoder()
    if not fixed:
        weights = model.state_dict()
        with torch.device("meta"):
            model = RotaryDecoder()
        with new_memory_is_nan():
            model.to_empty(device="cpu")
        model.load_state_dict(weights)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten())

    return Scene(
        model=model,
        batch=lambda step: {"ids": tokens(3, 6, seed=step, high=10)},
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


class WideNorm(nn.Module):
    """RMSNorm with its statistics in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class SandwichBlock(nn.Module):
    """A norm before and after the feed-forward; `gain` gives channel 0 a massive activation."""

    def __init__(self, *, gain: float = 1.0) -> None:
        super().__init__()
        self.norm, self.post_norm = WideNorm(), WideNorm()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        if gain > 1:
            with torch.no_grad():
                self.post_norm.weight[0] = gain
                self.up.weight[:, 0].abs_()
                self.down.weight[0].abs_()

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.post_norm(self.down(F.silu(self.up(self.norm(x)))))
        return x + added


class SandwichDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList([SandwichBlock(), SandwichBlock(gain=1.5e4), SandwichBlock()])
        self.norm, self.head = WideNorm(), nn.Linear(8, 9)
        with torch.no_grad():
            self.emb.weight[7, 0] = 6e4

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(self.norm(x))
        return out


@incident(
    "huggingface/transformers#39972",
    "tinygrad/tinygrad#2932",
    expected=Expected(
        step=2,
        phase="forward",
        module="blocks.1",
        op="aten.add",
        event="inf",
        sample=1,
        proof={"then": ("aten.mul", "blocks.2.norm")},
    ),
    accepted=("SG301",),
)
def residual_stream_overflows_fp16(fixed: bool) -> Scene:
    """A token of massive activation leaves float16 at a residual sum; the next norm makes inf * 0
    of it.
    """
    torch.manual_seed(0)
    model = SandwichDecoder().to(torch.bfloat16 if fixed else torch.float16)

    def batch(step: int) -> Batch:
        ids = tokens(3, 4, seed=step, high=7)
        if step == 2:
            ids[1, 2] = 7
        return {"ids": ids, "y": ids.roll(-1, 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).float().flatten(0, 1), b["y"].flatten())

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3), steps=3)


class CrossAttention(nn.Module):
    """Text looks at an image; `safe` lets rows that may see nothing look everywhere, and blanks
    them afterwards.
    """

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.heads, self.safe = 2, safe

    def forward(self, x: Tensor, image: Tensor, blocked: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(image).unflatten(-1, (2, self.heads, -1)).unbind(2)
        scores = torch.einsum("nthd,nihd->nhti", q, k) / math.sqrt(q.shape[-1])
        dead = blocked.all(-1)
        if self.safe:
            blocked = blocked & ~dead[..., None]
        weights = scores.masked_fill(blocked[:, None], -INF).softmax(-1)
        seen: Tensor = self.out(torch.einsum("nhti,nihd->nthd", weights, v).flatten(2))
        return seen.masked_fill(dead[..., None], 0.0) if self.safe else seen


class VisionLayer(nn.Module):
    def __init__(self, cross: CrossAttention | None) -> None:
        super().__init__()
        self.norm, self.cross = nn.LayerNorm(8), cross
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, image: Tensor, blocked: Tensor) -> Tensor:
        if self.cross is not None:
            x = x + self.cross(self.norm(x), image, blocked)
        added: Tensor = self.mlp(self.norm(x))
        return x + added


class VisionDecoder(nn.Module):
    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.emb, self.vision = nn.Embedding(10, 8), nn.Linear(5, 8)
        self.layers = nn.ModuleList([VisionLayer(None), VisionLayer(CrossAttention(safe=safe))])
        self.head = nn.Linear(8, 10)

    def forward(self, ids: Tensor, patches: Tensor, image_at: Tensor) -> Tensor:
        x, image = self.emb(ids), self.vision(patches)
        before = torch.arange(ids.shape[1])[None] < image_at[:, None]
        for layer in self.layers:
            x = layer(x, image, before[..., None].expand(-1, -1, patches.shape[1]))
        out: Tensor = self.head(x)
        return out


@incident(
    "meta-pytorch/torchtune#2552",
    expected=Expected(
        step=2, phase="forward", module="layers.1.cross", op="aten._softmax", event="nan", sample=1
    ),
    accepted=("SG204",),
)
def text_before_first_image_cross_attention(fixed: bool) -> Scene:
    """Text that precedes its image may see no patch of it, so its row of scores is all -inf."""
    torch.manual_seed(0)
    model = VisionDecoder(safe=fixed)

    def batch(step: int) -> Batch:
        image_at = torch.zeros(3, dtype=torch.long)
        if step == 2:
            image_at[1] = 2
        return {
            "ids": tokens(3, 5, seed=step, high=10),
            "patches": randn(3, 4, 5, seed=step),
            "image_at": image_at,
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores = model(b["ids"], b["patches"], b["image_at"])
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)


class SpatialAttention(nn.Module):
    """Scores by einsum; `early` scales the queries before the product instead of the scores after
    it.
    """

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.to_out, self.early = nn.Linear(16, 16), early
        with torch.no_grad():
            self.to_q.weight.copy_(torch.eye(16))
            self.to_k.weight.copy_(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        product = "bid,bjd->bij"
        scores = (
            torch.einsum(product, q * 0.25, k) if self.early else torch.einsum(product, q, k) * 0.25
        )
        out: Tensor = self.to_out(torch.einsum("bij,bjd->bid", scores.softmax(-1).to(v.dtype), v))
        return out


class MiddleBlock(nn.Module):
    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.attn, self.ff = SpatialAttention(early=early), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        added: Tensor = self.ff(F.gelu(x))
        return x + added


class Denoiser(nn.Module):
    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.mid, self.norm, self.out = (
            MiddleBlock(early=early),
            nn.LayerNorm(16),
            nn.Linear(16, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.mid(x)))
        return out


@incident(
    "showlab/Tune-A-Video#103",
    "huggingface/diffusers#1614",
    "AUTOMATIC1111/stable-diffusion-webui#5715",
    expected=Expected(
        step=2,
        phase="forward",
        module="mid.attn",
        op="aten.bmm",
        event="inf",
        sample=1,
        proof={"then": ("aten._softmax", "mid.attn")},
    ),
    accepted=("SG301",),
)
def sd21_attention_logits_fp16(fixed: bool) -> Scene:
    """Under a GradScaler, the scores of one image exceed 65504 before they are scaled: no step size
    cures that.
    """
    torch.manual_seed(0)
    model = Denoiser(early=fixed)

    def batch(step: int) -> Batch:
        x = randn(3, 5, 16, seed=step)
        if step == 2:
            x[1] = 75 + x[1]
        return {"x": x, "noise": randn(3, 5, 16, seed=step + 3)}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.mse_loss(model(b["x"]).float(), b["noise"]),
        optimizer=sgd(model, 1e-3),
        steps=3,
        autocast=torch.float16,
        scaler={"init_scale": 128.0},
    )
