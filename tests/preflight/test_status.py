"""The state a run would start in, and when it is called aligned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepguard.check.inspection import CheckContext, Inspection
from stepguard.check.preflight import Subject, alignment, status_facts


def inspect(**parts: Any) -> Inspection:
    return Inspection(Subject(**parts), CheckContext(Path()))


def half() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_places_that_disagree_contradict_without_a_probe() -> None:
    run = inspect(config={"bf16": True}, launcher={"mixed_precision": "fp16"})
    kind, why = alignment(run)
    assert kind == "contradicted"
    assert why[0] == "the configuration (bf16=True) asks for bfloat16"


def test_nothing_is_proven_without_a_model_or_a_wish() -> None:
    assert alignment(inspect(config={"bf16": True}))[0] == "unproven"
    kind, why = alignment(inspect(model=nn.Linear(2, 2)))
    assert kind == "unproven"
    assert why[0].endswith("that names a precision") and why[1].endswith("came out as float32")


def test_probe_decides_between_aligned_and_contradicted() -> None:
    config = {"bf16": True}
    assert alignment(inspect(model=nn.Linear(2, 2), config=config, autocast=half))[0] == "aligned"
    kind, why = alignment(inspect(model=nn.Linear(2, 2), config=config))
    assert kind == "contradicted" and why[0].endswith("came out as float32")
    assert why[1].endswith("asks for bfloat16")


def test_facts_are_of_the_live_objects() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = inspect(model=model, optimizer=optimizer, autocast=half, launcher={"gpu_ids": "all"})
    facts = dict(status_facts(run))
    assert facts["AMP enabled"] == "yes, autocast to bfloat16"
    assert facts["parameters"] == "6 float32"
    assert facts["learning rate"] == "0.5 now, 0.5 at its peak"
    assert (facts["GradScaler"], facts["GPU IDs"]) == ("none", "all")
    assert dict(status_facts(inspect(config={"lr": 0.1}))) == {
        "learning rate": "lr=0.1 (configured)"
    }
