"""Rule SG702: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, Bad, at_second, codes, found, origin
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin("backward", reproduced=False)
    reading: dict[str, Any] = BACKWARD | {"bad_grads": ("head.weight",), "bad_ranks": (2,)}
    said = " | ".join(found("SG702", where, **reading).evidence)
    for fragment in ("replayed", "head.weight", "rank 2"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "a replay that is clean": (origin("backward", reproduced=False, evidence=Evidence()), BACKWARD),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG702"


SILENT: dict[str, Bad] = {
    "a replay that shows it": (
        origin("forward", "aten.log", at_second("self", 0.0, 0.0, 1.0), reproduced=True),
        {},
    ),
    "no replay": (origin("backward", reproduced=None), BACKWARD),
    "a graph that only fails compiled": (
        origin("forward", reproduced=False, evidence=Evidence(compiled_only=True)),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG702" not in codes(where, **reading)


def test_not_reproduced_names_the_loss_function_before_hardware() -> None:
    where = origin(
        "loss", reproduced=False, evidence=Evidence(same_bits=True, moves=("the generator `own`",))
    )
    finding = found("SG702", where)
    assert (
        finding.evidence[0]
        == "not reproduced: the loss function is probably not a function of its batch"
    )
    assert "the generator `own`" in finding.evidence[1]
    assert "hardware" in finding.evidence[-1]
    steady = origin("loss", reproduced=False, evidence=Evidence(same_bits=True))
    assert (finding.certainty, found("SG702", steady).certainty) == ("likely", "likely")
