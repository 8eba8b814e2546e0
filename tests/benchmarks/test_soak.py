"""A short soak: two real ranks, every kind of fault, unattended."""

from __future__ import annotations

from benchmarks.soak import KINDS, play

STEPS, EVERY = 400, 20


def test_two_ranks_outlast_every_kind_of_fault() -> None:
    fine = play("no fault", 0, STEPS, EVERY)[0]
    ranks = play("guarded", 0, STEPS, EVERY)
    for rank in ranks:
        assert set(rank["kinds"]) == set(KINDS)
        assert rank["stopped"] == ""
        assert rank["armed"]
        assert rank["finite"]
        assert {"skip", "retry", "heal", "rewind"} <= set(rank["decisions"])
        assert rank["loss"] < 1.05 * fine["loss"]
    assert ranks[0]["decisions"] == ranks[1]["decisions"]
