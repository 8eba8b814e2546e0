"""Each planted fault of the fixture project is found under its own id; the healthy twin has none of
them.
"""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from preflight.asking import CONFIG, PROJECT, ask, ask_one, inside, saved, written
from stepguard._errors import ConfigError
from stepguard.checkpoints import Health, Store
from stepguard.preflight.items import ITEMS, disk_space, memory_estimate
from stepguard.preflight.items.checklist_lr import LARGE
from stepguard.records.preflight import Preflight
from stepguard.state.importing import import_function, importable

HEALTHY = "tinychat.training:build"
FAULTS = [
    (
        "float16_context",
        "precision.effective",
        "fail",
        "3 of 3 matrix products",
        "asks for bfloat16",
    ),
    ("float16_context", "scaler.missing", "fail", "no GradScaler", "6e-08"),
    (
        "fp16_ignored_on_cpu",
        "precision.effective",
        "fail",
        "came out as float32",
        "mixed_precision='fp16'",
    ),
    (
        "amp_without_a_dtype",
        "precision.unnamed",
        "fail",
        "float16 on cuda",
        "launcher's mixed_precision=bf16",
    ),
    ("launcher_overruled", "precision.configured", "fail", "the launcher", "asks for float32"),
    ("other_accumulation", "launcher.agrees", "fail", "gradient_accumulation_steps=2", "has 8"),
    ("scaler_over_half_weights", "scaler.fits", "fail", "float16", "unscale"),
    ("scaler_without_need", "scaler.fits", "warn", "bfloat16", "only adds a scale"),
    ("half_weights", "optimizer.eps", "fail", "eps=1e-08 is 0 in float16", "0 / 0"),
    ("optimizer_of_another_model", "optimizer.parameters", "fail", "none of the model's", ""),
    ("head_left_out", "optimizer.parameters", "warn", "2 trainable parameters", "head.weight"),
    ("bfloat16_weights", "optimizer.stalled", "warn", "bfloat16", "leaves them as they are"),
    ("norm_without_eps", "norm.eps", "fail", "RMSNorm(eps=1e-20)", "e+"),
    ("hand_written_norm", "norm.eps", "fail", "HandNorm(eps=1e-08) in float16", "NaN"),
    ("literal_rate", "lr.config", "fail", "optimizer.lr=5e-05", "up to 0.0005"),
    ("schedule_too_short", "lr.schedule", "fail", "fails at step", "ValueError"),
    ("no_label_counts", "labels.empty", "fail", "1 example of 24", "5 (id chat-0-5)"),
    ("class_out_of_range", "labels.range", "fail", "16 classes", "99 in example 7 (id chat-0-7)"),
    (
        "answers_cut_off",
        "labels.truncated",
        "warn",
        "2 answers of 24",
        "2 (id chat-0-2), 3 (id chat-0-3)",
    ),
    (
        "nan_in_the_data",
        "data.finite",
        "fail",
        "17 (id chat-0-17) [sound]: NaN at [3]",
        "1 of 16 values",
    ),
    ("silence", "data.constant", "warn", "9 (id chat-0-9) [sound] = 0", "16 places"),
    ("wrong_unit", "data.range", "warn", "11 (id chat-0-11)", "1 of 24"),
    ("outside_the_declared_range", "data.range", "fail", "sound spans", "allowed is -0.5 to 0.5"),
    ("value_missing", "data.missing", "warn", "sound: 1 of 24", "13 (id chat-0-13)"),
    (
        "unreadable_example",
        "data.unreadable",
        "fail",
        "19 (OSError: image file is truncated)",
        "1 example of 24",
    ),
    (
        "repeated_example",
        "data.duplicates",
        "warn",
        "21 (id another name) = 4 (id chat-0-4)",
        "4.17 %",
    ),
    (
        "leaked_example",
        "data.leak",
        "fail",
        "2 (id validation-2) = 6 (id chat-0-6)",
        "1 example of 8",
    ),
    ("poisoned_weights", "model.stored_finite", "fail", "param:head.weight", "1 of 128 values"),
    (
        "poisoned_statistics",
        "model.stored_finite",
        "fail",
        "buffer:batch_norm.running_var",
        "1 of 8 values",
    ),
    ("loss_of_zero_over_zero", "model.fresh_forward", "fail", "loss nan", ""),
    (
        "loss_of_zero_over_zero",
        "checklist.divisions",
        "fail",
        "smallest divisor 0 (float32, faults.py:",
        "",
    ),
    (
        "eps_without_effect",
        "checklist.divisions",
        "pass",
        "the eps 1e-08 in float32 has no effect at faults.py:",
        "",
    ),
    ("infinite_slope", "model.fresh_forward", "fail", "bad gradients: alpha", "loss"),
    ("runaway_scalar", "scalars.limit", "fail", "alpha reaches 88.7", "allowed is 10"),
    ("policy_without_rewind", "checklist.recovery", "warn", "skip, stop", "without rewind"),
    ("rare_checkpoints", "checklist.checkpoints", "warn", "5,000 steps", ""),
    ("no_warmup", "checklist.warmup", "warn", "0 steps", ""),
    ("raw_latents", "checklist.latents", "warn", "standard deviation", ""),
    ("clipping_with_sgd", "checklist.clip", "warn", "clip_norm=5", "SGD"),
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Preflight:
    """Everything given: configuration, launcher, checkpoint, disk."""
    folder = tmp_path_factory.mktemp("healthy")
    parts = built("training:build")
    path = saved(
        folder / "last.pt",
        parts["model"],
        parts["optimizer"],
        parts["scheduler"],
        config=CONFIG,
        versions={},
    )
    return ask(HEALTHY, checkpoint=path, run_dir=folder)


def built(name: str) -> dict[str, Any]:
    """What a build function of the project returns."""
    from stepguard.preflight import Tracked

    with inside(PROJECT), importable():
        parts: dict[str, Any] = import_function(f"tinychat.{name}", ConfigError)(Tracked(CONFIG))
    return parts


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    outcome = ask_one(f"tinychat.faults:{build}", item)
    said = "; ".join(outcome.evidence)
    assert outcome.status == status, said
    assert first in said and second in said
    assert outcome.fix or status == "pass"


def test_nothing_is_reported_on_the_healthy_project(healthy: Preflight) -> None:
    assert {o.id: o.evidence for o in healthy.of("warn", "fail")} == {}
    assert healthy.ok
    assert {o.id for o in healthy.of("not_checked")} == set()


def test_every_item_looks_at_the_healthy_project(healthy: Preflight) -> None:
    assert [o.id for o in healthy.outcomes] == [item.id for item in ITEMS]
    idle = {o.id for o in healthy.of("not_applicable")}
    assert idle == {"scaler.missing", "scaler.fits", "optimizer.stalled"}


def test_healthy_project_is_aligned_because_the_probe_agrees(healthy: Preflight) -> None:
    assert healthy.alignment == "aligned"
    facts = dict(healthy.facts)
    assert facts["mixed precision"].startswith("bfloat16 (probed: 3 of 3 matrix products")
    assert facts["learning rate"] == "2e-06 now, 5e-05 at its peak"
    assert facts["distributed type"] == "MULTI_CPU"


def test_no_alignment_is_claimed_against_the_probe() -> None:
    result = ask("tinychat.faults:float16_context", "precision")
    assert result.alignment == "contradicted"
    assert "probed float16" in result.alignment_why[0]


@pytest.mark.parametrize("item", sorted({item for _, item, *_ in FAULTS}))
def test_item_passes_the_healthy_project(healthy: Preflight, item: str) -> None:
    assert healthy.outcome(item).status in ("pass", "not_applicable")


def test_floor_that_is_taken_as_a_factor_is_found(tmp_path: Path) -> None:
    config = written(tmp_path, min_lr=1e-6)
    outcome = ask_one("tinychat.faults:floor_as_a_factor", "lr.schedule", config=config)
    assert outcome.status == "fail"
    assert "min_lr=1e-06" in outcome.evidence[1] and "ends at 5e-11" in outcome.evidence[0]


def test_one_cycle_checkpoint_that_brings_its_peak_back_is_found(tmp_path: Path) -> None:
    parts = built("training:build")
    for group in parts["optimizer"].param_groups:
        group["max_lr"] = 5e-4
    path = saved(tmp_path / "old.pt", parts["model"], parts["optimizer"], parts["scheduler"])
    outcome = ask_one(HEALTHY, "lr.checkpoint", checkpoint=path)
    assert outcome.status == "fail"
    (said,) = outcome.evidence
    assert (
        said == "old.pt: optimizer/param_groups/0/max_lr=0.0005 comes back, configured is "
        "optimizer.lr=5e-05"
    )


def test_lambda_checkpoint_that_brings_its_base_back_is_found(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    path = saved(tmp_path / "old.pt", model, None, scheduler)
    outcome = ask_one(HEALTHY, "lr.checkpoint", checkpoint=path)
    assert outcome.status == "fail"
    assert "scheduler/base_lrs/0=0.0005 comes back" in outcome.evidence[0]


def test_change_since_the_checkpoint_is_listed(tmp_path: Path) -> None:
    parts = built("training:build")
    path = saved(tmp_path / "old.pt", parts["model"], config=CONFIG | {"seed": 7, "old_key": 1})
    outcome = ask_one(HEALTHY, "config.changed", checkpoint=path)
    assert outcome.status == "warn"
    assert outcome.evidence == ("changed: seed: 7 -> 0", "only in the checkpoint: old_key")


def test_configuration_of_a_class_that_torch_would_not_load_is_read_without_importing_it(
    tmp_path: Path,
) -> None:
    module = types.ModuleType("gone_tomorrow")
    module.Settings = type("Settings", (), {"__module__": "gone_tomorrow"})  # type: ignore[attr-defined]
    settings = module.Settings()
    vars(settings).update(CONFIG | {"seed": 7, "folder": Path("somewhere")})
    sys.modules["gone_tomorrow"] = module
    try:
        path = saved(tmp_path / "old.pt", built("training:build")["model"], config=settings)
    finally:
        del sys.modules["gone_tomorrow"]
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    outcome = ask_one(HEALTHY, "config.changed", checkpoint=path)
    assert "changed: seed: 7 -> 0" in outcome.evidence


def test_poisoned_checkpoint_is_found(tmp_path: Path) -> None:
    parts = built("training:build")
    with torch.no_grad():
        parts["model"].batch_norm.running_var[1] = torch.nan
    path = saved(tmp_path / "bad.pt", parts["model"])
    outcome = ask_one(HEALTHY, "checkpoint.sound", checkpoint=path)
    assert outcome.status == "fail"
    assert (
        "model/batch_norm.running_var" in outcome.evidence[0] and "stepguard verify" in outcome.fix
    )


def test_checkpoint_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    torch.save({"model": {"weight": torch.ones(2)}, "config": Evil()}, tmp_path / "evil.pt")
    result = ask(
        HEALTHY, "checkpoint", "config.changed", "lr.checkpoint", checkpoint=tmp_path / "evil.pt"
    )
    assert result.outcome("checkpoint.sound").status == "fail"
    assert result.outcome("config.changed").status == "not_applicable"
    assert not marker.exists()


def test_sealed_checkpoint_fits_the_model_it_was_made_of(tmp_path: Path) -> None:
    model = built("training:build")["model"]
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()} | {
        "rng/0/cpu": torch.zeros(4)
    }
    path = Store(tmp_path).save(
        3,
        tensors,
        {"step": 3},
        Health(loss=1.0, level=1.0, steps_watched=3, incidents=0, good=True),
    )
    result = ask(HEALTHY, "checkpoint", checkpoint=path)
    assert {outcome.id: outcome.status for outcome in result.outcomes} == {
        "checkpoint.sound": "pass",
        "checkpoint.fits": "pass",
    }


def test_checkpoint_of_another_model_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "other.pt", torch.nn.Linear(8, 8))
    outcome = ask_one(HEALTHY, "checkpoint.fits", checkpoint=path)
    assert outcome.status == "fail"
    assert (
        "missing: alpha" in outcome.evidence[0]
        and "not in the model: bias, weight" in outcome.evidence[1]
    )


