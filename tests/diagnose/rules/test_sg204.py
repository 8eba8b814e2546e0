"""Rule SG204: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, Bad, codes, found, origin, out, tensor
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "forward",
        "aten._softmax",
        tensor("self", (2, 4, 6), -1.0, 1.0, neginf=12),
        output=out((2, 4, 6), nan=12),
        evidence=Evidence(masked_rows=2, rows=8),
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG204", where, **reading).evidence)
    for fragment in ("2 rows of 8", "12 of 48 elements -inf"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "logsumexp over a masked row": (
        origin(
            "backward",
            "aten.sub",
            tensor("self", (3, 4), -2.1, 1.5, neginf=4),
            tensor("other", (3, 1), 1.0, 1.9, neginf=1),
            node="LogsumexpBackward0",
            output=out((3, 4), nan=4),
        ),
        BACKWARD,
    ),
    "hand-written softmax over a masked row": (
        origin(
            "forward",
            "aten.sub",
            tensor("self", (3, 4), -2.1, 1.5, neginf=4),
            tensor("other", (3, 1), 0.1, 1.5, neginf=1),
            output=out((3, 4), nan=4),
        ),
        {},
    ),
    "attention kernel with a masked row": (
        origin(
            "forward",
            "aten._scaled_dot_product_flash_attention_for_cpu",
            tensor("query", (1, 1, 3, 4), -1.0, 1.0),
            tensor("attn_mask", (1, 1, 3, 3), 0.0, 0.0, neginf=3),
            output=out((1, 1, 3, 4), nan=4),
            evidence=Evidence(masked_rows=1),
        ),
        {},
    ),
    "log-sum of two terms that are both -inf": (
        origin(
            "backward",
            "aten.sub",
            tensor("self", (4, 3), -2.4, -1.3, neginf=2),
            tensor("other", (4, 3), -2.4, -1.3, neginf=5),
            output=out((4, 3), nan=1, posinf=4, neginf=1),
            node="LogaddexpBackward0",
            evidence=Evidence(intended_inf=True),
        ),
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG204"


SILENT: dict[str, Bad] = {
    "a causal mask with one free key a row": (
        origin(
            "forward",
            "aten._softmax",
            tensor("self", (4, 4), -1.0, 1.0, neginf=2, posinf=1),
            output=out(nan=4),
        ),
        {},
    ),
    "finite scores": (
        origin("forward", "aten._softmax", tensor("self", (4, 4), -1.0, 1.0)),
        {},
    ),
    "a difference of two vectors of scores": (
        origin(
            "loss",
            "aten.sub",
            tensor("self", (4,), 0.0, 1.0, neginf=1),
            tensor("other", (4,), 0.0, 1.0, neginf=1),
            output=out(nan=1),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG204" not in codes(where, **reading)
