"""Conversations: a prompt that does not count, an answer that does, and a sound."""

from __future__ import annotations

from typing import Any

import torch

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
