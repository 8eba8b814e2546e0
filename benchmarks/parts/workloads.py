"""What is trained: two GPTs and a ResNet, written out here so that nothing needs downloading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Over every position where there are several."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss. `build` gives the same weights every time."""

    name: str
    what: str
    """Model and batch in a few words, for the table."""
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    rounds: int
    """Timed rounds of a full run; more where a step is short."""
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy


class _Given(torch.autograd.Function):
    """A backward that hands out gradients made beforehand."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *ctx.grads


def hollow(workload: Workload) -> Workload:
    """The same model, buffers and optimizer with forward and backward taken out: what is left shows
    a check's own cost.

    On a busy machine a full step varies by several per cent from one to the next, which hides a
    check of a few milliseconds; the rest of the step without forward and backward is short and
    steady enough to show it. The output and its gradient stay as large as they were.
    """

    def build() -> nn.Module:
        model = workload.build()
        parameters = list(model.parameters())
        grads = [torch.randn_like(p) for p in parameters]
        # above every clipping limit in use: a guard that may leave out a clipping that would not
        # act gains nothing here
        torch._foreach_mul_(grads, 4.0 / nn.utils.get_total_norm(grads))
        inputs, _ = workload.batch(torch.Generator().manual_seed(0))
        with torch.no_grad():
            output = model.eval()(inputs)
        model.train().forward = lambda inputs: _Given.apply(grads, output, *parameters)
        return model

    return replace(workload, build=build, loss=lambda model, batch: model(batch[0]).square().mean())


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with learned positions and tied embeddings."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 with the 3x3 stem that 32x32 images need."""

    def __init__(self, width: int, depth: int = 2, classes: int = 100) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        sizes = [width * 2**stage for stage in range(4)]
        blocks = [
            Residual(inside if first else outside, outside, 2 if first and stage else 1)
            for stage, (inside, outside) in enumerate(zip([width, *sizes], sizes, strict=False))
            for first in [True] + [False] * (depth - 1)
        ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def gpt(
    name: str, *, vocabulary: int, width: int, depth: int, rows: int, length: int, rounds: int
) -> Workload:
    """Next-token prediction on generated ids."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(vocabulary, width, depth, length)

    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Workload(
        name, f"GPT, {_millions(build())}, {rows}x{length} tokens", build, batch, rounds
    )


def resnet(name: str, *, width: int, rows: int, rounds: int, depth: int = 2) -> Workload:
    """Classification of generated 32x32 images."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return ResNet(width, depth)

    def batch(generator: torch.Generator) -> Batch:
        images = torch.randn(rows, 3, 32, 32, generator=generator)
        return images, torch.randint(0, 100, (rows,), generator=generator)

    return Workload(
        name, f"ResNet-18, {_millions(build())}, {rows} images of 32x32", build, batch, rounds
    )


FULL: dict[str, Callable[[], Workload]] = {
    "gpt-7m": lambda: gpt(
        "gpt-7m", vocabulary=4096, width=256, depth=8, rows=8, length=128, rounds=40
    ),
    "gpt-50m": lambda: gpt(
        "gpt-50m", vocabulary=24576, width=512, depth=12, rows=2, length=128, rounds=20
    ),
    "resnet-18": lambda: resnet("resnet-18", width=64, rows=16, rounds=40),
}
QUICK: dict[str, Callable[[], Workload]] = {
    "gpt-tiny": lambda: gpt(
        "gpt-tiny", vocabulary=64, width=32, depth=2, rows=2, length=16, rounds=3
    ),
    "resnet-tiny": lambda: resnet("resnet-tiny", width=4, rows=2, rounds=3, depth=1),
}


def _millions(model: nn.Module) -> str:
    count = sum(p.numel() for p in model.parameters())
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"
