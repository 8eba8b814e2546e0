"""What the tests of transformers and accelerate share: tiny models, fixed data, a Trainer that is
quick and quiet.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from settings_of import changed
from stepguard import GuardConfig, Incident, Policy
from stepguard.records.codec import dumps, to_plain

transformers.logging.set_verbosity_error()
tqdm.monitor_interval = 0  # no thread of its own

QUIET = GuardConfig(terminal="quiet")
HALTING = Policy(max_consecutive=3)
"""Bad steps are left out for long by themselves; with this a run of a few steps shows a halt."""
WHOLE_STEPS = Policy(actions=("retry", "skip", "rewind", "stop"))
"""Only `guard.step` can leave out a part of a step; without that it decides as a framework's guard
does.
"""
FEATURES, VOCABULARY, LENGTH = 4, 32, 8
Row = dict[str, Tensor]


def quiet(**settings: Any) -> GuardConfig:
    return changed(QUIET, **settings)


class Regression(nn.Module):
    """What a Trainer takes besides its own models: floats in, a dict with a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.outer(self.drop(torch.relu(self.inner(x)))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def regression() -> Regression:
    torch.manual_seed(0)
    return Regression()


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    return LlamaForCausalLM(config)


def numbers(count: int, *, nan_at: int | None = None) -> list[Row]:
    """Rows for `Regression`; one of them may hold a NaN."""
    source = torch.Generator().manual_seed(1)
    rows = [
        {"x": torch.randn(FEATURES, generator=source), "labels": torch.randn((), generator=source)}
        for _ in range(count)
    ]
    if nan_at is not None:
        rows[nan_at]["x"][1] = math.nan
    return rows


def texts(count: int, masked: Callable[[int], bool] = lambda row: False) -> list[Row]:
    """Rows for `llama`; those that are masked have no label that counts."""
    source = torch.Generator().manual_seed(2)
    rows = []
    for row in range(count):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=source)
        labels = torch.full_like(ids, -100) if masked(row) else ids.clone()
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def words() -> PreTrainedTokenizerFast:
    """One word a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", eos_token="w1", unk_token="w0"
    )


def arguments(folder: Path, **settings: Any) -> dict[str, Any]:
    """Few steps, in the order of the rows, every step logged."""
    given = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "sequential",
    }
    return {**given, **settings}


def trainer(
    folder: Path,
    model: nn.Module,
    rows: list[Row],
    *,
    kind: Any = Trainer,
    extra: Any = None,
    **settings: Any,
) -> Any:
    """A Trainer that prints nothing."""
    made = kind(
        model=model,
        args=TrainingArguments(**arguments(folder, **settings)),
        train_dataset=rows,
        **(extra or {}),
    )
    made.remove_callback(PrinterCallback)
    return made


def bad_tensors(module: nn.Module) -> int:
    return sum(
        not bool(torch.isfinite(p).all())
        for p in module.state_dict().values()
        if p.is_floating_point()
    )


def bad_in_checkpoints(folder: Path) -> dict[str, int]:
    """Non-finite tensors in each checkpoint of a run, by its name."""
    found = {}
    for path in sorted(
        folder.glob("checkpoint-*/model.safetensors"),
        key=lambda p: int(p.parent.name.split("-")[1]),
    ):
        found[path.parent.name] = sum(
            not bool(torch.isfinite(t).all()) for t in load_file(path).values()
        )
    return found


def logged(made: Any, key: str) -> list[Any]:
    """What every training log line says."""
    return [line.get(key) for line in made.state.log_history if "loss" in line]


def facts(incident: Incident) -> dict[str, Any]:
    """What must not depend on who runs the loop."""
    return {
        "id": incident.id,
        "verdict": incident.verdict.kind,
        "origin": dumps(to_plain(incident.origin)),  # a NaN among its numbers equals nothing
        "codes": [finding.code for finding in incident.findings],
        "decision": incident.decision,
        "bad_grads": incident.reading.bad_grads,
        "bad_inputs": incident.reading.bad_inputs,
        "bad_state": incident.reading.bad_state,
    }


@contextmanager
def same_environment() -> Iterator[None]:
    """accelerate leaves variables behind; its own next Accelerator would read them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def journal_lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(text)
        for path in folder.glob("journal*.jsonl")
        for text in path.read_text().splitlines()
    ]
