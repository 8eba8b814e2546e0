"""Every item of `check`: a healthy project passes, each planted fault is found with its numbers."""

from __future__ import annotations

import argparse
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.optim import lr_scheduler

from check.asking import CONFIG, HEALTHY, ask, ask_one, built, inside, saved, written
from stepguard.check import inspection, items_step
from stepguard.check import items as items_project
from stepguard.check.preflight import TITLES, Subject, check
from stepguard.check.settings import read_settings
from stepguard.records.checks import Outcome, Preflight

FAULTS = """
float16_context | precision.effective | fail | 3 of 3 matrix products | asks for bfloat16
fp16_ignored_on_cpu | precision.effective | fail | came out as float32 | mixed_precision='fp16'
amp_without_a_dtype | precision.unnamed | fail | float16 on cuda | launcher's mixed_precision=bf16
launcher_overruled | precision.configured | fail | the launcher | asks for float32
float16_context | scaler.missing | fail | no GradScaler | 6e-08
half_weights | optimizer.eps | fail | eps=1e-08 is 0 in float16 | 0 / 0
optimizer_of_another_model | optimizer.parameters | fail | none of the model's |
head_left_out | optimizer.parameters | warn | 2 trainable parameters | head.weight
bfloat16_weights | optimizer.stalled | warn | bfloat16 | does not change them
norm_without_eps | norm.eps | fail | RMSNorm(eps=1e-20) | e+
hand_written_norm | norm.eps | fail | HandNorm(eps=1e-08) in float16 | NaN
literal_rate | lr.config | fail | optimizer.lr=5e-05 | up to 0.0005
schedule_too_short | lr.schedule | fail | fails at step | ValueError
other_accumulation | launcher.agrees | fail | gradient_accumulation_steps=2 | has 8
no_label_counts | labels.empty | fail | 1 example of 24 | 5 (id chat-0-5)
nan_in_the_data | data.finite | fail | 17 (id chat-0-17) [sound]: NaN at [3] | 1 of 16 values
silence | data.constant | warn | 9 (id chat-0-9) [sound] = 0 | 16 places
wrong_unit | data.range | warn | 11 (id chat-0-11) | 1 of 24
outside_the_declared_range | data.range | fail | sound spans | the allowed range is -0.5 to 0.5
unreadable_example | data.unreadable | fail | 19 (OSError: image file | 1 example of 24
leaked_example | data.leak | fail | 2 (id validation-2) = 6 (id chat-0-6) | 1 example of 8
poisoned_weights | model.stored_finite | fail | param:head.weight | 1 of 128 values
poisoned_statistics | model.stored_finite | fail | buffer:batch_norm.running_var | 1 of 8 values
loss_of_zero_over_zero | model.fresh_forward | fail | loss nan |
mean_over_targets | loss.split | warn | halves of 2 samples with 2 and | the gradient is
infinite_slope | model.fresh_forward | fail | bad gradients: alpha | loss
runaway_scalar | scalars.limit | fail | alpha reaches 88.7 | allowed is 10
loss_of_zero_over_zero | checklist.divisions | fail | smallest divisor 0 (float32, faults.py: |
eps_without_effect | checklist.divisions | pass | 1e-08 in float32 has no effect at faults.py: |
policy_without_rewind | checklist.recovery | warn | skip, stop | without rewind
rare_checkpoints | checklist.checkpoints | warn | 5,000 steps |
no_warmup | checklist.warmup | warn | 0 steps |
raw_latents | checklist.latents | warn | standard deviation |
clipping_with_sgd | checklist.clip | warn | clip_norm=5 | SGD
"""
"""Build function of the faults | item | status | two texts of its evidence."""


@pytest.mark.parametrize("row", FAULTS.strip().splitlines())
def test_planted_fault_is_found_with_its_numbers(row: str) -> None:
    build, item, status, first, second = (word.strip() for word in row.split("|"))
    outcome = ask_one(f"tinychat.faults:{build}", item)
    evidence = "; ".join(outcome.evidence)
    assert outcome.status == status, evidence
    assert first in evidence and second in evidence
    assert outcome.fix or status == "pass"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Preflight:
    """Everything given: configuration, launcher, checkpoint, disk."""
    folder = tmp_path_factory.mktemp("healthy")
    parts = built("training:build")
    states = (parts["model"], parts["optimizer"], parts["scheduler"])
    path = saved(folder / "last.pt", *states, config=CONFIG, versions={})
    return ask(HEALTHY, checkpoint=path, run_dir=folder)


