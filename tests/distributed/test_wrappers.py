"""Real processes over gloo: every wrapper of torch around a model or an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch
from distributed.matrix import Outcome, cell, refused

WORKER = Path(__file__).with_name("wrappers_worker.py")
BAD_STEP, DAMAGED_AT = 5, 2
KINDS = {
    "plain": "DDP",
    "static": "DDP, static graph",
    "unused": "DDP, unused parameters",
    "no_sync": "DDP, accumulation under `no_sync`",
    "compiled": "DDP, compiled",
    "inner": "DDP, guard on `ddp.module`",
    "bf16": "DDP, bf16 hook",
    "fp16": "DDP, fp16 hook",
    "powersgd": "DDP, PowerSGD hook",
    "zero": "`ZeroRedundancyOptimizer`",
}
REFUSED = {
    "join": ("DDP, uneven inputs (`Join`)", "torch's Join"),
    "hook": ("post-local SGD (hook, `PostLocalSGDOptimizer`)", "post_localSGD_hook"),
    "average": ("post-local SGD (hook, `PostLocalSGDOptimizer`)", "PostLocalSGDOptimizer"),
}
"""Under these the ranks make steps of their own, or stop before the others."""
BOTH_LOOPS = ("healthy", "nan")
STEPPED = ("clip", "save", "restore", "rewind", "signal")
"""One loop is enough: the two share this code."""
Outcomes = dict[str, list[Any]]


def _names() -> list[str]:
    names: list[str] = []
    for kind in KINDS:
        for column in BOTH_LOOPS:
            names += [f"{kind}-{column}-{loop}" for loop in ("bare", "step", "watch")]
        names += [f"{kind}-clip-bare", *(f"{kind}-{column}-step" for column in STEPPED)]
    return [*names, "plain-late-step", *(f"{kind}-refused-step" for kind in REFUSED)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Every scenario, run by one pair of processes."""
    out = tmp_path_factory.mktemp("wrappers")
    code, log = launch(WORKER, out, _names(), 240)
    files = {name: [out / f"{name}.{rank}.pt" for rank in (0, 1)] for name in _names()}
    ended = [name for name in files if all(file.exists() for file in files[name])]
    assert code == 0, f"ended {len(ended)} of {len(files)}, last {ended[-1:]}\n{log[-3000:]}"
    return {n: [torch.load(file, weights_only=False) for file in files[n]] for n in files}


def _cells(column: str, loops: tuple[str, ...] = ("step",), **others: Outcome) -> list[Any]:
    """One case for each wrapper and loop; `others`: wrappers for which it ends otherwise."""
    cases: list[Any] = []
    for kind, title in KINDS.items():
        mark = cell(title, column, others.get(kind, "works"))
        cases += [pytest.param(kind, loop, marks=mark, id=f"{kind}-{loop}") for loop in loops]
    return cases


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _quiet(rank: dict[str, Any]) -> bool:
    return bool(rank["armed"]) and rank["told"] == []


@pytest.mark.parametrize(("kind", "loop"), _cells("healthy", ("step", "watch")))
def test_healthy_run_is_bit_identical_to_bare(kind: str, loop: str, outcomes: Outcomes) -> None:
    for guarded, bare in zip(
        outcomes[f"{kind}-healthy-{loop}"], outcomes[f"{kind}-healthy-bare"], strict=True
    ):
        assert _same(guarded["state"], bare["state"])
        assert _quiet(guarded) and guarded["incidents"] == []


@pytest.mark.parametrize(
    ("kind", "loop"),
    _cells("NaN", ("step", "watch")),
)
def test_bad_batch_of_one_rank_costs_that_step_only(
    kind: str, loop: str, outcomes: Outcomes
) -> None:
    ranks = outcomes[f"{kind}-nan-{loop}"]
    for guarded, bare in zip(ranks, outcomes[f"{kind}-nan-bare"], strict=True):
        assert _same(guarded["state"], bare["state"])
        assert _quiet(guarded)
    for guarded in ranks:
        (incident,) = guarded["incidents"]
        assert incident.step == BAD_STEP and incident.reading.bad_ranks == (1,)
        assert incident.origin.rank == 1 and incident.decision.action == "skip"


@pytest.mark.parametrize(("kind", "loop"), _cells("clip"))
def test_clipping_is_that_of_a_bare_loop(kind: str, loop: str, outcomes: Outcomes) -> None:
    for guarded, bare in zip(
        outcomes[f"{kind}-clip-{loop}"], outcomes[f"{kind}-clip-bare"], strict=True
    ):
        assert _same(guarded["state"], bare["state"]) and _quiet(guarded)


@pytest.mark.parametrize(("kind", "loop"), _cells("save"))
def test_state_is_saved_on_all_ranks(kind: str, loop: str, outcomes: Outcomes) -> None:
    first, second = outcomes[f"{kind}-save-{loop}"]
    assert first["path"] is not None and first["path"] == second["path"]
    assert _quiet(first) and _quiet(second)


@pytest.mark.parametrize(("kind", "loop"), _cells("restore"))
def test_restored_run_goes_on_as_the_one_that_was_saved(
    kind: str, loop: str, outcomes: Outcomes
) -> None:
    for back, then in zip(
        outcomes[f"{kind}-restore-{loop}"], outcomes[f"{kind}-save-{loop}"], strict=True
    ):
        assert back["done"] == 3
        assert _same(back["state"], then["state"])


@pytest.mark.parametrize(("kind", "loop"), _cells("rewind"))
def test_nan_in_a_weight_of_one_rank_is_undone_on_all(
    kind: str, loop: str, outcomes: Outcomes
) -> None:
    ranks = outcomes[f"{kind}-rewind-{loop}"]
    for guarded, bare in zip(ranks, outcomes[f"{kind}-healthy-bare"], strict=True):
        (incident,) = guarded["incidents"]
        assert incident.step == DAMAGED_AT and incident.origin.rank == 1
        assert incident.origin.tensor == "param:last.weight"
        assert incident.decision.action == "rewind" and _quiet(guarded)
        assert _same(guarded["state"], bare["state"])


@pytest.mark.parametrize(("kind", "loop"), _cells("signal"))
def test_sigterm_ends_all_ranks_with_a_whole_checkpoint(
    kind: str, loop: str, outcomes: Outcomes
) -> None:
    for rank in outcomes[f"{kind}-signal-{loop}"]:
        assert rank["ended"] == 143 and rank["verified"]


def test_model_that_is_wrapped_after_its_guard_was_built_is_refused(outcomes: Outcomes) -> None:
    for rank in outcomes["plain-late-step"]:
        assert "after its guard was built; wrap it first" in rank["refused"]


def _refused() -> list[Any]:
    return [pytest.param(kind, marks=refused(title)) for kind, (title, _) in REFUSED.items()]


@pytest.mark.parametrize("kind", _refused())
def test_ranks_that_do_not_make_every_step_together_are_refused(
    kind: str, outcomes: Outcomes
) -> None:
    for rank in outcomes[f"{kind}-refused-step"]:
        assert REFUSED[kind][1] in rank["refused"]
