"""Finite loss, bad gradient: the backward node, or the forward value that the loss never showed.
And bad values that the optimizer makes of finite gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.parts import each
from stepguard.locate import locate

from .cases import Case, Expected, Net, at, check, in_loss, in_net, mse, noise, with_row
from .guarded import code, evidence, first_incident
from .guarded import noise as features
from .loop import Loop

INF = math.inf


class Basis(nn.Module):
    """Eigenvectors of equal eigenvalues."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.weight)
        return x @ vectors * values


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.sqrt(self.gain)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * x / x.abs()


def unit_apart(x: Tensor) -> Tensor:
    """The gradient that meets the root is 0 as well, but indexing by positions drops nothing."""
    apart = x[:, torch.tensor([0, 1])] - x[:, torch.tensor([1, 0])]
    unit = apart / (torch.sqrt(apart * apart) + 1e-3)
    return torch.zeros_like(x).index_add(1, torch.tensor([0, 1]), unit)


def penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a gradient that is 0."""
    x = batch["x"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    return ((grad.pow(2).sum(-1).sqrt() - 1) ** 2).mean()


def distances(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    h = model(batch["x"])
    return ((h[:, None] - h[None]) ** 2).sum(-1).sqrt().mean()


def positive_logs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    h = model(batch["x"]) ** 2
    return torch.log(h)[h > 0].mean()


def log_of_softmax(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    log_p = torch.log(torch.softmax(model(batch["x"]), -1))
    return -log_p.gather(1, batch["y"][:, None]).mean()


def ratio(x: Tensor) -> Tensor:
    size = (x * x).sum(-1, keepdim=True)
    return torch.where(size > 0, x / size, x)


def zero_linear(rows: int) -> nn.Linear:
    model = nn.Linear(3, rows, bias=False)
    nn.init.zeros_(model.weight)
    return model


def steep_linear() -> nn.Linear:
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(120 * torch.eye(3))
    return model


ROOT = {"op": "aten.div", "node": "SqrtBackward0"}
CASES: dict[str, Callable[[], Case]] = {
    "root at 0": lambda: in_net(
        lambda x: torch.sqrt(x * x),
        with_row(0.0),
        at(**ROOT, zero_denominator=True, singular_at=0.0),
    ),
    "arccosine at 1": lambda: in_net(
        lambda x: torch.acos(torch.tanh(x)),
        with_row(1000.0),
        at("aten.rsqrt", node="AcosBackward0", zero_denominator=True, singular_at=0.0),
    ),
    "fractional power at 0": lambda: in_net(
        lambda x: x.abs() ** 0.5,
        with_row(0.0),
        at("aten.pow", node="PowBackward0", negative_power=True),
    ),
    "distance of a point to itself": lambda: in_loss(
        distances, {}, at(**ROOT, samples=(), zero_denominator=True)
    ),
    "eigenvectors of equal eigenvalues": lambda: Case(
        Basis(),
        {"x": noise(4, 3), "y": noise(4, 3, seed=1)},
        mse,
        at(
            "aten.div_",
            (),
            phase="backward",
            module="",
            node="LinalgEighBackward0",
            zero_denominator=True,
        ),
    ),
    "infinite gradient without any NaN": lambda: Case(
        Gain(),
        {"x": noise(4, 3), "y": noise(4, 1)},
        mse,
        at(**ROOT, samples=(), phase="backward", module=""),
    ),
    "custom function": lambda: in_net(
        Sign.apply, with_row(0.0), at("aten.div", node="SignBackward", zero_denominator=True)
    ),
    "gradient penalty at a gradient of 0": lambda: in_loss(
        penalty, {}, at(**ROOT, samples=()), zero_linear(2)
    ),
    "root in an unselected branch": lambda: in_net(
        lambda x: torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x)),
        None,
        at(**ROOT, samples=(), unselected=True, selected_against="aten.sqrt"),
    ),
    "root at 0 in an unselected branch": lambda: in_net(
        lambda x: torch.where(x != 0, torch.sqrt(x * x), torch.zeros_like(x)),
        with_row(0.0),
        at(**ROOT, unselected=True, zero_upstream_gradient=True, zero_numerator=True),
    ),
    "root of a zero distance between indexed points": lambda: in_net(
        unit_apart, with_row(0.0), at(**ROOT, zero_upstream_gradient=True)
    ),
    "power at 0 in an unselected branch": lambda: in_net(
        lambda x: torch.where(x != 0, x.abs() ** 0.5, torch.zeros_like(x)),
        with_row(0.0),
        at("aten.pow", node="PowBackward0", unselected=True),
    ),
    "reciprocal in an unselected branch": lambda: in_net(
        lambda x: torch.where(x.abs() > 0, 1 / x, torch.zeros_like(x)),
        with_row(0.0),
        at("aten.mul", node="ReciprocalBackward0", unselected=True),
    ),
    "logarithm before a masked fill": lambda: in_net(
        lambda x: torch.log(x * x).masked_fill(x == 0, 0.0),
        with_row(0.0),
        at("aten.div", node="LogBackward0", unselected=True),
    ),
    "logarithm before a boolean index": lambda: in_loss(
        positive_logs,
        {"x": with_row(0.0)},
        at("aten.div", (1,), node="LogBackward0", unselected=True),
        nn.Linear(3, 3, bias=False),
    ),
    "ratio in an unselected branch": lambda: in_net(
        ratio, with_row(0.0), at("aten.div", node="DivBackward0", unselected=True)
    ),
    "infinity absorbed by a clamp": lambda: in_net(
        lambda x: torch.exp(x).clamp(max=10.0),
        with_row(500.0),
        at("aten.exp", absorbed=True, absorbed_by="aten.clamp"),
    ),
    "NaN absorbed by nan_to_num": lambda: in_net(
        lambda x: torch.nan_to_num(x / x),
        with_row(0.0),
        at("aten.div", absorbed=True, absorbed_by="aten.nan_to_num", zero_denominator=True),
    ),
    "infinity absorbed by an exponential": lambda: in_net(
        lambda x: torch.exp(-torch.exp(x)),
        with_row(400.0),
        at("aten.exp", absorbed=True, absorbed_by="aten.exp"),
    ),
    "logarithm of an underflown probability": lambda: in_loss(
        log_of_softmax,
        {"x": torch.eye(3), "y": torch.arange(3)},
        at("aten.log", None, argument_from="aten._softmax"),
        steep_linear(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_origin_of_a_bad_gradient_is_exact(name: str) -> None:
    origin = check(CASES[name]())
    assert origin.source is not None and "test_gradients.py:" in origin.source
    assert origin.evidence.unselected or "unselected" not in name
    assert not origin.evidence.unselected or "indexed points" not in name


class Checkpointed(nn.Module):
    """A function that is computed again in the backward pass."""

    def __init__(self, function: Callable[[Tensor], Tensor], reentrant: bool) -> None:
        super().__init__()
        inner = Net(function)
        self.fc, self.act, self.out = inner.fc, inner.act, inner.out
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.act, self.fc(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensor-hooks"])
@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (lambda x: torch.sqrt(x * x), 0.0, at(**ROOT, singular_at=0.0)),
        (lambda x: torch.exp(-torch.exp(x)), 400.0, at("aten.exp", absorbed=True)),
        (
            lambda x: torch.where(x <= 0, x.exp(), 1 + x),
            400.0,
            at("aten.mul", node="ExpBackward0", unselected=True),
        ),
        (lambda x: torch.exp(x), 400.0, at("aten.exp")),
    ],
    ids=["singular", "absorbed", "unselected", "loss"],
)
def test_checkpointed_block_is_seen_through(
    function: Callable[[Tensor], Tensor], value: float, expected: Expected, reentrant: bool
) -> None:
    case = in_net(function, with_row(value), expected)
    case.model = Checkpointed(function, reentrant)
    check(case)


def test_gradient_accumulation_overflow_names_the_micro_batch() -> None:
    model = nn.Linear(2, 1, bias=False).half()

    def loss(x: Tensor) -> Tensor:
        return (model(x / 30000.0) * 30000.0).sum()

    micro = [torch.full((1, 2), 30000.0).half() for _ in range(4)]
    origin = Loop(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss).step(0, micro)
    assert origin is not None
    place = (origin.phase, origin.module, origin.op, origin.node, origin.micro_batch)
    assert place == ("backward", None, "aten.add_", "torch::autograd::AccumulateGrad", 2)
    assert origin.source is not None and origin.samples == ()
    assert origin.evidence.half_precision and origin.evidence.finite_in == "float32"


def test_loss_scale_is_part_of_the_replay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(model(batch["x"]).float(), batch["y"])

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, scaler=scaler)
    origin = loop.step(0, [{"x": noise(8, 4) * 4, "y": noise(8, 1) * 4}])
    assert origin is not None and origin.phase == "backward" and origin.reproduced
    assert origin.evidence.half_precision and origin.evidence.finite_in == "float32"
    assert origin.evidence.scale == 2.0**22
    assert loop.last is not None
    step, reading = loop.last
    assert locate(step, replace(reading, overflow=True)).evidence.scale_overflow


def test_criterion_outside_the_model_keeps_its_name() -> None:
    class Focal(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return (1 - z.sigmoid()).pow(0.5).mean()

    model, criterion = nn.Linear(2, 1), Focal()
    nn.init.constant_(model.weight, 5.0)
    loop = Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda x: criterion(model(x)),
        modules={"criterion": criterion},
    )
    origin = loop.step(0, [torch.tensor([[9.0, 9.0], [-0.2, 0.1]])])
    assert origin is not None
    place = (origin.phase, origin.module, origin.op, origin.node)
    assert place == ("backward", "criterion", "aten.pow", "PowBackward0") and origin.samples == (0,)


def test_sparse_gradients_are_followed() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with torch.no_grad():
        model.weight[2] = 0

    def loss(ids: Tensor) -> Tensor:
        return model(ids).pow(2).sum(-1).sqrt().mean()

    origin = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss).step(
        0, [torch.tensor([0, 2, 1])]
    )
    assert origin is not None and origin.node == "SqrtBackward0" and origin.samples == (1,)


def test_a_masked_nan_target_is_not_blamed_for_another_bad_value() -> None:
    y = noise(4, 1)
    y[2] = math.nan

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error = (model(batch["x"]) - batch["y"]).pow(2) + torch.log(model(batch["x"]) * 0 - 1)
        return torch.where(~batch["y"].isnan(), error, 0.0).mean()

    check(in_loss(loss, {"y": y}, at("aten.log", None), nn.Linear(3, 1)))


# --- a NaN that the forward drops is named where it was made; a guarded pole is another cause
# --------------------------------------------------------------------------------------------------


Drop = Callable[[Tensor, Tensor], Tensor]

DROPS: dict[str, Drop] = {
    "boolean index": lambda rows, keep: rows[keep],
    "integer index": lambda rows, keep: rows[keep.nonzero().flatten()],
    "index_select": lambda rows, keep: rows.index_select(0, keep.nonzero().flatten()),
    "where": lambda rows, keep: torch.where(keep[:, None], rows, 0.0),
    "masked_fill": lambda rows, keep: rows.masked_fill(~keep[:, None], 0.0),
    "index_fill": lambda rows, keep: rows.index_fill(0, (~keep).nonzero().flatten(), 0.0),
    "fill where nan": lambda rows, keep: rows.masked_fill(rows.isnan(), 0.0),
    "index where not nan": lambda rows, keep: rows[~rows.isnan().any(-1)],
    "nan_to_num": lambda rows, keep: rows.nan_to_num(0.0),
    "masked_select": lambda rows, keep: rows.masked_select(keep[:, None]),
}


def batch(step: int) -> dict[str, Tensor]:
    """Sample 2 is empty in step 1, and said to be."""
    x, keep = features(step), torch.ones(4, dtype=torch.bool)
    if step == 1:
        x[2], keep[2] = 0.0, False
    return {"x": x, "keep": keep}


def by_norm(x: Tensor, b: dict[str, Tensor]) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def masked_softmax(x: Tensor, b: dict[str, Tensor]) -> Tensor:
    closed = torch.zeros(b["keep"].shape).masked_fill(~b["keep"], -INF)
    return torch.softmax(x + closed[:, None], -1)


@pytest.mark.parametrize(
    ("drop", "made", "op", "cause"),
    each(DROPS, [(by_norm, "aten.div", "SG201"), (masked_softmax, "aten._softmax", "SG204")]),
)
def test_nan_that_is_dropped_later_is_located_where_it_was_made(
    drop: str, made: Any, op: str, cause: str
) -> None:
    model = nn.Linear(3, 4, bias=False)
    incident = first_incident(
        model, lambda b: DROPS[drop](made(model(b["x"]), b), b["keep"]).pow(2).sum(), batch
    )
    origin = incident.origin
    assert origin is not None
    assert (origin.phase, origin.op, origin.samples) == ("loss", op, (2,))
    assert code(incident) == cause


def test_evidence_says_who_dropped_it() -> None:
    model = nn.Linear(3, 4, bias=False)

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        return (out / out.norm(dim=-1, keepdim=True))[b["keep"]].sum()

    assert "aten.index dropped the NaN from the loss" in evidence(
        first_incident(model, loss_fn, batch)
    )


LOG_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "LogaddexpBackward0": lambda score: torch.logaddexp(score[:, 0], score[:, 1]),
    "LogsumexpBackward0": lambda score: torch.logsumexp(score, -1),
}


@pytest.mark.parametrize("node", LOG_SUMS)
@pytest.mark.parametrize("how", ["where", "index"])
def test_log_sum_of_only_minus_infinity_is_not_an_unselected_branch(node: str, how: str) -> None:
    model = nn.Linear(3, 2)

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        closed = torch.zeros(b["keep"].shape).masked_fill(~b["keep"], -INF)
        total = LOG_SUMS[node](model(b["x"]) + closed[:, None])
        return (torch.where(b["keep"], total, 0.0) if how == "where" else total[b["keep"]]).mean()

    incident = first_incident(model, loss_fn, batch)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.node, code(incident)) == (
        "backward",
        node,
        "SG204",
    )
    assert incident.origin.samples == (2,)


POLES: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(x > 0, x.sqrt(), 0.0),
    "index": lambda x: x.sqrt()[x > 0],
    "masked_fill": lambda x: x.sqrt().masked_fill(~(x > 0), 0.0),
    "two conditions": lambda x: torch.where((x > 0) & (x < 9), x.sqrt(), 0.0),
}


@pytest.mark.parametrize("name", POLES)
def test_function_kept_from_its_own_pole_stays_an_unselected_branch(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    incident = first_incident(model, lambda x: POLES[name](model(x)).mean(), features)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.node, code(incident)) == (
        "backward",
        "SqrtBackward0",
        "SG402",
    )


class Block(nn.Module):
    """A residual block around a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.mix(x))