def test_every_item_passes_the_healthy_project(healthy: Preflight) -> None:
    assert {o.id: o.evidence for o in healthy.of("warn", "fail", "not_checked")} == {}
    assert healthy.ok and [o.id for o in healthy.outcomes] == list(TITLES)
    idle = {o.id for o in healthy.of("not_applicable")}
    assert idle == {"scaler.missing", "optimizer.stalled"}


def test_healthy_project_is_aligned_because_the_probe_agrees(healthy: Preflight) -> None:
    assert healthy.alignment == "aligned"
    facts = dict(healthy.facts)
    assert facts["mixed precision"].startswith("bfloat16 (probed: 3 of 3 matrix products")
    assert facts["learning rate"] == "2e-06 now, 5e-05 at its peak"
    assert facts["distributed type"] == "MULTI_CPU"


def test_sections_stay_together() -> None:
    ids = list(TITLES)
    assert len(ids) == 40
    sections = list(dict.fromkeys(item.partition(".")[0] for item in ids))
    assert sorted(ids, key=lambda item: sections.index(item.partition(".")[0])) == ids


LINEAR = nn.Linear(3, 3)
ROWS = torch.ones(2, 3)


def look(folder: Path, item: str, **parts: Any) -> Outcome:
    """One item, in an empty folder; or all of them but the checklist."""
    with inside(folder):
        result = check(Subject(**parts), only=[item] if item else [], skip=["checklist"])
    for outcome in result.outcomes:
        assert not any("this check itself failed" in said for said in outcome.evidence), outcome
    failed = [outcome for outcome in result.outcomes if outcome.status == "fail"]
    return result.outcome(item) if item else (failed or list(result.outcomes))[0]


def judged(item: str, **parts: Any) -> str:
    return check(Subject(**parts), only=[item]).outcome(item).status


# --- The checklist.


def test_accumulation_that_nothing_reads_is_not_accumulation(tmp_path: Path) -> None:
    config = written(tmp_path, training={"num_train_steps": 300, "batch_size": 4, "grad_accum": 4})
    outcome = ask_one(HEALTHY, "checklist.accumulation", config=config)
    assert outcome.status == "warn"
    assert outcome.evidence == ("nothing reads training.grad_accum=4",)


def test_rate_of_a_large_model_is_judged_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_one("tinychat.faults:literal_rate", "checklist.lr").status == "not_applicable"
    monkeypatch.setattr(items_step, "LARGE_MODEL", 100)
    outcome = ask_one("tinychat.faults:literal_rate", "checklist.lr")
    assert (outcome.status, "0.0005" in outcome.evidence[0]) == ("warn", True)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_warm_up_of_2000_steps_is_long_enough_however_it_is_counted(first: int) -> None:
    for length, status in ((2000, "pass"), (1900, "warn")):
        optimizer = torch.optim.AdamW(LINEAR.parameters(), lr=1e-3)
        factor = lambda k, n=length: min(1.0, (k + first) / n)  # noqa: E731
        schedule = lr_scheduler.LambdaLR(optimizer, factor)
        found = judged("checklist.warmup", model=LINEAR, optimizer=optimizer, scheduler=schedule)
        assert found == status


