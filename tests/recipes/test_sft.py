"""Fine-tuning: every setting has an effect, runs resume exactly, bad states are not kept, cut
answers are refused.
"""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe_process import TINY
from stepguard.check.settings import unread

SMALL = TINY["sft"].split()
HALF = ("model.torch_dtype=float16", "lora.autocast_adapter_dtype=False", "args.optim=adamw_torch")


def settings(folder: Path, results: Path, *overrides: str) -> Any:
    from homework.settings import load_config

    own = (f"args.output_dir={results}", f"model.cache={results}")
    return load_config(folder / "configs" / "train.yaml", (*SMALL, *own, *overrides))


def made(folder: Path, results: Path, *overrides: str) -> Any:
    from homework.sft import Run

    return Run(settings(folder, results, *overrides), bar=False)


def adapters(results: Path, name: str = "checkpoint-6") -> dict[str, torch.Tensor]:
    return load_file(results / name / "adapter_model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_key_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from homework.sft import train_model

    trained = train_model(settings(folder, tmp_path))

    assert set(unread(trained.config)) <= {"data.folder"}  # taken only with data.name=real
    said = capsys.readouterr().out
    assert "Configuration is properly aligned" in said
    assert "{'loss': 4." in said and "'grad_norm': " in said and "'learning_rate': " in said
    assert "saved " in said
    assert math.isfinite(trained.scores(ask=False).loss)


def test_the_two_files_of_settings_have_the_same_keys(folder: Path) -> None:
    from homework.settings import load_config

    toy, real = (load_config(folder / "configs" / name) for name in ("train.yaml", "real.yaml"))
    for part in toy:
        if part not in ("model", "resume"):
            assert list(toy[part]) == list(real[part])
    assert set(real["model"]) <= set(toy["model"])


def test_an_unknown_key_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"args\.lr"):
        settings(folder, tmp_path, "args.lr=1")
    with pytest.raises(SystemExit, match=r"guard\.mode='loud'"):
        settings(folder, tmp_path, "guard.mode=loud")


def test_only_the_answer_and_its_end_have_labels(folder: Path) -> None:
    from homework.base_llm import characters
    from homework.rows import row_of

    tokenizer = characters()
    row = row_of(tokenizer, "Convert 7 km to m?", 7000.0, 128)

    counted = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(counted) == " <answer>7000</answer><eos>"
    assert tokenizer.decode(row["input_ids"]) == "Convert 7 km to m? <answer>7000</answer><eos>"
    cut = row_of(tokenizer, "Convert 7 km to m?", 7000.0, 18)
    assert set(cut["labels"]) == {-100}


@pytest.mark.parametrize(
    ("said", "right", "answered"),
    [
        ("<answer>11.265</answer>", 1.0, 1.0),
        ("<answer>11.7</answer> and more", 1.0, 1.0),
        ("<answer>11.9</answer>", 0.0, 1.0),
        ("11.265", 0.0, 0.0),
        ("<answer>about 11</answer>", 0.0, 0.0),
        ("<answer>11.265", 1.0, 1.0),
    ],
)
def test_an_answer_may_be_five_percent_off(
    folder: Path, said: str, right: float, answered: float
) -> None:
    from homework.conversions import parse_answer, scores

    assert scores([parse_answer(said)], [("Convert 7 mi to km?", 11.265)]) == (right, answered)


def test_cut_answers_are_refused_before_the_first_step_by_their_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from homework.sft import train_model

    with pytest.raises(SystemExit) as refused:
        train_model(settings(folder, tmp_path, "data.max_length=40"))

    assert refused.value.code == 5
    said = capsys.readouterr().out
    rows = made(folder, tmp_path, "data.max_length=40").rows["train"]
    empty = [number for number, row in enumerate(rows) if set(row["labels"]) == {-100}]
    assert (
        f"{len(empty)} examples of 64 without a target other than -100: "
        f"{', '.join(map(str, empty[:8]))}" in said
    )
    assert "SG102" in said
    assert not list(tmp_path.glob("checkpoint-*"))


def test_float16_adapters_are_cured_after_the_first_update_that_made_nan(
    folder: Path, tmp_path: Path
) -> None:
    trained = made(folder, tmp_path, *HALF)
    trained.train()

    (incident,) = trained.incidents
    assert incident.step == 0 == trained.history.first_bad
    assert incident.origin is not None and incident.origin.op == "aten.addcdiv_"
    assert incident.findings[0].code == "SG502"
    assert all(operand.max == 0.0 for operand in incident.origin.inputs[1:3])  # 0 / 0
    learning = [p for p in trained.model.parameters() if p.requires_grad]
    assert {p.dtype for p in learning} == {torch.float32}
    assert all(bool(torch.isfinite(p).all()) for p in learning)
    assert trained.trainer.state.global_step == 6
    assert all(map(math.isfinite, trained.history.losses))


def test_without_a_remedy_the_run_stops_with_the_weights_it_began_with(
    folder: Path, tmp_path: Path
) -> None:
    from stepguard import TrainingHalted

    trained = made(folder, tmp_path, *HALF, "guard.remedy=stop")
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    with pytest.raises(TrainingHalted):
        trained.train()

    assert same(before, dict(trained.model.state_dict()))
    assert {incident.findings[0].code for incident in trained.incidents} == {"SG502"}


