"""A small training project: its data, its model, what `build` makes of them, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import stepguard

EOS = 1


class Chats:
    """A map-style dataset, the same every time."""

    def __init__(self, size: int = 24, *, seed: int = 0, length: int = 10, eos: int = EOS) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [_chat(f"chat-{seed}-{index}", generator, length, eos) for index in range(size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


def _chat(name: str, generator: torch.Generator, most: int, eos: int) -> dict[str, Any]:
    length = int(torch.randint(6, most, (), generator=generator))
    ids = torch.randint(2, 16, (most,), generator=generator)
    ids[length - 1] = eos
    ids[length:] = 0
    labels = ids.clone()
    labels[:3] = -100
    labels[length:] = -100
    attention = (torch.arange(most) < length).long()
    sound = torch.randn(16, generator=generator)
    return {
        "id": name,
        "input_ids": ids,
        "labels": labels,
        "attention_mask": attention,
        "sound": sound,
    }


class TinyChat(nn.Module):
    """Embedding, norm, a gated mixing layer and two heads."""

    def __init__(self, vocab: int = 16, hidden: int = 8, *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.norm = norm if norm is not None else nn.LayerNorm(hidden)
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.mix = nn.Linear(hidden, hidden)
        self.batch_norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, vocab)
        self.sound = nn.Linear(hidden, 16)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.norm(self.embed(input_ids))
        states = states + self.alpha * torch.tanh(self.mix(states))
        pooled = self.batch_norm(states.mean(dim=1))
        return self.head(nn.functional.dropout(states, 0.1, self.training)), self.sound(pooled)


DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(model: Any, dtype: torch.dtype = torch.bfloat16) -> Callable[[Any], dict[str, Tensor]]:
    """The loss of a batch, in the precision the step runs in."""

    def loss(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits, sound = model(batch["input_ids"])
        labels = batch["labels"]
        losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        # every sample counts alike, so that micro-batches add up to the whole batch
        text = (losses.sum(1) / labels.ne(-100).sum(1)).mean()
        return {"text": text, "sound": F.mse_loss(sound.float(), batch["sound"])}

    return loss


def build(config: Any) -> dict[str, Any]:
    """Model, optimizer and the rest, as the configuration says."""
    torch.manual_seed(config.seed)
    model = TinyChat(**config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr)
    steps = config["training"]["num_train_steps"]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.optimizer.lr, total_steps=steps
    )
    chats = Chats(length=config.max_length, eos=config.eos_token_id)
    loader = DataLoader(chats, batch_size=config.training.batch_size)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loss_fn": loss_of(model, DTYPES[config.mixed_precision]),
        "loader": loader,
        "dataset": chats,
        "validation": Chats(8, seed=1),
        "guard": stepguard.GuardConfig(clip_norm=0.5, checkpoint_every=100),
        "watch": {"alpha": 10.0},
    }


def train(config: Any) -> None:
    """The loop reads what `build` does not."""
    parts = build(config)
    guard = stepguard.Guard(
        parts["model"], parts["optimizer"], scheduler=parts["scheduler"], config=parts["guard"]
    )
    batches = list(parts["loader"])
    accumulation = config.training.gradient_accumulation_steps
    for step in range(config.training.num_train_steps):
        chosen = [
            batches[(step * accumulation + part) % len(batches)] for part in range(accumulation)
        ]
        guard.step(parts["loss_fn"], *chosen)
        if step % config.training.save_every == 0:
            guard.save()
