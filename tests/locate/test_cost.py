"""An incident is rare, but a diagnosis must not stop a run: the step is run at most six times over.

Times and memory are measured by `python -m benchmarks.location`.
"""

from __future__ import annotations

import math

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


def test_diagnosis_of_a_bad_gradient_runs_the_step_at_most_six_times(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = []

    def loss(batch: dict[str, Tensor]) -> Tensor:
        rows.append(len(batch["ids"]))
        return F.cross_entropy(model(batch["ids"], batch["gain"]).flatten(0, 1), batch["ids"].flatten())

    ids = torch.randint(0, WORDS, (8, LENGTH))
    kept: list[tuple[object, object]] = []
    monkeypatch.setattr(loops, "locate", lambda step, reading: kept.append((step, reading)))
    gain = torch.ones(8, 1, 1)
    gain[5] = 0.0
    loops.Loop(model, optimizer, loss).step(0, [{"ids": ids, "gain": gain}])
    rows.clear()
    origin = locate(*kept[0])  # type: ignore[arg-type]
    assert (origin.node, origin.samples) == ("SqrtBackward0", (5,))
    assert sum(rows) <= 6 * 8  # counted in samples: the search for the guilty one runs parts of the batch
