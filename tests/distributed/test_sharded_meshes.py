"""Four real processes over gloo on meshes of two dimensions: FSDP2 in pairs with copies (HSDP),
tensor parallel in pairs with FSDP2 over them, and parameters on several meshes at once.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch
from scenes import difference

WORKER = Path(__file__).with_name("sharded_worker.py")
RANKS = range(4)
TROUBLED = [
    *map("-".join, product(["trouble"], ["step", "watch"], ["hsdp", "both"], ["input"])),
    "trouble-step-hsdp-backward",
    "trouble-step-meshes-input",
]
HEALTHY = [
    *map("-".join, product(["healthy"], ["step", "watch"], ["hsdp", "both"], ["clip"])),
    "healthy-step-meshes-clip",
]
DAMAGED = ["damage-step-hsdp-weight", "damage-step-both-weight"]
BAD_STEPS = [2, 3]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every scenario, run by one set of processes; what each rank ended with."""
    out = tmp_path_factory.mktemp("meshes")
    names = [*HEALTHY, *TROUBLED, *DAMAGED]
    code, log = launch(WORKER, out, names, 150, ranks=len(RANKS))
    assert code == 0, log[-3000:]
    return {
        name: [torch.load(out / f"{name}.{rank}.pt", weights_only=False) for rank in RANKS]
        for name in names
    }


def _parts(run: dict[str, Any]) -> dict[str, Any]:
    return {key: run[key] for key in ("model", "optimizer")}


@pytest.mark.parametrize("name", [name for name in HEALTHY if "meshes" not in name])
def test_healthy_ranks_of_a_mesh_are_the_same_as_bare_ones_also_where_the_guard_clips(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        guarded, bare = rank["guarded"], rank["reference"]
        assert guarded["armed"] and guarded["incidents"] == []
        assert difference(_parts(guarded), _parts(bare)) == ""
        assert guarded["said"] == bare["said"]
        assert bare["said"][1][1] > 0.7


def test_gradients_of_several_meshes_are_clipped_by_the_norm_of_all_of_them(
    outcomes: dict[str, list[Any]],
) -> None:
    ranks = outcomes["healthy-step-meshes-clip"]
    first = [norm for _, norm in ranks[0]["guarded"]["said"]]
    for rank in ranks:
        guarded, bare = rank["guarded"], rank["reference"]
        assert guarded["armed"] and guarded["incidents"] == []
        norms = [norm for _, norm in guarded["said"]]
        assert norms == first
        # torch itself refuses to mix meshes, so the reference adds up whole gradients in float64
        assert norms == pytest.approx([norm for _, norm in bare["said"]], rel=1e-6)
        for own, expected in zip(guarded["model"], bare["model"], strict=True):
            assert torch.allclose(own, expected, atol=1e-6)
    assert max(first) > 0.7


@pytest.mark.parametrize("name", TROUBLED)
def test_trouble_of_some_ranks_of_a_mesh_is_vetoed_on_all(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        guarded = rank["guarded"]
        assert guarded["armed"] and guarded["halted"] is None
        assert difference(_parts(guarded), _parts(rank["reference"])) == ""
        told = [(incident["step"], incident["action"]) for incident in guarded["incidents"]]
        assert told == [(step, "skip") for step in BAD_STEPS]


@pytest.mark.parametrize("name", [name for name in TROUBLED if name.endswith("input")])
def test_ranks_of_a_mesh_with_the_bad_input_are_named(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    # tensor parallel ranks compute one batch together: both have it
    blamed = (2, 3) if "both" in name else (1,)
    for rank in outcomes[name]:
        for incident in rank["guarded"]["incidents"]:
            assert incident["ranks"] == blamed
            assert incident["rank"] == blamed[0]


@pytest.mark.parametrize("name", DAMAGED)
def test_bad_shard_of_a_mesh_is_named_with_its_rank_and_all_recover(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    # of HSDP another pair of ranks holds a copy; else all go back
    action = "heal" if "hsdp" in name else "rewind"
    for rank in outcomes[name]:
        guarded = rank["guarded"]
        assert guarded["armed"] and guarded["halted"] is None
        (incident,) = guarded["incidents"]
        assert (incident["step"], incident["action"]) == (2, action)
        assert (incident["rank"], incident["ranks"]) == (1, (1,))
        assert difference(_parts(guarded), _parts(rank["reference"])) == ""
