"""`build` makes everything a run starts with; `train` is the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import stepguard
from tinychat.data import Chats
from tinychat.model import TinyChat

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(model: Any, dtype: torch.dtype = torch.bfloat16) -> Callable[[Any], dict[str, Tensor]]:
    """The loss of a batch, in the precision the step runs in."""

    def loss(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits, sound = model(batch["input_ids"])
        text = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
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
