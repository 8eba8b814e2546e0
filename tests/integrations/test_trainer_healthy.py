"""A healthy Trainer is the same with and without a guard: losses, weights, optimizer state and
random numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.trainer_callback import PrinterCallback

from integrations.trainers import (
    VOCABULARY,
    arguments,
    bad_tensors,
    llama,
    logged,
    quiet,
    regression,
    texts,
    trainer,
)
from stepguard.integrations.transformers import guard


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func`."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def lora() -> Any:
    torch.manual_seed(0)
    made = get_peft_model(
        llama(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    )
    made.enable_input_require_grads()
    return made


def t5() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )


PLAIN: dict[str, Any] = {}
SETTINGS = {
    "llama": (llama, PLAIN, PLAIN),
    "accumulation": (llama, {"gradient_accumulation_steps": 2, "max_steps": 3}, PLAIN),
    "bf16": (llama, {"bf16": True}, PLAIN),
    "checkpointing": (llama, {"gradient_checkpointing": True}, PLAIN),
    "foreach without clipping": (llama, {"optim": "adamw_torch", "max_grad_norm": 0.0}, PLAIN),
    "loss function": (llama, PLAIN, {"compute_loss_func": summed}),
    "label smoothing": (llama, {"label_smoothing_factor": 0.1}, PLAIN),
    "lora": (lora, {"gradient_checkpointing": True, "bf16": True}, PLAIN),
    "half weights": (lambda: llama().half(), {"adam_epsilon": 1e-4, "learning_rate": 1e-4}, PLAIN),
}


def outcome(made: Any, guarded: bool) -> Any:
    with guard(made, quiet()) if guarded else nullcontext() as watching:
        made.train()
    if guarded:
        assert watching.incidents == ()
    state = made.optimizer.state_dict()["state"]
    moments = [state[p][slot] for p in state for slot in state[p]]
    return (
        logged(made, "loss"),
        logged(made, "grad_norm"),
        [*made.model.parameters(), *moments, torch.get_rng_state()],
    )


def same(one: Any, other: Any) -> None:
    assert one[:2] == other[:2]
    assert len(one[2]) == len(other[2])
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_guarded_healthy_run_is_bit_identical(tmp_path: Path, name: str) -> None:
    model, settings, extra = SETTINGS[name]
    runs = [
        outcome(trainer(tmp_path, model(), texts(24), extra=extra, **settings), guarded)
        for guarded in (False, True)
    ]
    assert all(loss > 0 for loss in runs[0][0])
    same(*runs)


def test_a_guarded_healthy_seq2seq_run_is_bit_identical(tmp_path: Path) -> None:
    runs = []
    for guarded in (False, True):
        rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in texts(24)]
        made = Seq2SeqTrainer(
            model=t5(), args=Seq2SeqTrainingArguments(**arguments(tmp_path)), train_dataset=rows
        )
        made.remove_callback(PrinterCallback)
        runs.append(outcome(made, guarded))
    same(*runs)


def test_dropout_draws_the_same_numbers_under_a_guard(tmp_path: Path) -> None:
    from integrations.trainers import numbers

    same(
        *[
            outcome(trainer(tmp_path, regression(), numbers(24)), guarded)
            for guarded in (False, True)
        ]
    )


def test_a_guarded_run_resumes_where_an_unguarded_one_would(tmp_path: Path) -> None:
    """Save at step 3, go on in a new Trainer: the same weights as without a break, and steps that
    count on.
    """
    whole = trainer(tmp_path / "whole", llama(), texts(24))
    whole.train()
    first = trainer(tmp_path / "broken", llama(), texts(24), save_strategy="steps", save_steps=3)
    with guard(first, quiet()):
        first.train()
    second = trainer(
        tmp_path / "broken", llama(), texts(24, lambda row: row == 20), save_strategy="no"
    )
    rows = second.train_dataset
    for row in range(20, 24):
        rows[row]["labels"][:] = -100
    with guard(second, quiet()) as watching:
        second.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-3"))
        assert watching.last_good == tmp_path / "broken" / "checkpoint-3"
    assert [incident.step for incident in watching.incidents] == [5]
    third = trainer(tmp_path / "broken", llama(), texts(24))
    with guard(third, quiet()) as watching:
        third.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-3"))
    assert watching.incidents == ()
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.parameters(), third.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["accumulation", "checkpointing", "loss function", "lora", "bf16"])
def test_a_bad_batch_is_placed_in_every_way_of_running_a_step(tmp_path: Path, name: str) -> None:
    model, settings, extra = SETTINGS[name]
    rows = texts(24, lambda row: 8 <= row < 16)
    made = trainer(tmp_path, model(), rows, extra=extra, **settings)
    with guard(made, quiet()) as watching:
        made.train()
    assert watching.incidents
    for incident in watching.incidents:
        assert incident.origin is not None and incident.origin.reproduced
        assert incident.findings[0].code == "SG102"
    assert bad_tensors(made.model) == 0
