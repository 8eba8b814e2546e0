"""Rule SG202: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    FROM_BATCH,
    OWN_OPTIMIZER,
    Bad,
    at,
    at_second,
    codes,
    found,
    origin,
    out,
)
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin("forward", "aten.log", at_second("self", -0.5, -0.5, 2.0), source="train.py:88")
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG202", where, **reading).evidence)
    for fragment in ("above 0", "-0.5 at index (1,)", "train.py:88"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "log of a diffusion time that is 0": (
        origin(
            "forward",
            "aten.log",
            at("self", 0.0, 0.0, 0.9, zeros=1),
            module="time_embedding",
            output=out(neginf=1),
            evidence=Evidence(argument="zero", argument_root="batch:t", turned_nan_by="aten.sin"),
        ),
        {},
    ),
    "logit of 1": (
        origin("forward", "aten.logit", at("self", 1.0, 0.1, 1.0), output=out(posinf=1)),
        {},
    ),
    "log1p of -1": (
        origin("loss", "aten.log1p", at("self", -1.0, -1.0, 0.2), output=out(neginf=1)),
        {},
    ),
    "binary cross entropy by hand": (
        origin(
            "loss",
            "aten.log",
            at("self", 0.0, 0.0, 1.0, zeros=3),
            output=out(neginf=3),
            evidence=Evidence(
                argument="zero", argument_from="aten.sigmoid", turned_nan_by="aten.mul"
            ),
        ),
        {},
    ),
    "gradient of a log that was gathered away": (
        origin(
            "backward",
            "aten.div",
            at("self", 0.0, -0.3, 0.0, zeros=6),
            at("other", 0.0, 0.0, 1.0, zeros=6),
            node="LogBackward0",
            output=out(nan=6),
        ),
        BACKWARD,
    ),
    "a logarithm of 0 in an optimizer": (
        origin("optimizer", "aten.log", at("self", 0.0, 0.0, 3.6, zeros=1), output=out(neginf=1)),
        OWN_OPTIMIZER,
    ),
    "log of a cosine that is rounded below 0": (
        origin(
            "loss",
            "aten.log",
            at("self", -4.4e-8, -4.4e-8, 0.95),
            output=out(nan=1),
            evidence=FROM_BATCH | Evidence(argument_from="aten.cos"),
        ),
        {},
    ),
    "digamma at its pole": (
        origin("loss", "aten.digamma", at("self", 0.0, 0.0, 3.0, zeros=1), output=out(neginf=1)),
        {},
    ),
    "logdet of a mirror": (
        origin(
            "forward",
            "aten.where",
            output=out((), nan=1),
            evidence=Evidence(chosen_by="aten._linalg_slogdet"),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG202"


SILENT: dict[str, Bad] = {
    "a positive argument": (origin("forward", "aten.log", at_second("self", 2.0, 0.1, 2.0)), {}),
    "log1p of -0.5": (origin("forward", "aten.log1p", at_second("self", -0.5, -0.5, 2.0)), {}),
    "a discarded branch": (
        origin(
            "forward",
            "aten.log",
            at_second("self", 0.0, 0.0, 1.0),
            evidence=Evidence(unselected=True),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG202" not in codes(where, **reading)
