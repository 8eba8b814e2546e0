"""The loss expression of a watched loop, read from its autograd graph at the first incident."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stepguard
from stepguard import GuardConfig
from stepguard.engine.watch.observed_loss import expression
from stepguard.records import Incident

QUIET = GuardConfig(terminal="quiet")
BAD, STEPS = 3, 5
Loss = Callable[[Tensor, bool], Tensor]


def masked_mean(out: Tensor, bad: bool) -> Tensor:
    mask = torch.zeros(8) if bad else torch.ones(8)
    return (out.square().mean(1) * mask).sum() / mask.sum()


def logarithm(out: Tensor, bad: bool) -> Tensor:
    return -(out.softmax(1)[:, 0] * (0.0 if bad else 1.0)).log().mean()


def ratio(out: Tensor, bad: bool) -> Tensor:
    grown = torch.exp(out.mean(1) + (200.0 if bad else 0.0))
    return torch.where(grown > 10, torch.tensor(10.0), grown).mean()


def root(out: Tensor, bad: bool) -> Tensor:
    return (out.mean(1) * (0.0 if bad else 1.0)).square().sqrt().mean()


def ignored(out: Tensor, bad: bool) -> Tensor:
    return F.cross_entropy(out, torch.full((8,), -100 if bad else 1))


def one_element(out: Tensor, bad: bool) -> Tensor:
    return out.mean(1)[: 1 if bad else 8].std()


def nothing(out: Tensor, bad: bool) -> Tensor:
    return out[torch.zeros(8, dtype=torch.bool) if bad else slice(None)].square().mean()


def power(out: Tensor, bad: bool) -> Tensor:
    return (out.mean(1).square() - (99.0 if bad else -1.0)).pow(0.5).mean()


def angle(out: Tensor, bad: bool) -> Tensor:
    return torch.acos(out.mean(1).tanh() * (3.0 if bad else 0.5) + (3.0 if bad else 0.0)).mean()


def advantage(out: Tensor, bad: bool) -> Tensor:
    reward = torch.arange(8.0) if not bad else torch.zeros(8)
    return -(out.mean(1) * (reward - reward.mean()) / reward.std()).mean()


def outside(out: Tensor, bad: bool) -> Tensor:
    reward = torch.rand(8, 1 if bad else 4)
    return -(out.mean(1) * (reward.mean(1) / reward.std(1).mean())).mean()


SHOWN: dict[str, tuple[Loss, str, str, str | None]] = {
    "mask that sums to 0": (masked_mean, "loss", "aten.div", "SG102"),
    "log of 0": (logarithm, "loss", "aten.log", "SG202"),
    "exp in a branch not taken": (ratio, "loss", "aten.exp", "SG402"),
    "slope of a root of 0": (root, "backward", "aten.sqrt", "SG401"),
    "every label ignored": (ignored, "loss", "aten.nll_loss_forward", "SG102"),
    "deviation of one element": (one_element, "loss", "aten.std", "SG205"),
    "mean of nothing": (nothing, "loss", "aten.mean", "SG102"),
    "root of a negative number": (power, "loss", "aten.pow", "SG207"),
    "acos beyond 1": (angle, "loss", "aten.acos", "SG207"),
    "deviation of equal rewards": (advantage, "loss", "aten.div", "SG201"),
    # what was computed without a gradient is not in the graph: its cause is not guessed
    "bad factor from before": (outside, "loss", "aten.mul", None),
}


def train(loss_fn: Loss, *, guarded: bool = True, bad: int | None = BAD) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = stepguard.watch(model, optimizer, config=QUIET) if guarded else None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_fn(model(torch.randn(8, 6)), step == bad).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if guard is not None:
        guard.close()
    return model, guard


def only_incident(loss_fn: Loss) -> Incident:
    _, guard = train(loss_fn)
    (incident,) = guard.incidents
    assert incident.step == BAD
    return incident  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize(("loss_fn", "phase", "op", "code"), SHOWN.values(), ids=SHOWN)
def test_first_bad_step_names_the_operation_of_the_loss(
    loss_fn: Loss, phase: str, op: str, code: str | None
) -> None:
    incident = only_incident(loss_fn)
    origin = incident.origin
    assert origin is not None
    assert (origin.phase, origin.op, origin.method, origin.source) == (phase, op, "graph", None)
    assert [one.code for one in incident.findings][:1] == ([code] if code else [])
    assert any("autograd graph" in remark for remark in origin.remarks)


def test_output_that_was_bad_once_is_transient() -> None:
    due = [False] * BAD + [True]

    class Unsteady(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out + math.nan if due and due.pop(0) else out

    torch.manual_seed(0)
    model = Unsteady(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=QUIET) as guard:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(8, 6)), torch.zeros(8, 4)).backward()
            optimizer.step()
    (incident,) = guard.incidents
    origin = incident.origin
    assert origin is not None and (origin.phase, origin.reproduced) == ("forward", False)
    assert origin.output is not None and origin.output.nan == 32
    assert [one.code for one in incident.findings][:1] == ["SG702"]


def test_zero_that_is_no_count_is_a_division_by_zero() -> None:
    def loss_fn(out: Tensor, bad: bool) -> Tensor:
        return (1.0 + out.square().mean()) / torch.tensor(0.0 if bad else 1.0)

    incident = only_incident(loss_fn)
    assert [one.code for one in incident.findings][:1] == ["SG201"]
    assert incident.origin is not None and not incident.origin.evidence.zero_numerator


def test_divisor_that_is_a_root_needs_a_safe_root_too() -> None:
    def loss_fn(out: Tensor, bad: bool) -> Tensor:
        out = out * (0.0 if bad else 1.0)
        return (out / out.square().sum(1, keepdim=True).sqrt()).mean()

    incident = only_incident(loss_fn)
    assert incident.origin is not None and incident.origin.op == "aten.div"
    assert incident.origin.evidence.denominator_from == "aten.sqrt"
    title = incident.findings[0].remedies[0].title
    assert "safe_div" in title and "safe_sqrt` where the divisor is computed" in title


def test_probability_that_rounded_to_zero_is_named_behind_its_logarithm() -> None:
    def loss_fn(out: Tensor, bad: bool) -> Tensor:
        return -(out * (1e4 if bad else 1.0)).softmax(1)[:, 0].log().mean()

    incident = only_incident(loss_fn)
    assert incident.origin is not None and incident.origin.op == "aten.log"
    assert incident.origin.evidence.argument_from == "aten._softmax"


@pytest.mark.parametrize("loss_fn", [one[0] for one in SHOWN.values()], ids=SHOWN)
def test_healthy_run_is_bit_identical(loss_fn: Loss) -> None:
    (unguarded, _), (guarded, _) = (train(loss_fn, guarded=one, bad=None) for one in (False, True))
    for name, value in unguarded.state_dict().items():
        assert torch.equal(value, guarded.state_dict()[name])


def test_nothing_of_the_loss_outlives_its_step() -> None:
    held: list[weakref.ref[Tensor]] = []

    def loss_fn(out: Tensor, bad: bool) -> Tensor:
        weight = torch.rand(8)
        held.append(weakref.ref(weight))
        return (out.mean(1) * weight).square().mean()

    train(loss_fn, bad=None)
    gc.collect()
    assert [one() for one in held] == [None] * STEPS


def test_large_tensors_are_not_held() -> None:
    scores = torch.randn(512, 1024, requires_grad=True)
    loss = (scores * torch.rand(512, 1024)).mean()
    kept = expression(loss, {-1})
    assert [node.name for node in kept] == ["MeanBackward0", "MulBackward0"]
    assert not any(isinstance(one, Tensor) for node in kept for one in node.values.values())


def test_nothing_is_computed_again_to_be_read() -> None:
    calls = []

    def loss_fn(out: Tensor) -> Tensor:
        calls.append(1)
        return (out.square().sum(1) / out.exp().sum(1)).mean()

    out = torch.randn(8, 4, requires_grad=True)
    loss = checkpoint(loss_fn, out, use_reentrant=False)
    kept = expression(loss, {-1})
    assert "DivBackward0" in [node.name for node in kept] and len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_value_that_was_written_to_since_is_not_read() -> None:
    def loss_fn(out: Tensor, bad: bool) -> Tensor:
        count = torch.tensor(0.0 if bad else 1.0)
        counts.append(count)
        return (1.0 + out.square().mean()) / count

    counts: list[Tensor] = []
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=QUIET) as guard:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_fn(model(torch.randn(8, 6)), step == BAD).backward()  # type: ignore[no-untyped-call]
            counts[-1].fill_(7.0)
            optimizer.step()
    (incident,) = guard.incidents
    assert incident.origin is not None and incident.origin.op is None
