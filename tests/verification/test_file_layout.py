"""The layout of a file: which tensors have values that are read."""

from __future__ import annotations

from pathlib import Path

from stepguard.verification.bounded_file import ProblemList
from stepguard.verification.pickle_machine import PickleContents
from stepguard.verification.reading import FileLayout, Statistics


def test_only_tensors_that_can_be_nonfinite_have_a_segment() -> None:
    layout = FileLayout(Path("m.pt"), "torch zip", 100, ProblemList("m.pt"))
    layout.add_tensor("w", "parameter", "float32", (2,), 64, 64, 8)
    layout.add_tensor("n", "buffer", "int64", (1,), 72, 72, 8)
    layout.add_tensor("empty", "parameter", "float32", (0,), 80, 80, 0)
    assert [tensor.segment is not None for tensor in layout.tensors] == [True, False, False]
    assert layout.tensors[0].seen is None


def test_first_step_of_several_pickles_stays() -> None:
    layout = FileLayout(Path("m.pt"), "torch zip", 100, ProblemList("m.pt"))
    layout.add_contents(PickleContents(step=None))
    layout.add_contents(PickleContents(step=0, rates=[("optimizer/lr", "lr", 0.1)]))
    layout.add_contents(PickleContents(step=9))
    assert layout.step == 0
    assert [(rate.file, rate.name, rate.value) for rate in layout.rates] == [
        ("m.pt", "optimizer/lr", 0.1)
    ]


def test_largest_is_that_of_the_finite_values() -> None:
    assert Statistics(count=3, low=-5.0, high=2.0).largest == 5.0
    assert Statistics(count=1, nan=1).largest == 0.0
