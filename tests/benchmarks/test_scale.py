"""The model of a network behaves like one, and the figures on record keep what is promised."""

from __future__ import annotations

import json

import pytest

from benchmarks import scale

SMALL, LARGE = 32, 10**9


@pytest.mark.parametrize("formula", list(scale.FORMULAS.values()))
def test_more_ranks_and_more_bytes_never_take_less(formula: object) -> None:
    assert callable(formula)
    for ranks in (2, 8, 512):
        assert formula(ranks, SMALL) <= formula(2 * ranks, SMALL)
        assert formula(ranks, SMALL) < formula(ranks, LARGE)


def test_small_reduction_goes_by_latency_and_large_one_by_bandwidth() -> None:
    assert scale.all_reduce(1024, SMALL) == pytest.approx(20 * scale.LATENCY, rel=0.01)
    assert scale.all_reduce(8, LARGE) == pytest.approx(1.75 * LARGE / scale.BANDWIDTH, rel=0.01)


def test_gathered_bytes_grow_with_ranks_and_reduced_ones_do_not() -> None:
    gathered = {"all_gather": 1, "all_gather bytes": 100}
    reduced = {"all_reduce": 1, "all_reduce bytes": 100}
    assert scale.modelled(gathered, 512, 0.0)["received (bytes)"] == 511 * 100
    assert scale.modelled(reduced, 512, 0.0)["received (bytes)"] == 100


def test_healthy_step_on_record_has_no_collective_under_ddp_and_one_under_fsdp2() -> None:
    found = json.loads(scale.RESULTS.read_text(encoding="utf-8"))
    for run in found["measured"]:
        healthy = {engine: moments["healthy step"] for engine, moments in run["counts"].items()}
        assert healthy["ddp"] == {}
        assert healthy["fsdp2"]["all_reduce"] == 1
        assert (
            healthy["fsdp2"]["all_reduce bytes"]
            == found["measured"][0]["counts"]["fsdp2"]["healthy step"]["all_reduce bytes"]
        )