class Stack(nn.Module):
    """Four blocks of one class, plain or checkpointed."""

    def __init__(self, function: Callable[[Tensor], Tensor], reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(function) for _ in range(4))
        self.out = nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        out: Tensor = self.out(x)
        return out


CHECKPOINTED = pytest.mark.parametrize(
    "reentrant", [None, False, True], ids=["plain", "checkpointed", "checkpointed reentrant"]
)


@CHECKPOINTED
@pytest.mark.parametrize("name", ["where", "masked_fill"])
def test_block_named_is_the_first_to_break_in_the_backward(
    name: str, reentrant: bool | None
) -> None:
    model = Stack(POLES[name], reentrant)
    incident = first_incident(model, lambda x: model(x).pow(2).mean(), features)
    assert incident.origin is not None
    assert (incident.origin.module, incident.origin.node) == ("blocks.3", "SqrtBackward0")
    assert code(incident) == "SG402"


@CHECKPOINTED
def test_singular_slope_is_placed_in_the_last_block(reentrant: bool | None) -> None:
    model = Stack(lambda h: (h * h).sum(-1, keepdim=True).sqrt(), reentrant)
    incident = first_incident(model, lambda b: model(b["x"]).pow(2).mean(), batch)
    assert incident.origin is not None
    assert (incident.origin.module, code(incident)) == ("blocks.3", "SG401")


