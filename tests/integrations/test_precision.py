"""The precision a Trainer should use on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from stepguard.integrations.transformers import CPU_SIGNS, half_precision


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
