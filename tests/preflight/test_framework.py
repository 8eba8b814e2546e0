"""The context a model really runs in, opened through whatever the user has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stepguard import ConfigError
from stepguard.check.inspection import Probe
from stepguard.check.items_step import emulated
from stepguard.check.preflight import Subject, check
from stepguard.check.subject import read_framework, subject_of


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The library, with the state it keeps in the process as fresh as at the start."""
    library = pytest.importorskip("accelerate")
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield library
    library.state.AcceleratorState._reset_state(reset_partial_state=True)


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def trainer(**args: Any) -> SimpleNamespace:
    """The parts of a transformers Trainer that are looked at."""
    model = nn.Linear(2, 2)
    accelerator = SimpleNamespace(
        autocast=half, mixed_precision="bf16", scaler=None, num_processes=1
    )
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(learning_rate=2e-4, **args),
        accelerator=accelerator,
        optimizer=None,
        train_dataset=[{"x": torch.ones(2)}],
        compute_loss_context_manager=nullcontext,
    )


def fabric() -> SimpleNamespace:
    return SimpleNamespace(
        autocast=half, _precision=SimpleNamespace(precision="bf16-mixed"), world_size=2
    )


def lightning() -> SimpleNamespace:
    plugin = SimpleNamespace(forward_context=half, precision="bf16-mixed")
    return SimpleNamespace(precision_plugin=plugin, accumulate_grad_batches=4)


@pytest.mark.parametrize(
    "given",
    [
        half,
        SimpleNamespace(autocast=half, mixed_precision="bf16"),
        fabric(),
        lightning(),
        trainer(bf16=True),
    ],
    ids=["function", "accelerate", "fabric", "lightning", "transformers"],
)
def test_probe_runs_in_the_context_that_is_given(given: Any) -> None:
    result = check(
        Subject(model=nn.Linear(2, 2), autocast=given, config={"bf16": True}), only=["precision"]
    )
    assert result.outcome("precision.effective").status == "pass"
    assert result.alignment == "aligned"
    assert ("AMP enabled", "yes, autocast to bfloat16") in result.facts
    assert not torch.is_autocast_enabled("cpu")


def test_trainer_that_asks_for_fp16_and_gets_nothing_is_found() -> None:
    given = trainer(fp16=True)
    given.accelerator.autocast, given.accelerator.mixed_precision = nullcontext, "fp16"
    result = check(subject_of(given, "build"), only=["precision.effective", "scaler.missing"])
    outcome = result.outcome("precision.effective")
    assert outcome.status == "fail"
    assert "TrainingArguments(fp16=True)" in outcome.evidence[2]
    assert "On a CPU fp16 is ignored" in outcome.fix
    assert result.outcome("scaler.missing").status == "not_applicable"


def test_returned_trainer_brings_model_data_and_settings() -> None:
    found = subject_of(trainer(bf16=True), "build")
    assert found.model is not None and found.dataset is not None
    assert found.config is not None and found.config["learning_rate"] == 2e-4


def test_optimizer_the_trainer_would_make_is_looked_at_and_taken_back() -> None:
    given = trainer(bf16=True)
    given.model.half()

    def create_optimizer() -> torch.optim.Optimizer:
        given.optimizer = torch.optim.AdamW(given.model.parameters(), lr=2e-4)
        return given.optimizer

    given.create_optimizer = create_optimizer
    found = subject_of(given, "build")
    assert check(found, only=["optimizer.eps"]).outcome("optimizer.eps").status == "fail"
    assert given.optimizer is None


@pytest.mark.slow
@pytest.mark.usefixtures("accelerate")
def test_real_trainer_is_read_without_being_changed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    rows = [
        {"input_ids": [row, 2, 3, 4], "labels": [-100, 2, 3, 4] if row else [-100] * 4}
        for row in range(4)
    ]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", fp16=True
    )
    given = transformers.Trainer(model=model, args=args, train_dataset=rows)
    result = check(subject_of(given, "build"), skip=["checklist", "code", "config.unread"])
    assert {outcome.id for outcome in result.of("fail")} == {"precision.effective", "labels.empty"}
    assert result.outcome("lr.config").status == "pass"
    assert given.optimizer is None


def test_context_that_cannot_be_opened_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="autocast is a int; give a function"):
        read_framework(7)


@pytest.mark.parametrize(("native", "expected"), [(True, False), (False, True)])
def test_emulated_bfloat16_is_not_taken_for_support(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: bool
) -> None:
    asked = {}

    def supported(including_emulation: bool = True) -> bool:
        asked["emulation"] = including_emulation
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert emulated(Probe("bfloat16", "", "cuda")) is expected
    assert asked == {"emulation": False}
    assert not emulated(Probe("bfloat16", "", "cpu"))


def test_step_that_opens_its_own_context_needs_no_other() -> None:
    model = nn.Linear(4, 2)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with half():
            return model(batch).float().square().mean()

    subject = Subject(
        model=model, loss_fn=loss, batch=torch.ones(3, 4), config={"mixed_precision": "no"}
    )
    outcome = check(subject, only=["precision.effective"]).outcome("precision.effective")
    assert outcome.status == "fail"
    assert (
        outcome.evidence[0] == "1 of 1 matrix products of the real step on cpu came out as bfloat16"
    )


@pytest.mark.parametrize(
    ("precision", "native", "dtype"), [("bf16", True, "bfloat16"), ("no", False, "float32")]
)
def test_real_accelerator_is_understood(
    accelerate: Any, precision: str, native: bool, dtype: str
) -> None:
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    assert read_framework(accelerator).dtype == dtype
    result = check(Subject(model=nn.Linear(2, 2), autocast=accelerator), only=["precision"])
    assert result.alignment == "aligned"
    assert bool(accelerator.native_amp) is native