@CHECKPOINTED
def test_infinity_absorbed_in_several_blocks_is_placed_where_it_was_born_first(
    reentrant: bool | None,
) -> None:
    model = Stack(lambda h: 1 / (1 + torch.exp(h.abs() * 1e4 + 1e4)), reentrant)
    incident = first_incident(model, lambda x: model(x).pow(2).mean(), features)
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.module, incident.origin.op) == (
        "forward",
        "blocks.0",
        "aten.exp",
    )


@CHECKPOINTED
def test_slope_that_breaks_before_an_unselected_branch_comes_first(reentrant: bool | None) -> None:
    model = Stack(torch.tanh, reentrant)
    model.blocks[0].function = POLES["where"]
    model.blocks[3].function = lambda h: (h * h).sum(-1, keepdim=True).sqrt()
    nn.init.zeros_(model.blocks[3].mix.weight)
    incident = first_incident(model, lambda x: model(x).pow(2).mean(), features)
    assert incident.origin is not None
    assert (incident.origin.module, code(incident)) == ("blocks.3", "SG401")


# --- bad values the optimizer makes of finite gradients, and norms that overflow
# --------------------------------------------------------------------------------------------------


def half_embedding(optimizer: type[torch.optim.Optimizer], **settings: Any) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2)).half()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["ids"]).float(), batch["y"])

    made = optimizer(model.parameters(), lr=1e-3, **settings)  # type: ignore[call-arg]
    return Loop(model, made, loss)


