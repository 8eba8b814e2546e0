"""Rule SG205: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import Bad, codes, found, number, origin, out, tensor
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "loss",
        "aten.std",
        tensor("self", (1,), 0.7, 0.7),
        number("correction", 1),
        output=out((), nan=1),
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG205", where, **reading).evidence)
    for fragment in ("1 element", "correction=1", "0.7"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "advantages of a group of one": (
        origin(
            "loss",
            "aten.std",
            tensor("self", (1,), 0.7, 0.7),
            output=out((), nan=1),
            evidence=Evidence(reduced_elements=1),
        ),
        {},
    ),
    "variance over a batch of one": (
        origin(
            "forward", "aten.var_mean", tensor("self", (1, 4), -2.0, 1.5), output=out((4,), nan=4)
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG205"


SILENT: dict[str, Bad] = {
    "a statistic whose squares overflow": (
        origin(
            "forward", "aten.var", tensor("self", (8, 64), -1e25, 1e25), output=out((8,), nan=8)
        ),
        {},
    ),
    "an infinite element": (
        origin(
            "forward",
            "aten.std",
            tensor("self", (1,), 0.0, 1.0, posinf=1),
            output=out((), nan=1),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG205" not in codes(where, **reading)
