"""trl's SFTTrainer, which overrides training_step, compute_loss and log, under a guard."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from integrations.trainers import arguments, bad_tensors, llama, logged, quiet, texts, words
from stepguard.integrations.transformers import guard

disable_progress_bars()
# trl's own imports and trainers warn of what they will change one day
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def sft(folder: Path, **settings: Any) -> SFTTrainer:
    rows = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in texts(24)]})
    made = SFTTrainer(
        model=llama(),
        args=SFTConfig(**arguments(folder, **settings), bf16=False, gradient_checkpointing=False),
        train_dataset=rows,
        processing_class=words(),
    )
    made.remove_callback(PrinterCallback)
    return made


def test_a_guarded_healthy_sft_run_is_bit_identical(tmp_path: Path) -> None:
    seen = []
    for guarded in (False, True):
        made = sft(tmp_path)
        with guard(made, quiet()) if guarded else nullcontext() as watching:
            made.train()
        if guarded:
            assert watching.incidents == ()
        metrics = [
            logged(made, key)
            for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
        ]
        seen.append((metrics, [p.detach().clone() for p in made.model.parameters()]))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1], seen[1][1], strict=True))


def test_a_bad_sft_step_is_placed_and_its_replay_leaves_the_metrics_alone(tmp_path: Path) -> None:
    made = sft(tmp_path)
    scaled = made.model.model.norm.register_forward_hook(  # the third step's hidden states overflow
        lambda module, args, output: (
            torch.sqrt(-1 - output.abs()) if made.state.global_step == 2 else None
        )
    )
    with guard(made, quiet()) as watching:
        made.train()
    scaled.remove()
    (incident,) = watching.incidents
    assert incident.step == 2
    assert incident.origin is not None and incident.origin.reproduced
    assert incident.origin.op == "aten.sqrt"
    assert bad_tensors(made.model) == 0
    assert logged(made, "num_tokens") == [32.0 * (step + 1) for step in range(6)]
