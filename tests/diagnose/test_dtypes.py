"""Ranges of floating-point formats, compared with torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from stepguard.diagnose.case import FORMATS, exp_limit, largest, plain, rounds_to_zero


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_those_of_torch(name: str) -> None:
    info = torch.finfo(getattr(torch, name))
    assert FORMATS[name].largest == info.max
    assert FORMATS[name].smallest == pytest.approx(info.smallest_normal * info.eps, rel=1e-6)


@pytest.mark.parametrize(("value", "vanishes"), [(1e-8, True), (1e-7, False), (0.0, False)])
def test_an_epsilon_rounds_to_zero_in_half_precision_as_in_torch(
    value: float, vanishes: bool
) -> None:
    assert rounds_to_zero(value, "float16") is vanishes
    assert (value > 0 and float(torch.tensor(value, dtype=torch.float16)) == 0.0) is vanishes


def test_names_of_torch_and_complex_formats_lead_to_the_real_one() -> None:
    assert plain("torch.float16") == "float16"
    assert plain("complex64") == "float32"


def test_nothing_is_claimed_about_an_unknown_format() -> None:
    assert largest("int8") == math.inf
    assert exp_limit("int8") == math.inf
    assert not rounds_to_zero(1e-300, "int8")


def test_the_limit_of_an_exponential_is_the_logarithm_of_the_largest_number() -> None:
    limit = exp_limit("float32")
    assert math.isfinite(float(torch.tensor(limit * 0.999).exp()))
    assert math.isinf(float(torch.tensor(limit * 1.001).exp()))
