"""Real processes over gloo that do not all come: nobody hangs, and guarded weights stay finite."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch

WORKER = Path(__file__).with_name("apart_worker.py")
LOOPS = ["step", "watch"]
WRAPS = ["ddp", "manual"]
BAD_STEP, STEPS = 2, 6
TROUBLE = ["-".join(("own_trouble", *p)) for p in product(["buffer", "rate"], LOOPS, WRAPS)]
HEALTHY = ["-".join(("own_trouble", "none", *p)) for p in product(LOOPS, WRAPS)]
LAST_ONE = ["-".join(("last_look", *p, "one")) for p in product(LOOPS, WRAPS)]
LAST_ALL = ["last_look-step-ddp-all"]
BORN = ["born-step", "born-watch"]
LATE = ["late-update-step", "late-update-watch", "late-rate-watch", "late-fused_rate-watch"]
LATE += ["late-gradient-watch"]
OVERFLOW = ["-".join(("overflow", *p)) for p in product(LOOPS, ["one", "all"], ["plain", "fused"])]
RANK0 = ["-".join(("rank0", *p)) for p in product(["closed", "guard"], WRAPS)]
UNEVEN = ["joined-step", "joined-watch", "local_step-step", "local_step-watch"]
SINGLE = ["rank0_save-ddp", "rank0_save-manual", "rank0_reads"]
SINGLE += ["-".join(p) for p in product(["rank0_restore", "rank0_save_bad"], LOOPS)]
SUBGROUPS = ["subgroup-step", "subgroup-watch"]
# Without DDP a guard that only rank 0 builds must not shift those after it: first.
NAMES = ["rank0-guard-manual", *HEALTHY, *TROUBLE, *LAST_ONE, *LAST_ALL, *BORN, *LATE]
NAMES += [*OVERFLOW, *UNEVEN, *SINGLE, *(name for name in RANK0 if name not in NAMES)]
Outcomes = dict[str, list[Any]]


def _run(out: Path, names: list[str], ranks: int) -> Outcomes:
    code, log = launch(WORKER, out, names, 150, ranks)
    files = {name: [out / f"{name}.{rank}.pt" for rank in range(ranks)] for name in names}
    ended = [name for name in names if all(file.exists() for file in files[name])]
    assert code == 0, f"ended {len(ended)} of {len(names)}, last {ended[-1:]}\n{log[-3000:]}"
    return {name: [torch.load(file, weights_only=False) for file in files[name]] for name in names}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _run(tmp_path_factory.mktemp("apart"), NAMES, 2)


def _finite(rank: dict[str, Any]) -> bool:
    return all(bool(weight.isfinite().all()) for weight in rank["weights"])


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(map(torch.equal, first["weights"], second["weights"]))


@pytest.mark.parametrize("name", HEALTHY)
def test_buffer_that_is_infinite_on_purpose_costs_no_step(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert rank["steps"] == STEPS
        assert rank["incidents"] == []
        assert rank["armed"]


@pytest.mark.parametrize("name", TROUBLE)
def test_what_one_rank_sees_is_an_incident_on_all(name: str, outcomes: Outcomes) -> None:
    kind = "nonfinite_buffer" if "buffer" in name else "lr_mismatch"
    for rank in outcomes[name]:
        assert [incident[:3] for incident in rank["incidents"]] == [(BAD_STEP, kind, (1,))]
        assert rank["steps"] == STEPS - 1
        assert rank["armed"]
    assert _same(*outcomes[name])


@pytest.mark.parametrize("name", LAST_ONE)
def test_last_look_of_one_rank_is_told_by_it_alone(name: str, outcomes: Outcomes) -> None:
    healthy, hurt = outcomes[name]
    assert healthy["incidents"] == []
    assert [incident[1] for incident in hurt["incidents"]] == ["nonfinite_parameter"]
    assert healthy["armed"] and hurt["armed"]


@pytest.mark.parametrize("name", LAST_ALL)
def test_last_look_of_all_ranks_goes_back_together(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert [incident[3] for incident in rank["incidents"]] == ["rewind"]
        assert _finite(rank)


@pytest.mark.parametrize("name", BORN)
def test_update_that_makes_nan_on_one_rank_is_undone_on_all(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert rank["incidents"] == [(BAD_STEP, "nonfinite_parameter", (1,), "undo")]
        assert rank["armed"]
        assert all(map(torch.equal, rank["weights"], rank["before"]))


@pytest.mark.parametrize("name", OVERFLOW)
def test_loss_that_overflows_in_its_last_sum_is_a_step(name: str, outcomes: Outcomes) -> None:
    for place, rank in enumerate(outcomes[name]):
        assert rank["infinite"] == (0 if "one" in name and place == 0 else STEPS)
        assert rank["incidents"] == [] and rank["armed"]
        assert all(map(torch.equal, rank["weights"], rank["bare"]))
    assert _same(*outcomes[name])


@pytest.mark.parametrize("name", LATE)
def test_what_one_rank_finds_too_late_takes_all_of_them_back(name: str, outcomes: Outcomes) -> None:
    healthy, hurt = outcomes[name]
    for rank in (healthy, hurt):
        assert rank["armed"]
        assert _finite(rank)
        step, _, ranks, action = rank["incidents"][-1]
        assert (step, ranks, action) == (BAD_STEP + 1, (1,), "rewind")
    assert len(healthy["incidents"]) == 1
    assert [incident[0] for incident in hurt["incidents"]] == [BAD_STEP, BAD_STEP + 1]
    assert _same(healthy, hurt)


@pytest.mark.parametrize("name", RANK0)
def test_guard_that_is_left_alone_says_so_and_takes_no_nan(name: str, outcomes: Outcomes) -> None:
    guarded = outcomes[name][0]
    assert _finite(guarded)
    assert not guarded["armed"]
    assert len(guarded["told"]) == 1
    assert "rank 1" in guarded["told"][0]
    assert "did not come" in guarded["told"][0] or "has closed its guard" in guarded["told"][0]


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_that_make_steps_of_their_own_are_not_guarded(name: str, outcomes: Outcomes) -> None:
    what = "torch's Join" if "joined" in name else "reduced no gradients (no_sync, local SGD)"
    for rank in outcomes[name]:
        assert not rank["armed"] and _finite(rank)
        assert any(what in told for told in rank["told"])


def test_one_rank_saves_what_all_hold_and_says_what_is_missing(outcomes: Outcomes) -> None:
    first, other = outcomes["rank0_save-ddp"]
    assert first["alone"].name == "step-1"
    assert first["waits"] == 0
    assert first["missing"] == "random numbers, buffers of rank 1"
    for rank in (first, other):
        assert rank["saved"] and rank["armed"]
        assert rank["restored"] == 1
    assert _same(first, other)


@pytest.mark.parametrize("loop", LOOPS)
def test_save_on_one_rank_leaves_a_bad_fused_step_to_all_of_them(
    loop: str, outcomes: Outcomes
) -> None:
    first, other = outcomes[f"rank0_save_bad-{loop}"]
    early, saved = first["saved"]
    # a watched loop whose forward writes buffers has all ranks deal with it inside the step
    assert (early is None) == (loop == "step") and saved.name == f"step-{STEPS}"
    for rank in (first, other):
        assert rank["incidents"] == [(BAD_STEP, "nonfinite_input", (1,), "skip")]
        assert rank["armed"]
    assert _same(first, other)


def test_save_by_all_ranks_holds_what_each_has_of_its_own(outcomes: Outcomes) -> None:
    for rank in outcomes["rank0_save-ddp"]:
        assert rank["held"]["rng"].keys() == {"0", "1"}
        assert "model/seen" in rank["held"]["ranks"]["1"]["has"]
        assert rank["done"] == STEPS and rank["drawn"] and rank["seen"]


@pytest.mark.parametrize("loop", LOOPS)
def test_restore_on_one_rank_is_refused_once_another_trains(loop: str, outcomes: Outcomes) -> None:
    first, other = outcomes[f"rank0_restore-{loop}"]
    assert "rank 1 has begun to train, so it did not come" in first["refused"]
    assert first["armed"] and other["armed"] and _same(first, other)


def test_save_on_one_rank_is_refused_where_weights_may_differ(outcomes: Outcomes) -> None:
    for rank in outcomes["rank0_save-manual"]:
        assert rank["alone"] is None
        assert rank["saved"] and rank["armed"]
        assert "all ranks have to call guard.save(), for nothing keeps" in rank["journal"]


@pytest.mark.parametrize("wrap", WRAPS)
def test_restore_on_one_rank_is_refused(wrap: str, outcomes: Outcomes) -> None:
    assert "rank 1 did not come" in outcomes[f"rank0_save-{wrap}"][0]["refused"]


def test_result_of_a_fused_step_may_be_read_on_one_rank(outcomes: Outcomes) -> None:
    first, second = outcomes["rank0_reads"]
    assert [committed for committed, _ in first["seen"]] == [
        step != BAD_STEP for step in range(STEPS)
    ]
    for rank in (first, second):
        assert [incident[:3] for incident in rank["incidents"]] == [
            (BAD_STEP, "nonfinite_input", (1,))
        ]
        assert rank["armed"]
    assert _same(first, second)


def test_pairs_of_ranks_decide_for_themselves(tmp_path: Path) -> None:
    outcomes = _run(tmp_path, SUBGROUPS, 4)
    for name in SUBGROUPS:
        *first, third, fourth = outcomes[name]
        for rank in first:
            assert (rank["steps"], rank["incidents"]) == (STEPS, [])
        for rank in (third, fourth):
            assert [incident[:3] for incident in rank["incidents"]] == [
                (BAD_STEP, "nonfinite_input", (3,))
            ]
            assert rank["armed"]
        assert _same(*first)
        assert _same(third, fourth)
