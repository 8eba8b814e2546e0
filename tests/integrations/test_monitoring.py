"""The weaker forms: a callback alone, and a `compute_loss` that drops unusable samples. Also the
precision that a machine gets, and the versions of a framework that work.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

import forked
from integrations.trainers import (
    bad_in_checkpoints,
    bad_tensors,
    journal_lines,
    llama,
    logged,
    numbers,
    quiet,
    regression,
    texts,
    trainer,
)
from stepguard import ConfigError
from stepguard.integrations._parts import Framework
from stepguard.integrations.transformers import (
    CPU_SIGNS,
    GradientMonitoringCallback,
    MicroBatchDropped,
    guard,
    half_precision,
    safe_compute_loss,
)


# --- the callback
# --------------------------------------------------------------------------------------------------
def monitored(
    folder: Path, model: Any = None, rows: Any = None, *before: TrainerCallback, **settings: Any
) -> tuple[GradientMonitoringCallback, Any]:
    """A run under the callback alone, with one NaN row unless told otherwise; it is over."""
    extra = settings.pop("extra", {})
    monitor = GradientMonitoringCallback(quiet(run_dir=folder / "run"))
    made = trainer(
        folder,
        regression() if model is None else model,
        numbers(24, nan_at=9) if rows is None else rows,
        extra={"callbacks": [*before, monitor], **extra},
        **{"optim": "adamw_torch", **settings},
    )
    made.train()
    return monitor, made


class Solved(nn.Module):
    """Its loss is 0, and not a NaN that the Trainer filtered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * 0).sum()}


SAVING = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_the_callback_alone_vetoes_reports_and_holds_the_schedule(
    tmp_path: Path, logging_steps: int
) -> None:
    monitor, made = monitored(tmp_path, logging_steps=logging_steps)
    (incident,) = monitor.incidents
    assert incident.step == 2
    assert bad_tensors(made.model) == 0
    assert made.lr_scheduler.last_epoch == 5
    assert monitor.reported["loss"] == 1
    lines = journal_lines(tmp_path / "run")
    said = {line.get("kind"): line["summary"] for line in lines if "summary" in line}
    assert "cannot refuse trainer.save_model()" in said["callback-only"]
    assert "is filtered" in said["filtered"] and "nan" in said["filtered"]


