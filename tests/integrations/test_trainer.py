"""A Trainer of transformers under a guard, with the real library on a CPU.

A healthy run is the same bit for bit, a bad step is vetoed and named, a bad state is not saved, and
`close` undoes everything.
"""

from __future__ import annotations

import math
import runpy
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

import forked
import stepguard
from integrations.trainers import (
    HALTING,
    VOCABULARY,
    WHOLE_STEPS,
    arguments,
    bad_in_checkpoints,
    bad_tensors,
    facts,
    journal_lines,
    llama,
    logged,
    numbers,
    quiet,
    regression,
    texts,
    trainer,
    words,
)
from settings_of import config_of
from stepguard import ConfigError, Guard, Incident, SaveRefused, TrainingHalted
from stepguard.engine.context import guarded
from stepguard.integrations.transformers import TrueLoss, correct, guard, to_delete

disable_progress_bars()
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
FP16 = {"optim": "adamw_torch", "learning_rate": 2e-4}
NO_EPSILON = {"optim": "adamw_torch", "adam_epsilon": 0.0}
# trl's own imports and trainers warn of what they will change one day
TRL_WARNS = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def train(made: Any) -> TrainingHalted | None:
    try:
        made.train()
    except TrainingHalted as halted:
        return halted
    return None


def origin(incident: Incident) -> Any:
    assert incident.origin is not None
    return incident.origin


def masked_batch(row: int) -> bool:
    return 8 <= row < 12


def all_masked(row: int) -> bool:
    return True