def test_keys_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    config = written(tmp_path, text_loss_weight=2.0, optimizer__use_fused=True)
    outcome = ask_one(HEALTHY, "config.unread", config=config)
    assert outcome.status == "warn"
    assert "2 keys of 13 not read" in outcome.evidence[0]
    assert "optimizer.use_fused, text_loss_weight" in outcome.evidence[0]


def test_accumulation_that_nothing_reads_is_no_accumulation(tmp_path: Path) -> None:
    config = written(tmp_path, training={"num_train_steps": 300, "batch_size": 4, "grad_accum": 4})
    outcome = ask_one(HEALTHY, "checklist.accumulation", config=config)
    assert (outcome.status, outcome.evidence) == (
        "warn",
        ("training.grad_accum=4 is read by nothing",),
    )


def test_numbers_read_as_text_are_found(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text("trainer:\n  lr: 1e-5\n  min_lr: 1.0e-6\n  amp: 'False'\n")
    assert yaml.safe_load(path.read_text())["trainer"]["lr"] == "1e-5"
    outcome = ask(str(path), "config.types", config=None).outcome("config.types")
    assert outcome.status == "fail"
    assert (
        "trainer.lr: '1e-5'" in outcome.evidence[0]
        and "trainer.amp: 'False'" in outcome.evidence[1]
    )


def test_impossible_values_are_found(tmp_path: Path) -> None:
    config = written(tmp_path, optimizer={"lr": -1e-4, "beta2": 9.99}, dropout=float("nan"))
    outcome = ask(str(config), "config.values", config=None).outcome("config.values")
    assert outcome.status == "fail"
    assert outcome.evidence == (
        "optimizer.lr=-0.0001 must be above 0, optimizer.beta2=9.99 must lie between 0 and 1, "
        "dropout is NaN",
    )


def test_full_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        disk_space.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 4000})
    )
    outcome = ask_one(HEALTHY, "disk.space", run_dir=tmp_path / "not" / "there" / "yet")
    assert outcome.status == "fail"
    assert (
        "4 kB free" in outcome.evidence[1] and "2 kept and one being written" in outcome.evidence[0]
    )


def test_too_little_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "available_memory", lambda device: 2000)
    outcome = ask_one(HEALTHY, "memory.estimate")
    assert outcome.status == "fail"
    assert (
        "2 slots a parameter" in outcome.evidence[0] and "2 kB free on cpu" in outcome.evidence[1]
    )


def test_rate_of_a_large_model_is_judged_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_one("tinychat.faults:literal_rate", "checklist.lr").status == "not_applicable"
    monkeypatch.setattr("stepguard.preflight.items.checklist_lr.LARGE", 100)
    assert LARGE > 100
    outcome = ask_one("tinychat.faults:literal_rate", "checklist.lr")
    assert (outcome.status, "0.0005" in outcome.evidence[0]) == ("warn", True)