def with_metric(value: float) -> dict[str, Any]:
    """A callback that puts a number of its own into each log line, before the guard's sees it."""

    class Accuracy(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            logs["logits/chosen"] = value

    return {"callbacks": [Accuracy()]}


@pytest.mark.parametrize(("value", "lines"), [(math.nan, 1), (math.inf, 1), (0.5, 0)])
@pytest.mark.parametrize("bad_row", [None, 9])
def test_metric_that_alone_is_not_finite_is_reported_once(
    value: float, lines: int, bad_row: int | None, tmp_path: Path
) -> None:
    made = trainer(tmp_path, regression(), numbers(24, nan_at=bad_row), extra=with_metric(value))
    monitor = GradientMonitoringCallback(quiet(run_dir=tmp_path / "run"))
    made.add_callback(monitor)
    made.train()
    told = [line for line in journal_lines(tmp_path / "run") if line.get("kind") == "metric"]
    assert len(told) == lines
    for line in told:
        assert line["summary"].startswith(f"logits/chosen was logged as {value} at step 1: only")


def test_metric_that_trl_merges_into_its_line_is_seen_by_the_guard(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(24))
    original = made.log
    made.log = lambda logs, *more, **named: original({**logs, "kl": math.nan}, *more, **named)
    with guard(made, quiet(run_dir=tmp_path / "run")) as watching:
        made.train()
        assert watching.incidents == ()
    told = [line for line in journal_lines(tmp_path / "run") if line.get("kind") == "metric"]
    assert len(told) == 1 and "kl was logged as nan" in told[0]["summary"]


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_the_callback_counts_losses_that_are_exactly_zero(
    tmp_path: Path, logging_steps: int
) -> None:
    monitor, made = monitored(tmp_path, Solved(), numbers(24), logging_steps=logging_steps)
    assert monitor.reported["zero_loss"] == made.state.global_step
    assert monitor.reported["loss"] == 0 and not monitor.incidents
    notes = [line for line in journal_lines(tmp_path / "run") if line.get("kind") == "zero_loss"]
    assert any(line.get("code") == "SG803" for line in notes)
    assert any("not a filtered NaN" in line["summary"] for line in notes)


def test_gradients_are_gone_when_on_step_end_runs(tmp_path: Path) -> None:
    """Why the callback does not repair them there, as the source report wanted."""

    class Look(TrainerCallback):  # type: ignore[misc]
        seen: ClassVar[list[tuple[str, int]]] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note("before", kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note("end", kwargs["model"])

        def note(self, when: str, model: nn.Module) -> None:
            self.seen.append((when, sum(p.grad is not None for p in model.parameters())))

    trainer(tmp_path, regression(), numbers(8), extra={"callbacks": [Look()]}, max_steps=2).train()
    assert Look.seen == [("before", 4), ("end", 0)] * 2


def test_the_callback_tells_a_bad_norm_from_a_fine_one(tmp_path: Path) -> None:
    monitor, made = monitored(tmp_path)
    finite = [math.isfinite(norm) for norm in logged(made, "grad_norm")]
    assert finite == [step != 2 for step in range(6)]
    assert monitor.reported["grad_norm"] == 1


def test_the_callback_does_not_let_made_up_parameters_be_saved(tmp_path: Path) -> None:
    class Break(torch.optim.SGD):
        """A fault inside the optimizer that no look at gradients can see, in its third step."""

        steps = 0

        def step(self, closure: Any = None) -> Any:
            out = super().step(closure)
            self.steps += 1
            if self.steps == 3:
                self.param_groups[0]["params"][0].data.fill_(math.nan)
            return out

    model = regression()
    extra = {"optimizers": (Break(model.parameters(), lr=0.1), None)}
    monitor, _ = monitored(tmp_path, model, numbers(24), extra=extra, **SAVING)
    (incident,) = monitor.incidents
    assert incident.decision is not None and incident.decision.action == "undo"
    assert incident.origin is not None and incident.origin.phase == "optimizer"
    assert bad_in_checkpoints(tmp_path) == {"checkpoint-1": 0, "checkpoint-2": 0, "checkpoint-3": 0}


def test_the_callback_does_not_let_parameters_be_saved_that_were_broken_after_the_update(
    tmp_path: Path,
) -> None:
    class Break(TrainerCallback):
        """A fault outside the optimizer, which there is no update to undo for."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                kwargs["model"].inner.weight.data.fill_(math.nan)

    monitor, _ = monitored(tmp_path, None, numbers(24), Break(), **SAVING)
    assert monitor.reported["parameters"] == 1
    assert bad_in_checkpoints(tmp_path) == {"checkpoint-1": 0, "checkpoint-2": 0}


def test_beside_a_guard_the_callback_only_reports(tmp_path: Path) -> None:
    monitor = GradientMonitoringCallback(quiet())
    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), extra={"callbacks": [monitor]})
    with guard(made, quiet()) as watching:
        made.train()
    assert len(watching.incidents) == 1
    assert monitor.incidents == ()
    assert monitor.reported["grad_norm"] == 1


def test_the_callback_leaves_nothing_behind(tmp_path: Path) -> None:
    _, made = monitored(tmp_path, None, numbers(8), max_steps=2)
    inner = made.optimizer.optimizer
    assert not inner._optimizer_step_pre_hooks and not inner._optimizer_step_post_hooks


# --- safe_compute_loss
# ---------------------------------------------------------------------------------------------
def safe(made: Any) -> Any:
    made.compute_loss = functools.partial(safe_compute_loss, made)
    return made


def test_a_healthy_run_is_the_same_with_a_safe_loss(tmp_path: Path) -> None:
    runs = []
    for wrapped in (False, True):
        made = trainer(tmp_path, llama(), texts(24))
        (safe(made) if wrapped else made).train()
        runs.append((logged(made, "loss"), list(made.model.parameters())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_without_labels_is_dropped_with_momentum_and_decay(
    tmp_path: Path, weight_decay: float
) -> None:
    """The weights are those of a run in which the batch never came."""
    settings = {"weight_decay": weight_decay, "lr_scheduler_type": "constant"}
    made = safe(trainer(tmp_path, llama(), texts(24, lambda row: 8 <= row < 12), **settings))
    with pytest.warns(MicroBatchDropped, match="none of its 32 labels counts"):
        made.train()
    rows = [row for i, row in enumerate(texts(24)) if not 8 <= i < 12]
    other = trainer(tmp_path, llama(), rows, max_steps=5, **settings)
    other.train()
    assert all(
        torch.equal(a, b)
        for a, b in zip(made.model.parameters(), other.model.parameters(), strict=True)
    )


def test_of_an_accumulated_step_only_the_bad_micro_batch_is_dropped(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 3}
    made = safe(trainer(tmp_path, regression(), numbers(24, nan_at=9), **settings))
    before = made.model.outer.bias.detach().clone()
    with pytest.warns(MicroBatchDropped, match="its loss is nan"):
        made.train()
    assert bad_tensors(made.model) == 0
    assert not torch.equal(before, made.model.outer.bias)


def test_a_nan_weight_is_not_hidden_by_a_dropped_micro_batch(tmp_path: Path) -> None:
    made = safe(trainer(tmp_path, regression(), numbers(24), max_steps=1))
    made.create_optimizer()
    made.model.outer.bias.data.fill_(math.nan)
    batch = {"x": torch.zeros(2, 4), "labels": torch.zeros(2)}
    with pytest.warns(MicroBatchDropped):
        loss = made.compute_loss(made.model.train(), batch)
    assert math.isnan(float(loss.detach()))


def test_a_model_that_gives_no_loss_is_an_error_that_names_the_batch(tmp_path: Path) -> None:
    made = safe(trainer(tmp_path, llama(), texts(8)))
    with pytest.raises(
        ConfigError, match=r"no loss for a batch with 'input_ids': no 'labels' in it"
    ):
        made.compute_loss(made.model, {"input_ids": torch.ones(1, 4, dtype=torch.long)})


def test_a_true_zero_stays_a_zero(tmp_path: Path) -> None:
    made = safe(trainer(tmp_path, Solved(), numbers(8), max_steps=2))
    made.train()
    assert logged(made, "loss") == [0.0, 0.0]


def test_under_a_guard_the_loss_is_left_to_the_guard(tmp_path: Path) -> None:
    made = safe(trainer(tmp_path, regression(), numbers(24, nan_at=9)))
    with guard(made, quiet()) as watching:
        made.train()
    assert [incident.step for incident in watching.incidents] == [2]


@pytest.mark.parametrize(
    ("gpu", "native", "cpu", "expected"),
    [
        (True, True, False, {"bf16": True}),
        (True, False, True, {"fp16": True}),
        (False, False, True, {"bf16": True, "use_cpu": True}),
        (False, False, False, {}),
    ],
    ids=["gpu with bf16", "gpu that emulates bf16", "cpu with bf16", "cpu without"],
)
def test_bf16_is_chosen_only_where_the_hardware_has_it(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, native: bool, cpu: bool, expected: dict[str, bool]
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    cpu_with_bf16(monkeypatch, cpu)
    assert half_precision() == expected


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu with bf16", "cpu without"])
def test_transformers_takes_the_precision_that_is_chosen_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu: bool
) -> None:
    cpu_with_bf16(monkeypatch, cpu)
    made = TrainingArguments(output_dir=str(tmp_path), **half_precision())

    assert made.bf16 is cpu
    assert made.device.type == "cpu"


def test_an_accelerator_that_is_not_cuda_is_not_traded_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu_with_bf16(monkeypatch, True)
    assert half_precision() == {}


def cpu_with_bf16(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    for sign in CPU_SIGNS:
        found: Any = lambda: present  # noqa: E731
        monkeypatch.setattr(torch.cpu, sign, found)


KNOWN = Framework("transformers", first="5.0", before="6.0", tested="5.22.2", without=("5.3.1",))


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("5.0.0", True),
        ("5.22.2", True),
        ("5.0.0rc1", True),
        ("5.4+local", True),
        ("4.57.6", False),
        ("6.0", False),
        ("5.3.1", False),
    ],
)
def test_versions_that_work_are_known_by_their_numbers(version: str, works: bool) -> None:
    assert KNOWN.supports(version) is works


def test_a_framework_that_is_missing_is_named_with_the_versions_that_work() -> None:
    with pytest.raises(
        ConfigError, match=r"no-such-framework is not installed; .* 1\.0 up to, not including, 2\.0"
    ):
        Framework("no-such-framework", first="1.0", before="2.0", tested="1.1").require()


def test_an_unknown_version_is_named_with_the_versions_that_work() -> None:
    with pytest.raises(
        ConfigError,
        match=r"pytest \d.* is not supported; .* 0\.1 up to, not including, 0\.2 \(tested with 0\.",
    ):
        Framework("pytest", first="0.1", before="0.2", tested="0.1").require()


def test_a_missing_method_is_a_clear_message_and_no_attribute_error(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made = trainer(tmp_path, regression(), numbers(4))
    monkeypatch.delattr("transformers.Trainer._save_checkpoint")
    with pytest.raises(
        ConfigError, match=r"Trainer has no _save_checkpoint, .* works with transformers 5"
    ):
        guard(made)


def test_importing_an_integration_of_an_unknown_version_says_so_before_anything_else() -> None:
    code = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "4.57.6" if name == "transformers" else real(name)
import stepguard.integrations.transformers
"""
    ran = forked.python(["-c", code])
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "stepguard._errors.ConfigError: transformers 4.57.6 is not supported; this guard"
    )
    assert "transformers 5" in last
