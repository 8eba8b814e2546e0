"""Checkpoints that are damaged, hostile or of another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from preflight.asking import HEALTHY, ask, ask_one, built, saved
from stepguard.checkpoints import Health, Store


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