# --- healthy runs
# --------------------------------------------------------------------------------------------------


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func`."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def lora() -> Any:
    torch.manual_seed(0)
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    made = get_peft_model(llama(), adapters)
    made.enable_input_require_grads()
    return made


def seq2seq(folder: Path, settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    made = Seq2SeqTrainer(
        model=T5ForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(**arguments(folder, **settings)),
        train_dataset=[{key: row[key] for key in ("input_ids", "labels")} for row in texts(24)],
    )
    made.remove_callback(PrinterCallback)
    return made


def sft(folder: Path, settings: Any) -> SFTTrainer:
    rows = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in texts(24)]})
    made = SFTTrainer(
        model=llama(),
        args=SFTConfig(**arguments(folder, **settings), bf16=False, gradient_checkpointing=False),
        train_dataset=rows,
        processing_class=words(),
    )
    made.remove_callback(PrinterCallback)
    return made


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
    "dropout": (regression, PLAIN, PLAIN),
    "seq2seq": (seq2seq, PLAIN, PLAIN),
    "sft": (sft, PLAIN, PLAIN),
}


def made_for(folder: Path, name: str) -> Any:
    model, settings, extra = SETTINGS[name]
    if model in (seq2seq, sft):
        return model(folder, settings)
    rows = numbers(24) if model is regression else texts(24)
    return trainer(folder, model(), rows, extra=extra, **settings)


@TRL_WARNS
@pytest.mark.parametrize("name", SETTINGS)
def test_a_guarded_healthy_run_is_bit_identical(tmp_path: Path, name: str) -> None:
    runs = []
    for with_guard in (False, True):
        made = made_for(tmp_path, name)
        with guard(made, quiet()) if with_guard else nullcontext() as watching:
            made.train()
        state = made.optimizer.state_dict()["state"]
        moments = [state[p][slot] for p in state for slot in state[p]]
        keys = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
        tensors = [*made.model.parameters(), *moments, torch.get_rng_state()]
        runs.append(([logged(made, key) for key in keys], tensors))
    assert watching is not None and watching.incidents == () and watching.refused_saves == 0
    assert set(logged(made, "stepguard/incidents")) == {0}
    assert all(loss > 0 for loss in runs[0][0][0])
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_a_guarded_run_resumes_where_an_unguarded_one_would(tmp_path: Path) -> None:
    """Save at step 3, go on in a new Trainer: the same weights as without a break, and steps that
    count on.
    """
    whole = trainer(tmp_path / "whole", llama(), texts(24))
    whole.train()
    first = trainer(tmp_path / "broken", llama(), texts(24), save_strategy="steps", save_steps=3)
    with guard(first, quiet()):
        first.train()
    checkpoint = tmp_path / "broken" / "checkpoint-3"
    second = trainer(tmp_path / "broken", llama(), texts(24, lambda row: row >= 20))
    with guard(second, quiet()) as watching:
        second.train(resume_from_checkpoint=str(checkpoint))
        assert watching.last_good == checkpoint
    assert [incident.step for incident in watching.incidents] == [5]
    third = trainer(tmp_path / "broken", llama(), texts(24))
    with guard(third, quiet()) as watching:
        third.train(resume_from_checkpoint=str(checkpoint))
    assert watching.incidents == ()
    pairs = zip(whole.model.parameters(), third.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# --- bad steps
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["accumulation", "checkpointing", "loss function", "lora", "bf16"])
def test_a_bad_batch_is_placed_in_every_way_of_running_a_step(tmp_path: Path, name: str) -> None:
    model, settings, extra = SETTINGS[name]
    rows = texts(24, lambda row: 8 <= row < 16)
    made = trainer(tmp_path, model(), rows, extra=extra, **settings)
    with guard(made, quiet()) as watching:
        made.train()
    assert watching.incidents
    for incident in watching.incidents:
        assert origin(incident).reproduced
        assert incident.findings[0].code == "SG102"
    assert bad_tensors(made.model) == 0


def test_a_nan_row_leaves_an_unguarded_trainer_with_nothing_but_nan(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), **SAVING)
    made.train()
    assert bad_tensors(made.model) == 4
    assert bad_in_checkpoints(tmp_path) == {"checkpoint-5": 4, "checkpoint-6": 4}
    assert logged(made, "loss")[2:] == [0.0] * 4  # logging_nan_inf_filter
    assert made.lr_scheduler.last_epoch == 6


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_nan_row_costs_a_guarded_trainer_one_step(tmp_path: Path, optim: str) -> None:
    settings = {"optim": optim, "report_to": "tensorboard", **SAVING, "save_total_limit": None}
    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), **settings)
    with guard(made, quiet()) as watching:
        made.train()
    (incident,) = watching.incidents
    found = origin(incident)
    assert (incident.step, incident.findings[0].code) == (2, "SG101")
    assert (found.phase, found.tensor, found.samples) == ("input", "batch:x", (1,))
    assert bad_tensors(made.model) == 0
    assert set(bad_in_checkpoints(tmp_path).values()) == {0}
    assert watching.last_good == tmp_path / "checkpoint-6"
    # neither the schedule nor what is saved of it counts the vetoed step
    assert made.lr_scheduler.last_epoch == 5
    assert torch.load(tmp_path / "checkpoint-3" / "scheduler.pt")["last_epoch"] == 2
    losses = logged(made, "loss")
    assert math.isnan(losses[2])
    assert all(math.isfinite(loss) and loss > 0 for i, loss in enumerate(losses) if i != 2)
    assert logged(made, "stepguard/nonfinite") == [None, None, 1, None, None, None]
    assert logged(made, "stepguard/incidents") == [0, 0, 1, 1, 1, 1]
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert [step for step in shown if math.isnan(shown[step])] == [3]
    assert {e.step: e.value for e in events.Scalars("train/stepguard/nonfinite")} == {3: 1.0}


OPTIMIZER_FAULTS = {
    "half weights": (lambda: llama().half(), FP16),
    "no epsilon": (llama, NO_EPSILON),
}


@pytest.mark.parametrize("name", OPTIMIZER_FAULTS)
def test_a_nan_made_by_the_optimizer_ruins_an_unguarded_trainer_at_its_first_update(
    tmp_path: Path, name: str
) -> None:
    model, settings = OPTIMIZER_FAULTS[name]
    made = trainer(tmp_path, model(), texts(24), **settings, **SAVING)
    made.train()
    losses, norms = logged(made, "loss"), logged(made, "grad_norm")
    assert losses[0] > 1 and losses[1:] == [0.0] * 5
    assert math.isfinite(norms[0]) and all(math.isnan(norm) for norm in norms[1:])
    assert all(bad > 0 for bad in bad_in_checkpoints(tmp_path).values())


@pytest.mark.parametrize("name", OPTIMIZER_FAULTS)
def test_a_nan_made_by_the_optimizer_is_taken_back_and_the_epsilon_is_named(
    tmp_path: Path, name: str
) -> None:
    model, settings = OPTIMIZER_FAULTS[name]
    made = trainer(tmp_path, model(), texts(24), **settings, **SAVING)
    with guard(made, quiet(policy=HALTING)) as watching:
        halted = train(made)
    first = watching.incidents[0]
    assert first.step == 0
    assert (origin(first).phase, first.findings[0].code) == ("optimizer", "SG502")
    assert halted is not None and halted.incident == watching.incidents[-1]
    assert bad_tensors(made.model) == 0
    assert set(bad_in_checkpoints(tmp_path).values()) == {0}


def test_a_batch_without_labels_looks_like_a_loss_of_zero_in_an_unguarded_log(
    tmp_path: Path,
) -> None:
    made = trainer(tmp_path, llama(), texts(24, all_masked))
    made.train()
    assert logged(made, "loss") == [0.0] * 6
    assert logged(made, "grad_norm") == [0.0] * 6


def test_a_batch_without_labels_is_named_and_skipped(tmp_path: Path) -> None:
    made = trainer(tmp_path, llama(), texts(24, masked_batch), **SAVING)
    with guard(made, quiet()) as watching:
        made.train()
    (incident,) = watching.incidents
    assert (incident.step, incident.findings[0].code) == (2, "SG102")
    assert origin(incident).reproduced
    assert math.isnan(logged(made, "loss")[2])
    assert made.lr_scheduler.last_epoch == 5
    assert bad_tensors(made.model) == 0


def test_labels_that_are_all_masked_stop_the_run_instead_of_training_nothing(
    tmp_path: Path,
) -> None:
    ended: list[str] = []

    class Ended(TrainerCallback):
        """As loggers finish their run."""

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            ended.append("on_train_end")

    made = trainer(tmp_path, llama(), texts(24, all_masked), extra={"callbacks": [Ended()]})
    before = [p.detach().clone() for p in made.model.parameters()]
    with (
        guard(made, quiet(policy=HALTING)) as watching,
        pytest.raises(TrainingHalted, match="step 3"),
    ):
        made.train()
    assert {incident.findings[0].code for incident in watching.incidents} == {"SG102"}
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert made.is_in_train is False and ended == ["on_train_end"]
    assert all(p.grad is None for p in made.model.parameters())


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


@TRL_WARNS
def test_a_bad_sft_step_is_placed_and_its_replay_leaves_the_metrics_alone(tmp_path: Path) -> None:
    """trl's SFTTrainer overrides training_step, compute_loss and log."""
    made = sft(tmp_path, {})
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
    assert origin(incident).reproduced and origin(incident).op == "aten.sqrt"
    assert bad_tensors(made.model) == 0
    assert logged(made, "num_tokens") == [32.0 * (step + 1) for step in range(6)]


def in_a_plain_loop(model: nn.Module, rows: list[Any], **optimizer: Any) -> tuple[Incident, ...]:
    """What `guard.step` finds in the loop that a Trainer runs, written out."""
    names = Trainer.get_decay_parameter_names(None, model)
    decayed = [p for n, p in model.named_parameters() if n in names]
    others = [p for n, p in model.named_parameters() if n not in names]
    # the Trainer's two groups, so that names agree
    given = [{"params": decayed, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
    made = torch.optim.AdamW(given, **optimizer)
    batches = [
        {key: torch.stack([row[key] for row in rows[i : i + 4]]) for key in rows[0]}
        for i in range(0, len(rows), 4)
    ]
    for batch in batches if "input_ids" in rows[0] else ():
        # the Trainer counts before the step, and since 5.23 divides by its one device
        batch["num_items_in_batch"] = batch["labels"][:, 1:].ne(-100).sum() / 1
    torch.manual_seed(0)
    model.train()
    rates = torch.optim.lr_scheduler.LambdaLR(made, lambda step: max(0.0, (6 - step) / 6))
    config = quiet(clip_norm=1.0, labels_key="labels", policy=WHOLE_STEPS)
    with Guard(model, made, scheduler=rates, config=config) as plain:
        try:
            for batch in batches:
                plain.step(lambda given: model(**given)["loss"], batch)
        except TrainingHalted:
            pass
        return plain.incidents


SAME_INCIDENTS: dict[str, tuple[Any, ...]] = {
    "nan row": (regression, numbers(24, nan_at=9), {"optim": "adamw_torch"}, 1),
    "half weights": (lambda: llama().half(), texts(24), FP16, 2),
    "no labels": (llama, texts(24, masked_batch), {"optim": "adamw_torch"}, 1),
}


@pytest.mark.parametrize("name", SAME_INCIDENTS)
def test_a_bad_step_gives_the_incident_of_the_plain_loop(tmp_path: Path, name: str) -> None:
    model, rows, settings, least = SAME_INCIDENTS[name]
    expected = in_a_plain_loop(model(), rows, lr=settings.get("learning_rate", 1e-2))
    made = trainer(tmp_path, model(), rows, **settings)
    with guard(made, quiet(policy=WHOLE_STEPS)) as watching:
        train(made)
    assert len(expected) >= least
    if name == "nan row":
        # the Trainer's DataLoader tells the row; the plain loop makes its batches by hand
        assert origin(watching.incidents[0]).rows == ("row 9",)
    own: dict[str, Any] = {"rows": ()}
    if name == "no labels":
        # in the library both times; the line of the user's that led there is another one
        assert origin(expected[0]).library is not None
        own |= {"source": None, "context": (), "statement": None}
    found = [
        [facts(replace(i, origin=replace(origin(i), **own))) for i in incidents]
        for incidents in (watching.incidents, expected)
    ]
    assert found[0] == found[1]


# --- saves
# --------------------------------------------------------------------------------------------------


class Spoil(TrainerCallback):
    """Writes into a weight after one step, unseen by the guard."""

    def __init__(self, at: int, value: float = math.nan) -> None:
        self._at, self._value = at, value

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at:
            with torch.no_grad():
                kwargs["model"].outer.bias.fill_(self._value)


def test_a_checkpoint_of_a_bad_state_is_refused_and_said(tmp_path: Path) -> None:
    def spoiled(folder: Path) -> Any:
        extra = {"callbacks": [Spoil(3)]}
        return trainer(folder, regression(), numbers(24), extra=extra, max_steps=3, **SAVING)

    spoiled(tmp_path / "unguarded").train()
    assert bad_in_checkpoints(tmp_path / "unguarded") == {"checkpoint-2": 0, "checkpoint-3": 1}
    made = spoiled(tmp_path / "out")
    with guard(made, quiet(run_dir=tmp_path / "run")) as watching:
        made.train()
        assert watching.refused_saves == 1
    assert bad_in_checkpoints(tmp_path / "out") == {"checkpoint-1": 0, "checkpoint-2": 0}
    assert watching.last_good == tmp_path / "out" / "checkpoint-2"
    lines = journal_lines(tmp_path / "run")
    (said,) = [line["summary"] for line in lines if line.get("kind") == "save-refused"]
    assert "checkpoint-3" in said and "param:outer.bias" in said


def test_save_model_of_a_bad_state_raises_and_writes_nothing(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(24), max_steps=2)
    with guard(made, quiet()) as watching:
        weight = made.model.inner.weight.data
        before, weight[0, 0] = weight[0, 0].clone(), math.inf  # before any training
        with pytest.raises(SaveRefused, match=r"param:inner\.weight"):
            made.save_model(str(tmp_path / "bad"))
        weight[0, 0] = before
        made.train()
        made.save_model(str(tmp_path / "good"))
        made.model.outer.bias.data.fill_(math.nan)
        with pytest.raises(SaveRefused, match=r"param:outer\.bias.*last good"):
            made.save_model(str(tmp_path / "bad"))
        assert watching.refused_saves == 2
    assert (tmp_path / "good" / "model.safetensors").is_file()
    assert not (tmp_path / "bad").exists()
    made.save_model(str(tmp_path / "bad"))  # the guard is closed: the user's word counts
    assert (tmp_path / "bad").exists()


@pytest.mark.parametrize("limit", [1, 2])
def test_rotation_keeps_the_last_good_checkpoint_where_the_newest_is_ruined(
    tmp_path: Path, limit: int
) -> None:
    """Finite weights that have lost everything are saved before any step has tried them. Nothing is
    done about them unless that was asked for, so that the run goes on with them and saves them
    again.
    """
    saving = {"save_strategy": "steps", "save_steps": 6, "save_total_limit": limit}
    settings = {"max_steps": 36, "learning_rate": 1e-3, "extra": {"callbacks": [Spoil(24, 1e4)]}}
    made = trainer(tmp_path, regression(), numbers(24), **settings, **saving)
    with guard(made, quiet(snapshots=0)) as watching:  # nothing to repair it from
        made.train()
    assert list(bad_in_checkpoints(tmp_path)) == ["checkpoint-18", "checkpoint-36"]
    assert watching.last_good == tmp_path / "checkpoint-18"


def test_rotation_keeps_the_checkpoint_a_run_was_resumed_from_until_there_is_a_better_one(
    tmp_path: Path,
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, llama(), texts(24), **saving, max_steps=2).train()
    made = trainer(tmp_path, llama(), texts(24), **saving, save_total_limit=1, max_steps=4)
    with guard(made, quiet()) as watching:
        made.train(resume_from_checkpoint=True)
    assert watching.last_good == tmp_path / "checkpoint-4"
    # the newest is not proven yet
    assert list(bad_in_checkpoints(tmp_path)) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(
    ("keep", "protected", "deleted"),
    [
        (4, "", []),
        (2, "", ["a", "b"]),
        (1, "", ["a", "b", "c"]),
        (1, "b", ["a", "c"]),
        (2, "a", ["b", "c"]),
        (3, "a", ["b"]),
        (1, "ab", ["c"]),
        (3, "x", ["a"]),
    ],
)
def test_oldest_go_but_never_the_newest_or_a_protected_one(
    keep: int, protected: str, deleted: list[str]
) -> None:
    assert to_delete(["a", "b", "c", "d"], keep, {Path(name) for name in protected}) == deleted


def test_refusal_names_a_few_tensors_and_the_way_out() -> None:
    said = str(SaveRefused("checkpoint-5", [f"param:{i}" for i in range(5)]))
    assert said.startswith("refused to save checkpoint-5: non-finite stored tensors: 5")
    assert "(param:0, param:1, param:2, ...)" in said
    assert "load the last good checkpoint" in said


# --- the log
# --------------------------------------------------------------------------------------------------


def test_one_nan_does_not_stay_in_the_log_where_the_filter_is_off(tmp_path: Path) -> None:
    def is_nan(context: Any) -> list[bool]:
        settings = {"logging_nan_inf_filter": False, "optim": "sgd", "learning_rate": 0.0}
        made = trainer(tmp_path, regression(), numbers(24, nan_at=9), **settings)
        with context(made):
            made.train()
        return [math.isnan(loss) for loss in logged(made, "loss")]

    assert is_nan(nullcontext) == [False, False, True, True, True, True]
    assert is_nan(lambda made: guard(made, quiet())) == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("losses", "steps", "elsewhere", "finite"),
    [([1.0, math.nan, 2.0, 3.0], 2, 0, 4.0), ([1.0, 1.0], 2, 1, 1.0)],
    ids=["window of several steps", "only another rank saw it"],
)
def test_a_nan_in_the_log_has_a_finite_companion(
    losses: list[float], steps: int, elsewhere: int, finite: float
) -> None:
    logs: dict[str, Any] = {"loss": 0.75, "grad_norm": 1.0}
    correct(logs, losses, steps=steps, bad_elsewhere=elsewhere)
    assert math.isnan(logs["loss"])
    assert (logs["stepguard/nonfinite"], logs["stepguard/loss_finite"]) == (1, finite)


def test_a_healthy_line_stays_as_it_is() -> None:
    logs: dict[str, Any] = {"loss": 0.123456789, "grad_norm": 1.0}
    correct(logs, [0.2, 0.1], steps=1, bad_elsewhere=0)
    assert logs == {"loss": 0.123456789, "grad_norm": 1.0}


def test_many_losses_between_two_log_lines_are_all_counted() -> None:
    losses = TrueLoss()
    for value in range(1100):
        losses.add(torch.tensor(float(value)))
    assert losses.take() == [float(value) for value in range(1100)]
    assert losses.take() == []


# --- settings, wraps and their undoing, scripts
# --------------------------------------------------------------------------------------------------


def test_close_gives_back_the_trainer_as_it_was(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(8), max_steps=2)
    before, callbacks = dict(vars(made)), list(made.callback_handler.callbacks)
    watching = guard(made, quiet())
    assert "training_step" in vars(made)
    with pytest.raises(ConfigError, match="has a guard already"):
        guard(made, quiet())
    watching.close()
    watching.close()
    assert vars(made).keys() == before.keys()
    assert made.callback_handler.callbacks == callbacks
    with guard(made, quiet()):
        made.train()
        inner = made.optimizer.optimizer
        assert inner not in guarded
        assert not inner._optimizer_step_pre_hooks and not inner._optimizer_step_post_hooks
        assert not made.model._forward_pre_hooks and not made.model._forward_hooks
        assert "_compiled_call_impl" not in vars(made.model)
    assert made.optimizer._is_overflow is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.5}, r"max_grad_norm=0\.5"),
        ({"loss_scale": 8.0}, "loss_scale=8.0 is for guard.step"),
    ],
)
def test_settings_that_belong_to_the_trainer_are_refused(
    tmp_path: Path, settings: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        guard(trainer(tmp_path, regression(), numbers(8)), config_of(**settings))


def test_what_is_not_a_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got a Regression; give a transformers\.Trainer"):
        guard(regression())  # type: ignore[arg-type]


def test_a_training_step_of_the_users_own_class_is_replayed_too(tmp_path: Path) -> None:
    class Direct(Trainer):
        """Calls backward by itself."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = model(**self._prepare_inputs(inputs))["loss"]
            (loss * 3).backward()
            return loss.detach()

    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), kind=Direct)
    with guard(made, quiet()) as watching:
        made.train()
    (incident,) = watching.incidents
    assert (origin(incident).tensor, origin(incident).samples) == ("batch:x", (1,))


def test_user_errors_pass_through_and_incidents_of_several_runs_are_kept(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        calls = 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the user's own")

    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), extra={"callbacks": [Once()]})
    with guard(made, quiet()) as watching:
        with pytest.raises(RuntimeError, match="the user's own"):
            made.train()
        made.train()
        made.train()
        assert [incident.step for incident in watching.incidents] == [2, 2]
    assert [incident.step for incident in watching.incidents] == [2, 2]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from integrations.trainers import llama, quiet, texts, trainer
from stepguard.integrations.transformers import guard

made = trainer(Path("out"), llama(), texts(16, lambda row: 8 <= row < 12), max_steps=4)
with guard(made, quiet(run_dir="run")) as watching:
    made.train()
print("incidents", len(watching.incidents))
"""


def test_a_capsule_of_a_trainer_is_run_again_with_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    path = list(sys.path)
    runpy.run_path("train.py", run_name="__main__")
    (capsule,) = (tmp_path / "run" / "incidents").glob("*/capsule")
    incident = stepguard.replay(str(capsule), script="train.py")
    sys.path[:] = path
    assert origin(incident).reproduced
    assert (incident.step, incident.findings[0].code) == (2, "SG102")


def test_stepguard_run_does_not_guard_a_guarded_trainer_twice(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    command = ["-m", "stepguard", "run", "--run-dir", "other", "train.py"]
    ran = forked.python(command, folder=tmp_path, seconds=200)
    assert ran.returncode == 0, ran.stderr
    assert "incidents 1" in ran.stdout
    own, other = (journal_lines(tmp_path / name) for name in ("run", "other"))
    assert len([line for line in own if line.get("type") == "incident"]) == 1
    assert [line for line in other if line.get("type") in ("incident", "step")] == []