BATCH = {"ids": torch.tensor([1, 2]), "y": torch.tensor([0, 1])}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_epsilon_that_is_zero_in_half_precision(optimizer: type[torch.optim.Optimizer]) -> None:
    origin = half_embedding(optimizer, eps=1e-8, foreach=False).step(0, [BATCH])
    assert origin is not None
    place = (origin.phase, origin.module, origin.op, origin.tensor)
    assert place == ("optimizer", None, "aten.addcdiv_", "param:0.weight")
    evidence = origin.evidence
    assert evidence.eps_underflow and evidence.eps == 1e-08
    assert evidence.zero_denominator and evidence.half_precision
    assert origin.reproduced is True and origin.samples == ()
    # All frames are torch's: a line of the program that asked for the replay would mislead.
    assert origin.source is None


def test_a_foreach_update_names_the_operands_of_the_tensor_that_went_bad() -> None:
    origin = half_embedding(torch.optim.Adam, eps=1e-8, foreach=True).step(0, [BATCH])
    assert origin is not None
    assert (origin.op, origin.tensor) == ("aten._foreach_addcdiv_", "param:0.weight")
    evidence = origin.evidence
    assert evidence.zero_denominator and evidence.zero_numerator and evidence.half_precision
    assert evidence.eps_vanished == 1e-08
    assert [operand.name for operand in origin.inputs[:3]] == ["self", "tensor1", "tensor2"]
    assert {operand.shape for operand in origin.inputs[:3]} == {(6, 4)}
    assert origin.inputs[2].value == 0.0


