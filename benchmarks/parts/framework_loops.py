"""Training loops of frameworks that can be run for a few steps, guarded or not, and say how long
each step took.

A new framework is one more class and one more line in `LOOPS`. Its guard must be gone when `run`
returns, so that the bare steps beside it are bare.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

Spent = tuple[float, float]
"""Wall and CPU seconds of one step, from the beginning of one to the beginning of the next."""


@dataclass(frozen=True)
class Size:
    """A Llama and its batch."""

    what: str
    hidden: int
    layers: int
    vocabulary: int
    rows: int
    length: int


QUICK = Size("Llama, tiny", hidden=16, layers=1, vocabulary=64, rows=2, length=8)
FULL = Size(
    "Llama, 7M parameters, batch 8 x 128", hidden=256, layers=6, vocabulary=4096, rows=8, length=128
)


class Loop(Protocol):
    """One framework's training loop on one model."""

    what: str

    def run(self, steps: int, *, guarded: bool) -> list[Spent]: ...
    def close(self) -> None: ...


class Clock:
    """Notes the time at the beginning of every step."""

    def __init__(self) -> None:
        self._marks: list[Spent] = []

    def mark(self) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))

    def take(self) -> list[Spent]:
        """How long every step but the last took; that one has no successor."""
        marks, self._marks = self._marks, []
        return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]


def llama(size: Size) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=size.length,
        )
    )


def rows(size: Size, count: int) -> list[dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(1, size.vocabulary, (count, size.length), generator=source)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids
    ]


class TrainerLoop:
    """transformers' Trainer with clipping, a linear schedule and a log line every ten steps."""

    def __init__(self, size: Size, optim: str) -> None:
        self.what = f"transformers Trainer, {optim}"
        self._folder = tempfile.TemporaryDirectory(prefix="stepguard-bench-")
        self._size, self._optim = size, optim
        self._model, self._rows = llama(size), rows(size, 64)

    def run(self, steps: int, *, guarded: bool) -> list[Spent]:
        from transformers import Trainer, TrainerCallback, TrainingArguments
        from transformers.trainer_callback import PrinterCallback

        from stepguard import GuardConfig
        from stepguard.integrations.transformers import guard

        clock = Clock()

        class Mark(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                clock.mark()

        settings = TrainingArguments(
            output_dir=str(Path(self._folder.name)),
            max_steps=steps,
            per_device_train_batch_size=self._size.rows,
            optim=self._optim,
            logging_steps=10,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=1e-5,
        )
        trainer = Trainer(
            model=self._model, args=settings, train_dataset=self._rows, callbacks=[Mark()]
        )
        trainer.remove_callback(PrinterCallback)
        watching: AbstractContextManager[Any] = (
            guard(trainer, GuardConfig(terminal="quiet")) if guarded else nullcontext()
        )
        with watching:
            trainer.train()
        return clock.take()

    def close(self) -> None:
        self._folder.cleanup()


LOOPS: dict[str, Callable[[Size], Loop]] = {
    "trainer": lambda size: TrainerLoop(size, "adamw_torch_fused"),
    "trainer-foreach": lambda size: TrainerLoop(size, "adamw_torch"),
}
