"""Questions and answers as rows of token ids, and rows as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from homework.conversions import Pair, answer_of

IGNORED = -100
Row = dict[str, list[int]]


def row_of(tokenizer: Any, question: str, value: float, max_length: int) -> Row:
    """Question, answer and end of text, cut at `max_length`. Only the answer and its end have
    labels.
    """
    asked = tokenizer(question)["input_ids"]
    ids = [*tokenizer(f"{question} {answer_of(value)}")["input_ids"], tokenizer.eos_token_id]
    labels = [IGNORED] * len(asked) + ids[len(asked) :]
    kept = ids[:max_length]
    return {"input_ids": kept, "attention_mask": [1] * len(kept), "labels": labels[:max_length]}


def rows_of(tokenizer: Any, pairs: Sequence[Pair], max_length: int) -> list[Row]:
    return [row_of(tokenizer, question, value, max_length) for question, value in pairs]


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Pad on the right to the longest row of the batch; padding does not count in the loss."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    longest = max(len(row["input_ids"]) for row in rows)
    return {
        key: torch.tensor([row[key] + [filler] * (longest - len(row[key])) for row in rows])
        for key, filler in fill.items()
    }
