"""What a Trainer does to itself on a bad step, and what a guarded one does: with the real library,
on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

import stepguard
from integrations.trainers import (
    HALTING,
    VOCABULARY,
    WHOLE_STEPS,
    bad_in_checkpoints,
    bad_tensors,
    facts,
    llama,
    logged,
    numbers,
    quiet,
    regression,
    texts,
    trainer,
    words,
)
from stepguard import Guard, Incident, TrainingHalted
from stepguard.integrations.transformers import guard

SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
FP16 = {"optim": "adamw_torch", "learning_rate": 2e-4}
NO_EPSILON = {"optim": "adamw_torch", "adam_epsilon": 0.0}


def train(made: Any) -> TrainingHalted | None:
    try:
        made.train()
    except TrainingHalted as halted:
        return halted
    return None


def origin(incident: Incident) -> Any:
    assert incident.origin is not None
    return incident.origin


# --- a NaN in the data
# ---------------------------------------------------------------------------------------------


def test_a_nan_row_leaves_an_unguarded_trainer_with_nothing_but_nan(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), **SAVING)
    made.train()
    assert bad_tensors(made.model) == 4
    assert bad_in_checkpoints(tmp_path) == {"checkpoint-5": 4, "checkpoint-6": 4}
    assert logged(made, "loss")[2:] == [0.0] * 4  # logging_nan_inf_filter
    assert made.lr_scheduler.last_epoch == 6


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_nan_row_costs_a_guarded_trainer_one_step(tmp_path: Path, optim: str) -> None:
    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), optim=optim, **SAVING)
    with guard(made, quiet()) as watching:
        made.train()
    (incident,) = watching.incidents
    assert incident.step == 2
    assert (origin(incident).phase, origin(incident).tensor, origin(incident).samples) == (
        "input",
        "batch:x",
        (1,),
    )
    assert incident.findings[0].code == "SG101"
    assert bad_tensors(made.model) == 0
    assert bad_in_checkpoints(tmp_path) == {"checkpoint-5": 0, "checkpoint-6": 0}
    assert watching.last_good == tmp_path / "checkpoint-6"
    assert made.lr_scheduler.last_epoch == 5
    losses = logged(made, "loss")
    assert math.isnan(losses[2])
    assert all(math.isfinite(loss) and loss > 0 for i, loss in enumerate(losses) if i != 2)
    assert logged(made, "stepguard/nonfinite") == [None, None, 1, None, None, None]
    assert logged(made, "stepguard/incidents") == [0, 0, 1, 1, 1, 1]


def test_the_schedule_that_is_saved_does_not_count_the_vetoed_step(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, regression(), numbers(24, nan_at=9), save_strategy="steps", save_steps=3
    )
    with guard(made, quiet()):
        made.train()
    saved = torch.load(tmp_path / "checkpoint-3" / "scheduler.pt")
    assert saved["last_epoch"] == 2


# --- the optimizer itself
# ------------------------------------------------------------------------------------------


def test_half_precision_weights_ruin_an_unguarded_trainer_at_its_first_update(
    tmp_path: Path,
) -> None:
    made = trainer(tmp_path, llama().half(), texts(24), **FP16, **SAVING)
    made.train()
    losses, norms = logged(made, "loss"), logged(made, "grad_norm")
    assert losses[0] > 1 and losses[1:] == [0.0] * 5
    assert math.isfinite(norms[0]) and all(math.isnan(norm) for norm in norms[1:])
    assert all(bad > 0 for bad in bad_in_checkpoints(tmp_path).values())


def test_half_precision_weights_are_kept_and_the_epsilon_is_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, llama().half(), texts(24), **FP16, **SAVING)
    with guard(made, quiet(policy=HALTING)) as watching:
        halted = train(made)
    first = watching.incidents[0]
    assert first.step == 0
    assert (origin(first).phase, first.findings[0].code) == ("optimizer", "SG502")
    assert halted is not None and halted.incident == watching.incidents[-1]
    assert bad_tensors(made.model) == 0
    assert set(bad_in_checkpoints(tmp_path).values()) == {0}


def test_an_optimizer_without_epsilon_ruins_an_unguarded_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path, llama(), texts(24), **NO_EPSILON, **SAVING)
    made.train()
    assert bad_tensors(made.model) > 0
    assert all(bad > 0 for bad in bad_in_checkpoints(tmp_path).values())


def test_a_nan_made_by_the_optimizer_is_taken_back_and_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, llama(), texts(24), **NO_EPSILON, **SAVING)
    with guard(made, quiet(policy=HALTING)) as watching:
        assert train(made) is not None
    first = watching.incidents[0]
    assert origin(first).phase == "optimizer"
    assert first.findings[0].code in ("SG502", "SG201")
    assert bad_tensors(made.model) == 0
    assert set(bad_in_checkpoints(tmp_path).values()) == {0}


# --- labels
# --------------------------------------------------------------------------------------------------


def masked_batch(row: int) -> bool:
    return 8 <= row < 12


def test_a_batch_without_labels_looks_like_a_loss_of_zero_in_an_unguarded_log(
    tmp_path: Path,
) -> None:
    made = trainer(tmp_path, llama(), texts(24, lambda row: True))
    made.train()
    assert logged(made, "loss") == [0.0] * 6
    assert logged(made, "grad_norm") == [0.0] * 6


def test_a_batch_without_labels_is_named_and_skipped(tmp_path: Path) -> None:
    made = trainer(tmp_path, llama(), texts(24, masked_batch), **SAVING)
    with guard(made, quiet()) as watching:
        made.train()
    (incident,) = watching.incidents
    assert incident.step == 2
    assert incident.findings[0].code == "SG102"
    assert origin(incident).reproduced
    assert math.isnan(logged(made, "loss")[2])
    assert made.lr_scheduler.last_epoch == 5
    assert bad_tensors(made.model) == 0


def test_the_text_of_a_bad_sample_is_shown_as_its_tokenizer_writes_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A word that no other row has turns the hidden states of its row into NaN."""
    rows = texts(24)
    for row in rows:
        row["input_ids"].clamp_(2, VOCABULARY - 2)
    rows[9]["input_ids"][3] = VOCABULARY - 1
    model = llama()
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output * (30.5 - args[0][..., None].float()).sqrt()
    )
    made = trainer(tmp_path, model, rows, extra={"processing_class": words()})
    with guard(made, quiet(terminal="auto")) as watching:
        made.train()
    hook.remove()
    (incident,) = watching.incidents
    text = " ".join(f"w{number}" for number in rows[9]["input_ids"].tolist())
    assert (incident.step, origin(incident).samples) == (2, (1,))
    assert origin(incident).excerpt == text
    shown = capfd.readouterr().err
    assert "sample 1 = row 9 of the data set" in shown and f'its text: "{text}"' in shown
    assert (origin(incident).op, origin(incident).module) == ("aten.sqrt", "model.embed_tokens")