@pytest.mark.parametrize(
    "error",
    [
        nn.functional.mse_loss,
        lambda x, y: (x - y).pow(2).mean(),
        lambda x, y: ((y - x) ** 2).mean(),
        lambda x, y: (x - y).square().mean() + (x - torch.randn(16, 4)).square().mean(),
    ],
    ids=["mse_loss", "pow", "power", "two targets"],
)
def test_latents_are_judged_by_the_target_of_a_real_step(
    error: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model, batch = nn.Linear(4, 4), torch.ones(16, 4)
    for scale, status in ((1.0, "pass"), (1e3, "warn"), (1e-3, "warn")):
        target = scale * torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        loss = lambda x, y=target: error(model(x), y)  # noqa: E731
        assert judged("checklist.latents", model=model, loss_fn=loss, batch=batch) == status
    # a variance that is computed by hand
    variance = lambda x: (model(x) - model(x).mean()).pow(2).mean()  # noqa: E731
    found = judged("checklist.latents", model=model, loss_fn=variance, batch=batch)
    assert found == "not_applicable"


# --- The checkpoint.


def test_poisoned_checkpoint_is_found(tmp_path: Path) -> None:
    model = built()["model"]
    model.batch_norm.running_var[1] = torch.nan
    path = saved(tmp_path / "bad.pt", model)
    outcome = ask_one(HEALTHY, "checkpoint.sound", checkpoint=path)
    assert outcome.status == "fail" and "stepguard verify" in outcome.fix
    assert "model/batch_norm.running_var" in outcome.evidence[0]


def test_checkpoint_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    path = tmp_path / "evil.pt"
    torch.save({"model": {"weight": torch.ones(2)}, "config": Evil()}, path)
    result = ask(HEALTHY, "checkpoint", "config.changed", "lr.checkpoint", checkpoint=path)
    assert result.outcome("checkpoint.sound").status == "fail"
    assert result.outcome("config.changed").status == "not_applicable"
    assert not marker.exists()


def test_checkpoint_that_brings_another_rate_back_is_found(tmp_path: Path) -> None:
    parts = built()
    for group in parts["optimizer"].param_groups:
        group["max_lr"] = 5e-4
    path = saved(tmp_path / "old.pt", parts["model"], parts["optimizer"], parts["scheduler"])
    outcome = ask_one(HEALTHY, "lr.checkpoint", checkpoint=path)
    assert outcome.status == "fail" and outcome.evidence[1] == "optimizer.lr=5e-05"
    assert "old.pt: optimizer/param_groups/0/max_lr: the peak of" in outcome.evidence[0]
    assert "is 0.0005" in outcome.evidence[0]
    optimizer = torch.optim.AdamW(LINEAR.parameters(), lr=5e-4)
    path = saved(path, LINEAR, None, lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    outcome = ask_one(HEALTHY, "lr.checkpoint", checkpoint=path)
    assert outcome.status == "fail" and "scheduler/base_lrs/0" in outcome.evidence[0]


# --- The configuration.


def test_change_since_the_checkpoint_is_listed(tmp_path: Path) -> None:
    old = CONFIG | {"seed": 7, "old_key": 1}
    path = saved(tmp_path / "old.pt", built()["model"], config=old)
    outcome = ask_one(HEALTHY, "config.changed", checkpoint=path)
    assert outcome.status == "warn"
    assert outcome.evidence == ("changed: seed: 7 -> 0", "only in the checkpoint: old_key")


def test_configuration_of_a_class_that_torch_would_not_load_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("gone_tomorrow")
    module.Settings = type("Settings", (), {"__module__": "gone_tomorrow"})
    settings = module.Settings()
    vars(settings).update(CONFIG | {"seed": 7, "folder": Path("somewhere")})
    monkeypatch.setitem(sys.modules, "gone_tomorrow", module)
    path = saved(tmp_path / "old.pt", built()["model"], config=settings)
    monkeypatch.undo()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    outcome = ask_one(HEALTHY, "config.changed", checkpoint=path)
    assert "changed: seed: 7 -> 0" in outcome.evidence


def test_keys_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    config = written(tmp_path, text_loss_weight=2.0, optimizer__use_fused=True)
    outcome = ask_one(HEALTHY, "config.unread", config=config)
    assert outcome.status == "warn"
    assert "2 keys of 13 not read" in outcome.evidence[0]
    assert "optimizer.use_fused, text_loss_weight" in outcome.evidence[0]


def test_numbers_read_as_text_are_found(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer:\n  lr: 1e-5\n  min_lr: 1.0e-6\n  amp: 'False'\n")
    assert yaml.safe_load(path.read_text())["trainer"]["lr"] == "1e-5"
    outcome = ask(str(path), "config.types", config=None).outcome("config.types")
    assert outcome.status == "fail"
    assert "text for PyYAML: trainer.lr: 1e-5" in outcome.evidence[0]
    assert "trainer.amp: 'False'" in outcome.evidence[1]


def test_impossible_values_are_found(tmp_path: Path) -> None:
    config = written(tmp_path, optimizer={"lr": -1e-4, "beta2": 9.99}, dropout=float("nan"))
    outcome = ask(str(config), "config.values", config=None).outcome("config.values")
    assert outcome.status == "fail"
    assert outcome.evidence == (
        "optimizer.lr=-0.0001 must be above 0, optimizer.beta2=9.99 must lie between 0 and 1, "
        "dropout is NaN",
    )


@pytest.mark.parametrize(
    ("text", "source", "status"),
    [
        ("lr: 2e-3", "", "warn"),
        ("lr: 2e-3\ndecay: 1e-4", "import omegaconf", "pass"),
        ("lr: 2e-3", "optimizer", "pass"),
        ("lr: 2e-3\ndecay: 1e-4", "optimizer", "warn"),
        ("lr: '2e-3'", "optimizer", "fail"),
        ("lr: 2.0e-3\nname: e3", "", "pass"),
    ],
)
def test_unquoted_exponent_is_a_number_where_the_program_takes_it_for_one(
    tmp_path: Path, text: str, source: str, status: str
) -> None:
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "c.yaml").write_text(text)
    optimizer = torch.optim.SGD(LINEAR.parameters(), lr=2e-3) if source == "optimizer" else None
    settings = read_settings(tmp_path / "c.yaml")
    outcome = look(tmp_path, "config.types", model=LINEAR, optimizer=optimizer, config=settings)
    assert outcome.status == status, outcome
    assert status != "warn" or "1.0e-4 instead of 1e-4" in outcome.fix


@dataclass
class Settings:
    lr: float = 1e-3


@pytest.mark.parametrize("config", [{"lr": 1e-3}, argparse.Namespace(lr=1e-3), Settings()])
def test_configuration_may_be_mapping_namespace_or_dataclass(tmp_path: Path, config: Any) -> None:
    optimizer = torch.optim.Adam(LINEAR.parameters(), lr=1e-3)
    found = look(tmp_path, "lr.config", model=LINEAR, optimizer=optimizer, config=config)
    assert found.status == "pass"


# --- Learning rate, precision and the step.


def test_floor_that_is_taken_as_a_factor_is_found(tmp_path: Path) -> None:
    config = written(tmp_path, min_lr=1e-6)
    outcome = ask_one("tinychat.faults:floor_as_a_factor", "lr.schedule", config=config)
    assert outcome.status == "fail"
    assert "min_lr=1e-06" in outcome.evidence[1] and "ends at 5e-11" in outcome.evidence[0]


def one_cycle(optimizer: Any, peak: float = 1e-3) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, peak, total_steps=10)


FLOOR = {"max_steps": 10, "min_lr": 1e-6}


@pytest.mark.parametrize(
    ("make", "settings", "status"),
    [
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), {}, "not_applicable"),
        (one_cycle, {"epochs": 10}, "pass"),
        (one_cycle, {"epochs": 10, "max_steps": 500}, "pass"),
        (one_cycle, {"max_steps": 500}, "fail"),
        (lambda o: one_cycle(o, 3e-3), {"max_steps": 10}, "fail"),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=1e-6), FLOOR, "pass"),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), FLOOR, "fail"),
    ],
)
def test_schedule_is_judged_by_the_length_of_the_run(
    tmp_path: Path, make: Callable[[Any], Any], settings: dict[str, Any], status: str
) -> None:
    optimizer = torch.optim.Adam(LINEAR.parameters(), lr=1e-3)
    parts = {"model": LINEAR, "optimizer": optimizer, "scheduler": make(optimizer)}
    before = parts["scheduler"].state_dict() | {"rate": optimizer.param_groups[0]["lr"]}
    outcome = look(tmp_path, "lr.schedule", **parts, config={"lr": 1e-3, **settings})
    assert outcome.status == status, outcome
    after = parts["scheduler"].state_dict() | {"rate": optimizer.param_groups[0]["lr"]}
    assert before == after


