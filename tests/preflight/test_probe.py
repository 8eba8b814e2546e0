"""The effective precision: of the real step, else of one product in the given context."""

from __future__ import annotations

import torch
from torch import nn

from stepguard.check.inspection import TracedStep, probe_precision
from stepguard.check.subject import FrameworkContext

CPU = torch.device("cpu")
HALF = FrameworkContext(name="half", openers=(lambda: torch.autocast("cpu", dtype=torch.bfloat16),))


def test_products_of_the_step_count_more_than_one_of_ours() -> None:
    step = TracedStep()
    step.dtypes.update({"float16": 3, "float32": 1})
    probe = probe_precision(nn.Linear(2, 2), CPU, HALF, step)
    assert (probe.dtype, probe.autocast) == ("float16", None)
    assert probe.how == "3 of 4 matrix products of the real step on cpu came out as float16"


def test_one_product_in_the_context_without_a_step() -> None:
    probe = probe_precision(nn.Linear(2, 2), CPU, HALF, None)
    assert (probe.dtype, probe.autocast) == ("bfloat16", "bfloat16")
    assert probe.how == "a matrix product in half on cpu came out as bfloat16"
    assert not torch.is_autocast_enabled("cpu")


def test_product_has_the_dtype_of_the_parameters_outside_a_context() -> None:
    probe = probe_precision(nn.Linear(2, 2).double(), CPU, FrameworkContext(), TracedStep())
    assert (probe.dtype, probe.autocast) == ("float64", None)
