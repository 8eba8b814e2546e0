"""Real pipeline stages and experts over gloo: one decision, and each rank gets its own back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.launch import launch
from distributed.matrix import cell, refused
from stepguard import Guard, watch
from stepguard._errors import ConfigError

WORKER = Path(__file__).with_name("parallel_worker.py")
BAD_STEP, DAMAGED_AT, SAVED_AT = 5, 3, 4
PIPELINE, EXPERT = "pipeline (GPipe, 1F1B), `watch` on each stage", "expert parallel"
CASES = [("gpipe", "watch"), ("1f1b", "watch"), ("expert", "step"), ("expert", "watch")]
COLUMNS = ("healthy", "nan", "clip", "save", "restore", "rewind")
SIGNALLED = ["expert-signal-step", "gpipe-signal-watch", "1f1b-signal-watch"]
Outcomes = dict[str, list[Any]]


def _names() -> list[str]:
    names: list[str] = []
    for kind in ("gpipe", "1f1b", "expert"):
        names += [f"{kind}-{column}-bare" for column in ("healthy", "nan", "clip")]
    for kind, loop in CASES:
        names += [f"{kind}-{column}-{loop}" for column in COLUMNS]
    names += SIGNALLED
    return names


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    out = tmp_path_factory.mktemp("parallel")
    code, log = launch(WORKER, out, _names(), 150)
    assert code == 0, log[-3000:]
    found: Outcomes = {}
    for name in _names():
        found[name] = [torch.load(out / f"{name}.{r}.pt", weights_only=False) for r in (0, 1)]
    return found


def _cells(column: str) -> list[Any]:
    cases: list[Any] = []
    for kind, loop in CASES:
        mark = cell(EXPERT if kind == "expert" else PIPELINE, column)
        cases.append(pytest.param(kind, loop, marks=mark, id=f"{kind}-{loop}"))
    return cases


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _as_bare(outcomes: Outcomes, kind: str, column: str, loop: str) -> bool:
    guarded, bare = outcomes[f"{kind}-{column}-{loop}"], outcomes[f"{kind}-{column}-bare"]
    assert all(rank["armed"] and rank["told"] == [] for rank in guarded)
    return all(_same(a["state"], b["state"]) for a, b in zip(guarded, bare, strict=True))


@pytest.mark.parametrize(("kind", "loop"), _cells("healthy"))
def test_healthy_run_is_bit_identical_to_bare(kind: str, loop: str, outcomes: Outcomes) -> None:
    assert _as_bare(outcomes, kind, "healthy", loop)
    assert all(rank["incidents"] == [] for rank in outcomes[f"{kind}-healthy-{loop}"])


@pytest.mark.parametrize(("kind", "loop"), _cells("clip"))
def test_clipping_is_that_of_a_bare_loop(kind: str, loop: str, outcomes: Outcomes) -> None:
    assert _as_bare(outcomes, kind, "clip", loop)


@pytest.mark.parametrize(("kind", "loop"), _cells("NaN"))
def test_bad_row_costs_that_step_and_names_the_rank_it_came_in_by(
    kind: str, loop: str, outcomes: Outcomes
) -> None:
    assert _as_bare(outcomes, kind, "nan", loop)
    fed_by = 1 if kind == "expert" else 0
    for rank in outcomes[f"{kind}-nan-{loop}"]:
        (incident,) = rank["incidents"]
        assert incident.step == BAD_STEP and incident.decision.action == "skip"
        assert incident.origin.rank == fed_by and incident.origin.phase == "input"


@pytest.mark.parametrize(("kind", "loop"), _cells("rewind"))
def test_nan_in_the_weights_of_one_rank_goes_back_on_all(
    kind: str, loop: str, outcomes: Outcomes
) -> None:
    for rank in outcomes[f"{kind}-rewind-{loop}"]:
        (incident,) = rank["incidents"]
        assert incident.step == DAMAGED_AT and incident.decision.action == "rewind"
        assert incident.origin.rank == 1 and incident.origin.tensor.startswith("param:")
        assert rank["armed"]
        assert all(bool(value.isfinite().all()) for value in rank["state"].values())


@pytest.mark.parametrize(("kind", "loop"), _cells("save"))
def test_every_rank_saves_into_one_checkpoint(kind: str, loop: str, outcomes: Outcomes) -> None:
    first, second = outcomes[f"{kind}-save-{loop}"]
    assert first["path"] is not None and first["path"] == second["path"]


@pytest.mark.parametrize(("kind", "loop"), _cells("restore"))
def test_every_rank_goes_on_with_its_own_weights(kind: str, loop: str, outcomes: Outcomes) -> None:
    for back, then in zip(
        outcomes[f"{kind}-restore-{loop}"], outcomes[f"{kind}-save-{loop}"], strict=True
    ):
        assert back["done"] == SAVED_AT and _same(back["state"], then["state"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("expert-signal-step", marks=cell(EXPERT, "signal")),
        pytest.param("gpipe-signal-watch", marks=cell(PIPELINE, "signal")),
        pytest.param("1f1b-signal-watch", marks=cell(PIPELINE, "signal")),
    ],
)
def test_sigterm_ends_all_ranks_with_a_whole_checkpoint(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert rank["ended"] == 143 and rank["verified"]


def _named_like(package: str, name: str) -> nn.Module:
    # the packages need a GPU; a guard tells them by the package of their classes
    kind = type(name, (nn.Linear,), {"__module__": f"{package}.runtime"})
    found: nn.Module = kind(1, 1)
    return found


@pytest.mark.parametrize(
    ("package", "name"),
    [
        pytest.param("deepspeed", "DeepSpeed", marks=refused("DeepSpeed")),
        pytest.param("megatron", "Megatron", marks=refused("Megatron")),
    ],
)
@pytest.mark.parametrize("make", [Guard, watch])
def test_engine_with_an_update_of_its_own_is_refused(make: Any, package: str, name: str) -> None:
    model = _named_like(package, f"{name}Engine")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"{name}Engine is {name}'s: .*stepguard.verify"):
        make(model, optimizer)