def test_long_run_is_not_tried_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MOST_STEPS", 5)
    monkeypatch.setattr(items_step, "MOST_STEPS", 5)
    optimizer = torch.optim.Adam(LINEAR.parameters(), lr=1e-3)
    schedule = lr_scheduler.ConstantLR(optimizer)
    for steps in (6, None):
        subject = Subject(optimizer=optimizer, scheduler=schedule, steps=steps)
        (said,) = check(subject, only=["lr.schedule"]).outcome("lr.schedule").evidence
        assert said.endswith("5 steps tried (the length of the run is not configured)")


def test_no_alignment_is_claimed_against_the_probe() -> None:
    result = ask("tinychat.faults:float16_context", "precision")
    assert result.alignment == "contradicted"
    assert "came out as float16" in result.alignment_why[0]
    assert "asks for bfloat16" in result.alignment_why[1]


def test_context_that_does_not_open_here_proves_nothing(tmp_path: Path) -> None:
    def elsewhere() -> Any:
        raise RuntimeError("no such device")

    parts = {"model": LINEAR, "autocast": elsewhere, "config": {"bf16": True}}
    outcome = look(tmp_path, "precision.effective", **parts)
    assert outcome.status == "not_checked"
    assert "cannot be opened here (RuntimeError: no such device)" in outcome.evidence[0]