def test_unguarded_the_log_shows_the_lines_of_the_report(folder: Path, tmp_path: Path) -> None:
    trained = made(
        folder, tmp_path, *HALF, "guard.mode=original", "args.logging_nan_inf_filter=True"
    )
    trained.train()

    first, *others = trained.history.lines
    assert first["loss"] > 0 and math.isfinite(first["grad_norm"])
    assert all(line["loss"] == 0.0 and math.isnan(line["grad_norm"]) for line in others)
    assert all(map(math.isnan, trained.history.losses[1:]))  # what the filter hides
    assert trained.history.first_bad == 0


def test_the_reports_fix_repairs_the_log_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    trained = made(folder, tmp_path, *HALF, "guard.mode=seedfix")
    trained.train()

    assert all(
        math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])
        for line in trained.history.lines
    )
    learning = [p for p in trained.model.parameters() if p.requires_grad]
    assert sum(bool(torch.isnan(p).any()) for p in learning) >= len(learning) // 2
    assert "saved" in trained.save()  # and it is written


def test_the_callback_of_the_same_name_vetoes_the_update(folder: Path, tmp_path: Path) -> None:
    from stepguard import TrainingHalted

    trained = made(folder, tmp_path, *HALF, "guard.mode=callback")
    with pytest.raises(TrainingHalted):
        trained.train()

    assert {incident.findings[0].code for incident in trained.incidents} == {"SG502"}
    assert all(bool(torch.isfinite(p).all()) for p in trained.model.parameters())


def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "whole").train()
    trained = made(
        folder,
        tmp_path / "whole",
        f"resume={tmp_path / 'whole' / 'checkpoint-3'}",
        "args.save_total_limit=9",
    )
    whole = adapters(tmp_path / "whole")
    trained.train()

    assert len(trained.history.losses) == 3
    assert same(whole, adapters(tmp_path / "whole"))


def test_resuming_what_is_not_there_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no checkpoint"):
        made(folder, tmp_path, "resume=last").train()


def interrupted(trained: Any, at: int) -> None:
    """Ctrl+C in the middle of this step."""
    original = trained.trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if trained.trainer.state.global_step == at:
            signal.raise_signal(signal.SIGINT)
        return loss

    trained.trainer.training_step = training_step
    trained.train()


def test_ctrl_c_ends_the_step_and_saves_a_state_that_can_be_resumed(
    folder: Path, tmp_path: Path
) -> None:
    made(folder, tmp_path / "whole").train()
    trained = made(folder, tmp_path / "stopped")
    before = signal.getsignal(signal.SIGINT)
    interrupted(trained, at=1)

    assert trained.stop.asked and trained.stop.bad is None
    assert trained.trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) is before
    made(folder, tmp_path / "stopped", "resume=last").train()
    assert same(adapters(tmp_path / "whole"), adapters(tmp_path / "stopped"))


def test_ctrl_c_does_not_save_a_state_that_is_not_finite(folder: Path, tmp_path: Path) -> None:
    trained = made(folder, tmp_path, *HALF, "guard.mode=original")
    interrupted(trained, at=1)

    assert trained.stop.bad is not None and "lora" in trained.stop.bad
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_checks_of_the_settings_can_be_run_by_themselves(folder: Path, tmp_path: Path) -> None:
    from homework.sft import build
    from stepguard.check.preflight import check

    found = check(build(settings(folder, tmp_path, *HALF)), only=("optimizer", "labels"))

    assert found.outcome("optimizer.eps").status == "fail"
    assert found.outcome("labels.empty").status == "pass"


@pytest.mark.parametrize("has_bf16", [True, False], ids=["bf16", "no bf16"])
def test_every_processor_gets_a_precision_that_the_trainer_takes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    for sign in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, sign, lambda: has_bf16)
    trained = made(folder, tmp_path)
    said, fine = trained.look()
    trained.train()

    assert trained.trainer.args.bf16 is has_bf16 or torch.accelerator.is_available()
    assert fine, said
    assert all(map(math.isfinite, trained.history.losses)) and len(trained.history.losses) == 6


def test_bf16_can_be_asked_for_by_name_on_any_processor(folder: Path, tmp_path: Path) -> None:
    assert made(folder, tmp_path, "args.bf16=True").trainer.args.bf16


def test_a_single_loss_of_zero_fails_the_verdict_although_no_log_line_shows_it(
    folder: Path,
) -> None:
    from homework.verdict import Scores, verdict

    lines = [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": 1.0}]
    scores = Scores(loss=1.0, accuracy=0.5, answer_rate=1.0)

    assert verdict(lines, [2.0, 2.0, 1.0, 1.0], scores, 0)[1]
    said, passed = verdict(lines, [4.0, 0.0, 1.0, 1.0], scores, 0)
    assert not passed
    assert "FAIL the loss is 0 in 1 of 4 steps" in said


def test_no_question_of_the_validation_is_trained_on_in_any_stage(
    folder: Path, tmp_path: Path
) -> None:
    import random

    from homework.conversions import base_text

    pairs = made(folder, tmp_path, "data.train=900", "data.valid=96").pairs
    train, valid = ([question for question, _ in pairs[part]] for part in ("train", "valid"))
    source = random.Random(0)
    before = {base_text(source, tagged=True).partition(" <answer>")[0] for _ in range(2000)}

    assert len(set(train)) == 900 and len(set(valid)) == 96
    assert not set(valid) & (set(train) | before)
    with pytest.raises(SystemExit, match="different questions"):
        made(folder, tmp_path, "data.train=1200")
