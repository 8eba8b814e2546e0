"""An incident is rare, but a diagnosis must not stop a run: at most six bare steps and 0.3 s."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard.locate import locate

from . import loop as loops

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


@pytest.mark.parametrize("threads", [1])
def test_diagnosis_of_a_bad_gradient_costs_at_most_six_steps(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"], batch["gain"]).flatten(0, 1), batch["ids"].flatten())

    ids = torch.randint(0, WORDS, (8, LENGTH))
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss({"ids": ids, "gain": torch.ones(8, 1, 1)}).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    kept: list[tuple[object, object]] = []
    monkeypatch.setattr(loops, "locate", lambda step, reading: kept.append((step, reading)))
    gain = torch.ones(8, 1, 1)
    gain[5] = 0.0
    loops.Loop(model, optimizer, loss).step(0, [{"ids": ids, "gain": gain}])
    began = time.perf_counter()
    origin = locate(*kept[0])  # type: ignore[arg-type]
    took = time.perf_counter() - began
    assert (origin.node, origin.samples) == ("SqrtBackward0", (5,))
    assert took <= 6 * min(seconds) + 0.3