def test_labels_that_are_all_masked_stop_the_run_instead_of_training_nothing(
    tmp_path: Path,
) -> None:
    made = trainer(tmp_path, llama(), texts(24, lambda row: True))
    before = [p.detach().clone() for p in made.model.parameters()]
    with guard(made, quiet(policy=HALTING)) as watching:
        halted = train(made)
    assert halted is not None
    assert {incident.findings[0].code for incident in watching.incidents} == {"SG102"}
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert made.is_in_train is False


# --- as in a plain loop
# --------------------------------------------------------------------------------------------


class Plain:
    """The loop that a Trainer runs, written out, under `guard.step`."""

    def __init__(self, model: nn.Module, rows: list[Any], **optimizer: Any) -> None:
        self.model = model
        groups = Trainer.get_decay_parameter_names(
            None, model
        )  # the Trainer's two groups, so that names agree
        decayed = [p for n, p in model.named_parameters() if n in groups]
        others = [p for n, p in model.named_parameters() if n not in groups]
        given = [{"params": decayed, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(given, **optimizer)
        self.batches = [
            {key: torch.stack([row[key] for row in rows[i : i + 4]]) for key in rows[0]}
            for i in range(0, len(rows), 4)
        ]
        for batch in self.batches if "input_ids" in rows[0] else ():
            # the Trainer counts before the step, and since 5.23 divides by its one device
            batch["num_items_in_batch"] = batch["labels"][:, 1:].ne(-100).sum() / 1

    def run(self, loss_fn: Any) -> tuple[Incident, ...]:
        torch.manual_seed(0)
        self.model.train()
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: max(0.0, (6 - step) / 6)
        )
        config = quiet(clip_norm=1.0, labels_key="labels", policy=WHOLE_STEPS)
        with Guard(self.model, self.optimizer, scheduler=scheduler, config=config) as plain:
            for batch in self.batches:
                try:
                    plain.step(loss_fn, batch)
                except TrainingHalted:
                    break
            return plain.incidents


def test_a_nan_row_gives_the_incident_of_the_plain_loop(tmp_path: Path) -> None:
    rows = numbers(24, nan_at=9)
    plain = Plain(regression(), rows, lr=1e-2)
    expected = plain.run(lambda batch: plain.model(**batch)["loss"])
    made = trainer(tmp_path, regression(), rows, optim="adamw_torch")
    with guard(made, quiet(policy=WHOLE_STEPS)) as watching:
        made.train()
    assert len(expected) == 1
    (found,) = watching.incidents
    # the Trainer's DataLoader tells the row; the plain loop makes its batches by hand
    assert found.origin is not None and found.origin.rows == ("row 9",)
    found = replace(found, origin=replace(found.origin, rows=()))
    assert [facts(found)] == [facts(i) for i in expected]


def test_an_optimizer_made_nan_gives_the_incident_of_the_plain_loop(tmp_path: Path) -> None:
    rows = texts(24)
    plain = Plain(llama().half(), rows, lr=2e-4)
    expected = plain.run(lambda batch: plain.model(**batch).loss)
    made = trainer(tmp_path, llama().half(), rows, **FP16)
    with guard(made, quiet()) as watching:
        train(made)
    assert len(expected) > 1
    assert [facts(i) for i in watching.incidents] == [facts(i) for i in expected]


def test_a_batch_without_labels_gives_the_incident_of_the_plain_loop(tmp_path: Path) -> None:
    rows = texts(24, masked_batch)
    plain = Plain(llama(), rows, lr=1e-2)
    expected = plain.run(lambda batch: plain.model(**batch).loss)
    made = trainer(tmp_path, llama(), rows, optim="adamw_torch")
    with guard(made, quiet()) as watching:
        made.train()
    assert len(expected) == 1
    # in the library both times; the line of the user's that led there is another one
    found = [_of_the_library(i) for i in watching.incidents]
    assert found == [_of_the_library(i) for i in expected]


def _of_the_library(incident: Incident) -> dict[str, Any]:
    assert incident.origin is not None and incident.origin.library is not None
    own = {"source": None, "context": (), "statement": None, "rows": ()}
    return facts(replace(incident, origin=replace(incident.origin, **own)))


def test_a_halt_leaves_the_trainer_and_its_loggers_finished(tmp_path: Path) -> None:
    ended: list[str] = []

    class Ended(stepguard.integrations.transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            ended.append("on_train_end")

    made = trainer(tmp_path, llama(), texts(24, lambda row: True), extra={"callbacks": [Ended()]})
    with guard(made, quiet(policy=HALTING)), pytest.raises(TrainingHalted, match="step 3"):
        made.train()
    assert ended == ["on_train_end"]
    assert all(p.grad is None for p in made.model.parameters())