def test_update_replay_changes_neither_weights_nor_state() -> None:
    loop = half_embedding(torch.optim.Adam, eps=1e-8)
    weights = [p.detach().clone() for p in loop.model.parameters()]
    assert loop.step(0, [BATCH]) is not None
    assert all(torch.equal(a, b) for a, b in zip(weights, loop.model.parameters(), strict=True))
    assert all(not v or float(v.get("step", 0.0)) == 0.0 for v in loop.optimizer.state.values())


def test_update_replay_computes_gradients_again_when_they_are_gone() -> None:
    loop = half_embedding(torch.optim.Adam, eps=1e-8)
    loop.step(0, [BATCH])
    assert loop.last is not None
    step, reading = loop.last
    for parameter in loop.model.parameters():
        parameter.grad = None
    origin = locate(step, reading)
    assert (origin.op, origin.tensor) == ("aten.addcdiv_", "param:0.weight")
    assert all(p.grad is None for p in loop.model.parameters())


def test_step_hooks_of_the_user_do_not_fire_in_a_replay() -> None:
    loop = half_embedding(torch.optim.Adam, eps=1e-8)
    fired: list[int] = []
    loop.optimizer.register_step_pre_hook(lambda *args: fired.append(1))
    assert loop.step(0, [BATCH]) is not None
    assert fired == [1], "once for the real update, not again for the replay"


def test_learning_rate_that_is_infinite_is_found_in_the_update() -> None:
    model = nn.Linear(3, 1)
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=1e38), lambda x: model(x).pow(2).sum() * 1e3
    )
    origin = loop.step(0, [noise(4, 3)])
    assert origin is not None and (origin.phase, origin.op) == ("optimizer", "aten.add_")
    assert origin.tensor == "param:weight" and origin.evidence.lr == 1e38


def test_finite_gradients_with_an_infinite_norm() -> None:
    model = nn.Linear(100, 1, bias=False)
    loop = Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda x: (model(x) * 1e20).sum(),
        clip=1.0,
    )
    origin = loop.step(0, [torch.ones(1, 100)])
    assert origin is not None
    assert (origin.phase, origin.module, origin.op) == ("optimizer", None, "aten._foreach_norm")
    assert origin.evidence.finite_norm == pytest.approx(1e21) and origin.reproduced is True
    assert origin.inputs[0].max == pytest.approx(1e20) and math.isinf(origin.output.value)  # type: ignore[union-attr,arg-type]