def test_scaler_that_would_raise_is_not_the_fix_for_float16_weights(tmp_path: Path) -> None:
    found = look(tmp_path, "scaler.missing", model=nn.Linear(2, 2).half())
    assert found.status == "fail" and found.fix.startswith("Keep the weights in float32")


@pytest.mark.parametrize(
    ("loss", "status", "words"),
    [
        (lambda b: torch.tensor(1.0), "warn", "loss 1, all gradients are 0"),
        (lambda b: LINEAR(b), "fail", "loss_fn returned a tensor of shape (2, 3)"),
    ],
    ids=["reaches no parameter", "raises"],
)
def test_step_that_teaches_nothing_is_told(
    tmp_path: Path, loss: Callable[[Tensor], Tensor], status: str, words: str
) -> None:
    outcome = look(tmp_path, "model.fresh_forward", model=LINEAR, loss_fn=loss, batch=ROWS)
    assert outcome.status == status and words in outcome.evidence[0]


def norms() -> dict[str, Any]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)]
    layers += [nn.LayerNorm([6, 6]), nn.LayerNorm(6, elementwise_affine=False)]
    return {"model": nn.Sequential(*layers), "batch": (torch.randn(4, 3, 8, 8),)}


def sparse() -> dict[str, Any]:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    step = {"loss_fn": lambda b: model(b).sum(), "batch": torch.tensor([1, 2])}
    return {"model": model, "optimizer": optimizer, **step}


def meta() -> dict[str, Any]:
    model = nn.Linear(3, 3, device="meta")
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "batch": (ROWS,)}


def dtypes() -> dict[str, Any]:
    row = {
        "a": torch.tensor([True]),
        "b": torch.tensor([1, 2], dtype=torch.uint16),
        "c": 2**70,
        "d": torch.arange(3.0).to(torch.float8_e4m3fn),
        "e": torch.eye(3).to_sparse(),
        "f": torch.ones(3).to_mkldnn(),
    }
    return {"dataset": [row]}


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
    step = {"batch": ROWS, "loss_fn": lambda b: LINEAR(b).square().mean()}
    return {"model": LINEAR, "optimizer": make([LINEAR.weight]), **step}


PAIRS = [(torch.randn(3), torch.tensor(1)) for _ in range(5)]
SUBJECTS: dict[str, Callable[[], dict[str, Any]]] = {
    "norm layers": norms,
    "sparse gradients": sparse,
    "meta device": meta,
    "no parameters": lambda: {"model": nn.ReLU(), "batch": torch.ones(2)},
    "complex": lambda: {"model": nn.Linear(3, 3, dtype=torch.complex64)},
    # how the model takes them is not known without a loss function
    "pairs without a loss": lambda: {"model": LINEAR, "dataset": PAIRS, "label_key": "1"},
    "rare dtypes": dtypes,
    "tensor lr": lambda: with_optimizer(
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False)
    ),
    "Adafactor": lambda: with_optimizer(torch.optim.Adafactor),
    "LBFGS": lambda: with_optimizer(torch.optim.LBFGS),
    "Muon": lambda: with_optimizer(torch.optim.Muon),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_unusual_subject_raises_no_false_alarm(tmp_path: Path, name: str) -> None:
    first = look(tmp_path, "", **SUBJECTS[name]())
    assert first.status != "fail", first


