"""What a run knows of its updates: their size, outliers among gradients, and updates that break."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepguard
from scenes import (
    LOOPS,
    Batch,
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
from stepguard import Guard, GuardConfig
from stepguard.diagnose import RunFacts, diagnose
from stepguard.engine.incident.run_facts import lost_squares, run_facts, update_ratio
from stepguard.journal import read_run
from stepguard.records import Incident, Reading, Verdict

DATA = batches(8)


def ratio_of_last_step(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> float:
    """The true ratio of the last of some steps."""
    ratio = 0.0
    for batch in DATA[:steps]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        ratio = float((after - before).norm() / after.norm())
    return ratio


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.0}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_ratio_is_that_of_the_update_that_was_made(
    kind: Any, settings: dict[str, Any], steps: int
) -> None:
    model = plain_net()
    optimizer = kind(model.parameters(), lr=0.02, **settings)
    true = ratio_of_last_step(optimizer, model, steps)
    assert update_ratio(optimizer, [0.02]) == pytest.approx(true, rel=1e-3)


def test_nothing_is_said_where_nothing_is_remembered() -> None:
    model = plain_net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    ratio_of_last_step(plain, model, 1)
    assert update_ratio(plain, [0.1]) is None
    fresh = torch.optim.AdamW(model.parameters())
    assert update_ratio(fresh, [0.1]) is None
    ratio_of_last_step(fresh, model, 1)
    assert update_ratio(fresh, [1e-3]) is not None
    next(iter(fresh.state.values()))["exp_avg"].fill_(torch.nan)
    assert update_ratio(fresh, [1e-3]) is None


def test_squares_that_went_through_half_precision_are_counted() -> None:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())
    ratio_of_last_step(optimizer, model, 2)
    assert lost_squares(optimizer) == 0
    states = list(optimizer.state.values())
    for state in states:
        state["exp_avg_sq"].copy_((state["exp_avg_sq"] * 1e-6).half())
    expected = sum(int(((s["exp_avg_sq"] == 0) & (s["exp_avg"] != 0)).sum()) for s in states)
    assert lost_squares(optimizer) == expected > 0


def test_a_precision_that_the_launcher_did_not_ask_for_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return (-model(batch).abs() - 1.0).float().log().mean()

    with Guard(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        incident = guard.step(loss_fn, torch.ones(2, 4)).incident
    assert incident is not None
    said = {finding.code: finding.evidence for finding in incident.findings}
    assert "bfloat16 is configured, but inside the step autocast gives float16" in said["SG801"]


# --- outliers among gradients, opt-in


SIXTY = batches(60)
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
        if batch is SIXTY[batch_at]:
            bias = list(made.model.parameters())[-1]
            out = out + TIMES * (bias - bias.detach()).sum()
        return out

    at.loss = loss


def run(mode: str, at: Scene, config: Any, upto: int = AT + 1) -> Any:
    return LOOPS[mode](at, grouped(SIXTY[:upto], 1), config)


@pytest.mark.parametrize("mode", LOOPS)
def test_note_names_the_parameter_and_changes_nothing(mode: str, tmp_path: Path) -> None:
    at, plain = scene(), scene()
    with_spike(at)
    with_spike(plain)
    run(mode, at, quiet(outliers="note", run_dir=tmp_path))
    bare(plain, grouped(SIXTY[: AT + 1], 1))
    assert difference(state_of(at), state_of(plain)) == ""
    (said,) = [n for n in read_run(tmp_path).notes if n.get("kind") == "outlier"]
    assert said["step"] == AT and "2.bias" in said["summary"] and "2.weight" not in said["summary"]
    assert "reported, no action taken" in said["summary"]


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
        assert all(guard.step(loss_fn, batch).committed for batch in SIXTY[:40]) and guard.armed


def test_committed_outlier_is_evidence_of_poisoned_moments() -> None:
    at = scene()
    with_spike(at)
    with Guard(at.model, at.optimizer, config=quiet(outliers="note")) as guard:
        for batch in SIXTY[: AT + 3]:
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


# --- updates that make NaN of finite gradients


STEEP = 3.0


class RootOfStatistics(torch.optim.Optimizer):
    """Scales the gradient by a root of a running mean, which a steep gradient pushes below 0."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.power, self.ends = -0.25, threading.Event()  # on itself, and one that cannot be copied

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            mean = self.state[p].setdefault("mean", torch.ones_like(p))
            mean.mul_(0.9).add_(p.grad.square(), alpha=0.1)
            rounded = mean - 2 * mean.max() if p.grad.norm() > STEEP else mean
            p.sub_(0.01 * p.grad * rounded.pow(self.power))


def _loss(model: nn.Module, weight: float = 1.0) -> Callable[[Batch], Tensor]:
    return lambda b: weight * F.cross_entropy(model(b[0]), b[1])


class Turns(torch.optim.Optimizer):
    """Divides by the gradient itself, which is 0 where the batch is."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.01 * p.grad / p.grad)


def test_complex_weights_that_break_in_the_update_are_undone_too() -> None:
    model = nn.Module()
    model.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with Guard(model, Turns(model.parameters()), config=quiet()) as guard:
        for step in range(3):
            x = torch.tensor([1.0, 2.0, 0.0 if step == 1 else 3.0])
            guard.step(lambda b: (model.turn * b).abs().square().sum(), x)
    assert [incident.step for incident in guard.incidents] == [1]
    assert bool(torch.view_as_real(model.turn.detach()).isfinite().all())


class TrustRatio(torch.optim.Optimizer):
    """Scales the step by the norm of the weights over that of their gradient, no epsilon."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.01})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.norm() / p.grad.norm()) * p.grad)


BREAKING = {
    "steep": (RootOfStatistics, 100.0, "aten.pow", ["SG207"]),
    "zero": (TrustRatio, 0.0, "aten.div", ["SG201", "SG502"]),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("last", [2, 5])
@pytest.mark.parametrize("kind", BREAKING)
def test_update_that_breaks_by_itself_is_undone_at_its_step_even_if_it_is_the_last(
    kind: str, last: int, watched: bool
) -> None:
    make, weight, op, codes = BREAKING[kind]
    torch.manual_seed(0)
    model = plain_net()
    optimizer = make(model.parameters())
    with (stepguard.watch if watched else Guard)(
        model, optimizer, config=quiet(locate=True)
    ) as guard:
        for step, batch in enumerate(DATA[: last + 1]):
            loss = _loss(model, weight if step == 2 else 1.0)
            if watched:
                optimizer.zero_grad()
                loss(batch).backward()
                optimizer.step()
            else:
                guard.step(loss, batch)
    (incident,) = guard.incidents
    assert incident.step == 2 and incident.verdict.kind == "nonfinite_parameter"
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.op) == ("optimizer", op)
    assert [finding.code for finding in incident.findings][: len(codes)] == codes
    assert all(bool(p.isfinite().all()) for p in model.parameters())
