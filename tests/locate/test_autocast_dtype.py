"""The dtype that autocast computes in is seen while the user's code is traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepguard.locate.source import ModuleSpans
from stepguard.locate.tracer import Tracer


def traced(*dtypes: torch.dtype) -> Tracer:
    model = nn.Linear(4, 1)
    spans = ModuleSpans({"": model})
    tracer = Tracer(spans)
    with spans, tracer:
        for dtype in dtypes:
            with torch.autocast("cpu", dtype=dtype):
                model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    return tracer


@pytest.mark.slow
def test_the_dtype_of_the_users_context_is_seen() -> None:
    assert traced(torch.float16).autocast == "float16"


def test_the_first_context_counts() -> None:
    assert traced(torch.bfloat16, torch.float16).autocast == "bfloat16"


def test_nothing_is_seen_without_autocast() -> None:
    assert traced().autocast is None
