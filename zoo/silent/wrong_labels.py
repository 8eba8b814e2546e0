"""Mistakes in the labels of language models: the end is never taught, or the padding is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.silent.loops import LENGTH, TOKENS, WIDTH, Loop, Transformer, next_token_loss
from zoo.silent.plant import plant

END, ROWS = 1, 16


class LanguageModel(nn.Module):
    """Takes what a collator makes, and computes its loss as models of transformers do."""

    def __init__(self, inner: nn.Module, pad: int) -> None:
        super().__init__()
        self.inner = inner
        self.config = SimpleNamespace(eos_token_id=END, pad_token_id=pad)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.inner(input_ids)
        return next_token_loss(logits[:, :-1], labels[:, 1:])


class Recurrent(nn.Module):
    """A small GRU over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.body = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(tokens))[0])  # type: ignore[no-any-return]


def pairs() -> nn.Module:
    """The next token from the last one."""
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, TOKENS))


def rows(step: int, pad: int, *, ended: bool) -> tuple[Tensor, Tensor]:
    """Tokens of different length that count upwards, and where they are not padding."""
    drawn = torch.Generator().manual_seed(step)
    first = torch.randint(TOKENS, (ROWS, 1), generator=drawn)
    ids = 2 + (first + torch.arange(LENGTH)) % (TOKENS - 2)
    lengths = torch.randint(8, LENGTH, (ROWS, 1), generator=drawn)
    mask = (torch.arange(LENGTH) < lengths).long()
    if ended:
        ids = ids.masked_fill(torch.arange(LENGTH) == lengths - 1, END)
    return ids.masked_fill(mask == 0, pad), mask


def language(loop: Loop, inner: nn.Module, pad: int, collate: Any) -> None:
    """Train this model on what `collate(step)` gives in the place of the loop's own."""
    model = LanguageModel(inner, pad)
    loop.model = model
    loop.train_with(torch.optim.AdamW(model.parameters(), lr=3e-3))

    def batch(step: int) -> Any:
        ids, mask, labels = collate(step)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}, labels

    loop.batch = batch
    loop.forward = lambda inputs: model(**inputs)  # type: ignore[arg-type]
    loop.loss = lambda loss, targets: loss


# --- SG922: targets that teach the wrong token ----------------------------------------------------


@plant("SG922", "transformer")
def end_masked_as_padding(loop: Loop, wrong: bool) -> None:
    """The padding token is the end token and masked by its id; the twin masks by attention."""

    def collate(step: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, mask = rows(step, END, ended=True)
        return ids, mask, ids.masked_fill(ids == END if wrong else mask == 0, -100)

    language(loop, Transformer(), END, collate)


@plant("SG922", "classifier")
def end_never_appended(loop: Loop, wrong: bool) -> None:
    """Answers without an end token; the twin is running text, whose rows need not end."""

    def collate(step: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, mask = rows(step, 0, ended=False)
        labels = ids.masked_fill(mask == 0, -100)
        if wrong:
            labels[:, :4] = -100
        return ids, mask, labels

    language(loop, pairs(), 0, collate)


@plant("SG922", "denoiser")
def padding_is_taught(loop: Loop, wrong: bool) -> None:
    """Labels are a copy of the inputs; the twin teaches the first padding token as the end."""

    def collate(step: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, mask = rows(step, 0, ended=True)
        first = mask.cumsum(1).eq(mask.sum(1, keepdim=True)) & mask.eq(0)
        first &= first.cumsum(1).eq(1)
        return ids, mask, ids if wrong else ids.masked_fill(mask.eq(0) & ~first, -100)

    language(loop, Recurrent(), 0, collate)