# --- Disk and memory.


def test_full_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 4000})
    monkeypatch.setattr(items_project.shutil, "disk_usage", lambda folder: usage)
    outcome = ask_one(HEALTHY, "disk.space", run_dir=tmp_path / "not" / "there" / "yet")
    assert outcome.status == "fail" and "4 kB free" in outcome.evidence[1]
    assert "2 kept and one being written" in outcome.evidence[0]


def test_too_little_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_project, "available_memory", lambda device: 2000)
    outcome = ask_one(HEALTHY, "memory.estimate")
    assert outcome.status == "fail"
    assert "2 slots a parameter" in outcome.evidence[0]
    assert "2 kB free on cpu" in outcome.evidence[1]


def estimate(model: nn.Module, optimizer: Any = None) -> str:
    subject = Subject(model=model, optimizer=optimizer)
    return check(subject, only=["memory.estimate"]).outcome("memory.estimate").evidence[0]


@pytest.mark.parametrize(
    ("kind", "options", "slots"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adagrad, {}, 1),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.RMSprop, {"momentum": 0.9}, 2),
    ],
)
def test_memory_is_estimated_before_it_is_taken(
    kind: Any, options: dict[str, float], slots: int
) -> None:
    # 8 parameters, and buffers of 8 floats and one integer
    model = nn.BatchNorm1d(4)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    optimizer.state.clear()
    said = estimate(model, optimizer)
    assert "weights 72 B, gradients 32 B," in said
    assert f"optimizer {slots * 32} B ({slots} slots a parameter)" in said


def test_state_that_exists_is_measured() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert "optimizer 36 B (as it is)" in estimate(model, optimizer)
    assert "optimizer 32 B (two moments assumed)" in estimate(model)
    assert "gradients 0 B," in estimate(model.requires_grad_(False))


# --- A batch in halves.

ACCUMULATED = {"config": {"gradient_accumulation_steps": 4}}


def halved(loss: Callable[[nn.Module, dict[str, Tensor]], Tensor], **more: Any) -> Outcome:
    """The answer about a batch of ten rows, most of whose targets are in the first five."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    labels = torch.randint(3, (10, 6))
    labels[5:, 1:] = -100
    batch = {"x": torch.randn(10, 4), "labels": labels}
    given = {"model": model, "batch": batch, "loss_fn": lambda b: loss(model, b), **more}
    before = {name: one.clone() for name, one in model.state_dict().items()}
    outcome = check(Subject(**given), only=["loss.split"]).outcome("loss.split")
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    return outcome


def of_targets(model: nn.Module, batch: dict[str, Tensor], reduction: str) -> Tensor:
    logits = model(batch["x"])[:, :, None].expand(-1, -1, 6)
    return nn.functional.cross_entropy(logits, batch["labels"], reduction=reduction)


def contrasted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    seen = model(batch["x"])
    return nn.functional.cross_entropy(seen @ seen.T, torch.arange(len(seen)))


def test_split_that_weighs_targets_is_named_with_the_weights() -> None:
    outcome = halved(lambda m, b: of_targets(m, b, "mean"), **ACCUMULATED)
    assert outcome.status == "warn"
    assert "with 5 and 30 targets weigh 0.14 and 0.86" in outcome.evidence[0]
    alone = halved(lambda m, b: of_targets(m, b, "mean"))
    assert alone.status == "not_applicable" and "one batch is one step" in alone.evidence[0]


SPLITS: dict[str, tuple[Callable[[nn.Module, dict[str, Tensor]], Tensor], str, str]] = {
    "a mean over rows": (lambda m, b: m(b["x"]).square().mean(), "pass", "the whole batch, to"),
    "a sum": (lambda m, b: of_targets(m, b, "sum"), "pass", "a sum over samples"),
    "a loss of pairs": (contrasted, "not_applicable", "depends on the other samples"),
}


@pytest.mark.parametrize(("loss", "status", "said"), SPLITS.values(), ids=SPLITS)
def test_other_losses_may_be_split(
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor], status: str, said: str
) -> None:
    outcome = halved(loss, **ACCUMULATED)
    assert outcome.status == status and said in outcome.evidence[0]
