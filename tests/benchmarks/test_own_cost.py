"""The own cost of every driver is measured beside the idioms. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import own_cost


@pytest.mark.slow
def test_every_loop_is_measured_at_every_size(tmp_path: Path) -> None:
    target = tmp_path / "own_cost.json"
    assert own_cost.main(["--quick", "--output", str(target)]) == 0
    data = json.loads(target.read_text(encoding="utf-8"))
    measured = {(row["loop"], row["tensors"], row["fused"]) for row in data["rows"]}
    assert len(measured) == len(data["rows"]) == 9 * 2 * 2
    assert all(row["step_us"] > 0 for row in data["rows"])
    assert [row["loop"] for row in data["frameworks"]] == [
        "transformers Trainer",
        "Lightning Trainer",
    ]
    assert {line["loop"] for line in data["fitted"]} == set(own_cost.OURS)


def test_fit_goes_through_the_smallest_and_the_largest_model() -> None:
    rows = []
    for name in own_cost.OURS:
        for fused in (False, True):
            for tensors, own in ((6, 106.0), (40, 300.0), (400, 500.0)):
                rows.append({"loop": name, "tensors": tensors, "fused": fused, "own_us": own})
    line = own_cost.fitted(rows)[0]
    assert line["us_per_step"] == 100.0 and line["ns_per_tensor"] == 1000.0
    assert line["one_per_cent_from_ms"] == {6: 10.6, 40: 30.0, 400: 50.0}
