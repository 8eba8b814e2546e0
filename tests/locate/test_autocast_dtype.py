"""The autocast dtype of a replayed step, which a dispatch mode cannot see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepguard.locate.evidence import AutocastObserver
from stepguard.locate.source import ModuleSpans
from stepguard.locate.tracer import Tracer


@pytest.mark.slow
def test_the_dtype_of_the_users_context_is_seen_also_under_the_tracer() -> None:
    model = nn.Linear(4, 1)
    observer = AutocastObserver(["cpu"])
    with observer, Tracer(ModuleSpans({})), torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 4))
    assert observer.dtype == "float16"


def test_the_first_context_counts() -> None:
    observer = AutocastObserver(["cpu"])
    with observer:
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                torch.ones(2).abs()
    assert observer.dtype == "bfloat16"


def test_nothing_is_seen_without_autocast_on_the_models_device() -> None:
    observer = AutocastObserver(["cpu"])
    with observer:
        torch.ones(2).abs()
    assert observer.dtype is None


def test_results_are_the_same_as_without_the_observer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    plain = model(x)
    with AutocastObserver(["cpu"]):
        observed = model(x)
    assert torch.equal(plain, observed)
