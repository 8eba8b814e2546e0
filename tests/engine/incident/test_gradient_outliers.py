"""Outliers, opt-in: one tensor's gradient far above all it has been is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stepguard
from scenes import (
    LOOPS,
    Scene,
    bare,
    batches,
    difference,
    grouped,
    noisy_net,
    plain_net,
    quiet,
    state_of,
)
from stepguard import Guard
from stepguard.diagnose import RunFacts, diagnose
from stepguard.engine.incident import gradient_outliers
from stepguard.engine.incident.run_facts import run_facts
from stepguard.journal import read_run
from stepguard.records import Incident, Reading, Verdict
from stepguard.sentinel.gradients import Packet

DATA = batches(60)
AT = 45
TIMES = 1e5


def scene(*, fused: bool = False, optimizer: str = "AdamW") -> Scene:
    model = plain_net()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, fused=fused)
    return Scene(model, made)


def with_spike(at: Scene, batch_at: int = AT) -> None:
    """At one batch the gradient of the last layer's bias is enormous: its loss adds a multiple of
    that bias.
    """

    def loss(made: Scene, batch: Any) -> Tensor:
        inputs, targets = batch
        out = torch.nn.functional.cross_entropy(made.model(inputs), targets)
        if batch is DATA[batch_at]:
            bias = list(made.model.parameters())[-1]
            out = out + TIMES * (bias - bias.detach()).sum()
        return out

    at.loss = loss


def run(mode: str, at: Scene, config: Any, upto: int = AT + 1) -> Any:
    return LOOPS[mode](at, grouped(DATA[:upto], 1), config)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", LOOPS)
@pytest.mark.parametrize("setting", [None, "note"])
def test_healthy_run_is_bit_identical(setting: Any, mode: str, fused: bool) -> None:
    at, plain = scene(fused=fused), scene(fused=fused)
    run(mode, at, quiet(outliers=setting), 60)
    bare(plain, grouped(DATA, 1))
    assert difference(state_of(at), state_of(plain)) == ""


@pytest.mark.parametrize("mode", LOOPS)
def test_note_names_the_parameter_and_changes_nothing(mode: str, tmp_path: Path) -> None:
    at, plain = scene(), scene()
    with_spike(at)
    with_spike(plain)
    run(mode, at, quiet(outliers="note", run_dir=tmp_path))
    bare(plain, grouped(DATA[: AT + 1], 1))
    assert difference(state_of(at), state_of(plain)) == ""
    (said,) = [n for n in read_run(tmp_path).notes if n.get("kind") == "outlier"]
    assert said["step"] == AT and "2.bias" in said["summary"] and "2.weight" not in said["summary"]
    assert "reported, nothing done" in said["summary"]


def test_first_steps_say_nothing(tmp_path: Path) -> None:
    at = scene()
    with_spike(at, gradient_outliers.FEWEST - 1)
    run("step", at, quiet(outliers="note", run_dir=tmp_path))
    assert [
        n
        for n in read_run(tmp_path).notes
        if n.get("kind") == "outlier" and n["step"] < gradient_outliers.FEWEST
    ] == []


def test_outliers_need_no_wait_of_their_own() -> None:
    settings: tuple[Any, ...] = (None, "note")
    for setting in settings:
        at = scene()
        with Guard(at.model, at.optimizer, config=quiet(outliers=setting)) as guard:
            guard.step(at.loss_fn, DATA[0])
            before = Packet.fetched
            for batch in DATA[1:11]:
                guard.step(at.loss_fn, batch)
            assert Packet.fetched == before + 10


def test_buffers_and_sparse_or_missing_gradients_are_no_trouble() -> None:
    model = torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(5, 3, sparse=True), "rest": noisy_net()}
    )
    unused = torch.nn.Linear(2, 2)
    model["unused"] = unused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_fn(batch: Any) -> Tensor:
        return model["rest"](batch[0]).square().mean() + model["table"](batch[1]).square().mean()

    with stepguard.Guard(model, optimizer, config=quiet(outliers="note")) as guard:
        assert all(guard.step(loss_fn, batch).committed for batch in DATA[:40]) and guard.armed


def test_committed_outlier_is_evidence_of_poisoned_moments() -> None:
    at = scene()
    with_spike(at)
    with Guard(at.model, at.optimizer, config=quiet(outliers="note")) as guard:
        for batch in DATA[: AT + 3]:
            guard.step(at.loss_fn, batch)
        facts = run_facts(guard._context, Reading(step=AT + 3))
    assert (
        facts.outlier is not None and facts.outlier[:2] == (AT, "2.bias") and facts.outlier[2] > 100
    )
    verdict = Verdict(kind="spike", severity="incident", summary="loss jumped")
    incident = Incident(
        id="x", step=AT + 3, verdict=verdict, reading=Reading(step=AT + 3, loss=9.0)
    )
    found = {finding.code: finding for finding in diagnose(incident, facts)}
    assert "SG503" in found
    assert any(
        f"moments poisoned by step {AT}: the gradient of `2.bias`" in line
        for line in found["SG503"].evidence
    )
    assert "SG503" not in {f.code for f in diagnose(incident, RunFacts())}
