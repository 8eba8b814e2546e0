"""The precision a Trainer should use on this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepguard.integrations import _precision
from stepguard.integrations.transformers import half_precision


@pytest.mark.parametrize(
    ("gpu", "native", "cpu", "expected"),
    [
        (True, True, False, {"bf16": True}),
        (True, False, True, {"fp16": True}),
        (False, False, True, {"bf16": True}),
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
    for sign in _precision.CPU_SIGNS:
        found: Any = lambda: cpu  # noqa: E731
        monkeypatch.setattr(torch.cpu, sign, found)
    assert half_precision() == expected
