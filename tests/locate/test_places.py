"""Bad values of the forward pass, the loss, the batch and stored tensors: exact operation, module,
line, element and guilty sample.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepguard
from stepguard.locate import locate
from stepguard.locate.samples import suspects_from_rows
from stepguard.locate.source import Line, statement
from stepguard.records import Origin, Reading

from .cases import Apply, Case, at, check, find, in_loss, in_net, mse, noise, squares, with_row
from .loop import Loop

INF = math.inf


def closed(*where: int | tuple[int, ...], value: bool = True) -> Tensor:
    """A mask of 4 rows that is set in some places."""
    mask = torch.full((4, 3), not value)
    for place in where:
        mask[place] = value
    return mask


def masked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).masked_fill(batch["mask"], -INF)


def masked_classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(masked(model, batch), batch["y"])


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = self.score(x).exp() * mask
        return weights / weights.sum(-1, keepdim=True)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h / (h.abs().sum(-1, keepdim=True) + 1e-8)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        h = self.q(x)
        scores = (h @ h.transpose(1, 2)).masked_fill_(pad[:, None], -INF)
        return scores.softmax(-1) @ h


class Scratch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
        try:
            scratch = torch.empty(4, 3)
        finally:
            torch.use_deterministic_algorithms(before)
        return self.linear(x) + scratch


class Energy(nn.Module):
    """Forces, computed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, position: Tensor) -> Tensor:
        at = position.clone().requires_grad_()
        distance = ((at[:, 0] - at[:, 1]) ** 2).sum(-1, keepdim=True).sqrt()
        energy = self.out(torch.tanh(self.hidden(distance)))
        return torch.autograd.grad(energy.sum(), at, create_graph=True)[0]


class WithBuffer(nn.Module):
    """A buffer that the forward adds, and one that it indexes."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.register_buffer("table", table)

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        if t is None:
            return self.norm(self.linear(x) + self.table)
        return self.linear(x)[:, 0].pow(2) * torch.exp(-self.table[t])


class Masked(WithBuffer):
    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        return torch.softmax(self.linear(x) + self.table, -1)


class Graph:
    """A batch of a class of the user's own."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes, self.name = nodes, "g"


class Loader(nn.Module):
    """Gives no tensor."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"name": "x", "values": (torch.log(x * 0), None)}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loader = nn.Linear(3, 1), Loader()

    def forward(self, x: Tensor) -> Tensor:
        return self.loader(self.linear(x))["values"][0]


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.exp(self.first(x) * 1000))


def with_weights(model: nn.Module, name: str, values: Tensor | float) -> Any:
    with torch.no_grad():
        model.get_parameter(name).copy_(torch.as_tensor(values))
    return model


def with_element(model: nn.Module, name: str, where: Any, value: float) -> Any:
    model.state_dict()[name][where] = value
    return model


def linear_norm() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def overflow_in_half() -> Case:
    model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 1))
    model = with_weights(model, "0.weight", 1.0).half()
    batch = {"x": with_row(60000.0).half(), "y": noise(4, 1).half()}
    half = {"half_precision": True, "dtype_limit": 65504.0, "finite_in": "float32"}
    spoils = "aten.native_layer_norm"
    place = at("aten.mm", (1,), phase="forward", module="0", turned_nan_by=spoils, **half)
    return Case(model, batch, mse, place)


def arcsine() -> Case:
    case = in_net(torch.asin, with_row(50.0), at("aten.asin"))
    with torch.no_grad():
        case.model.get_parameter("fc.weight").mul_(0.1)
    return case


def weight_norm() -> Case:
    inner = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(inner, nn.Linear(3, 1))
    with_element(model, "0.parametrizations.weight.original1", 1, 0.0)
    op, module = "aten._weight_norm_interface", "0.parametrizations.weight.0"
    place = at(op, (), phase="forward", module=module, zero_denominator=True)
    return Case(model, {"x": noise(4, 3), "y": noise(4, 1)}, mse, place)


def ctc() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["t"], batch["have"], batch["need"])

    targets = torch.tensor([[1, 2, 3, 1, 2], [1, 1, 1, 1, 1], [1, 2, 3, 1, 2]])
    batch = {"x": noise(3, 6, 3), "t": targets}
    batch |= {"have": torch.full((3,), 6), "need": torch.full((3,), 5)}
    model = nn.Linear(3, 4)
    return in_loss(loss, batch, at("aten._ctc_loss", (1,), ctc_infeasible=1), model=model)


def forces() -> Case:
    position = noise(4, 2, 3)
    position[2, 0] = position[2, 1]
    batch = {"x": position, "y": noise(4, 2, 3, seed=4)}
    facts = {"inner_gradient": True, "zero_denominator": True}
    place = at("aten.div", (2,), phase="forward", module="", node="SqrtBackward0", **facts)
    return Case(Energy(), batch, mse, place)


def padded_attention() -> Case:
    pad = torch.zeros(3, 3, dtype=torch.bool)
    pad[1] = True
    batch = {"x": noise(3, 3, 4), "pad": pad}
    place = at("aten._softmax", (1,), phase="forward", module="", masked_rows=3, rows=9)
    return Case(Attention(), batch, lambda m, b: m(b["x"], b["pad"]).pow(2).mean(), place)


FORWARD: dict[str, Callable[[], Case]] = {
    "log of a negative": lambda: in_net(
        torch.log, None, at("aten.log", None, argument="negative", argument_from="aten.mm")
    ),
    "root of a negative": lambda: in_net(
        torch.sqrt, None, at("aten.sqrt", None, argument="negative")
    ),
    "root in place": lambda: in_net(lambda x: x.clone().sqrt_(), None, at("aten.sqrt_", None)),
    "power of a negative": lambda: in_net(
        lambda x: x**1.5, None, at("aten.pow", None, argument="negative")
    ),
    "arcsine outside its domain": arcsine,
    "division by the norm of a zero vector": lambda: in_net(
        lambda x: x / x.norm(dim=-1, keepdim=True),
        with_row(0.0),
        at(
            "aten.div",
            zero_denominator=True,
            zero_numerator=True,
            denominator_from="aten.linalg_vector_norm",
        ),
    ),
    "rsqrt of a zero variance": lambda: in_net(
        lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True)),
        with_row(0.0),
        at(
            "aten.rsqrt",
            zero_denominator=True,
            denominator_from="aten.var",
            turned_nan_by="aten.mul",
        ),
    ),
    "deviation of a single sample": lambda: in_net(
        lambda h: h / h.std(0), noise(1, 3), at("aten.std", (), reduced_elements=1)
    ),
    "zero times infinity blames the exp": lambda: in_net(
        lambda x: torch.exp(x * 100) * torch.zeros_like(x),
        with_row(5.0),
        at("aten.exp", None, turned_nan_by="aten.mul"),
    ),
    "infinity minus infinity blames the exp": lambda: in_net(
        lambda x: torch.exp(x * 100) - torch.exp(x * 100 + 1),
        with_row(9.0),
        at("aten.exp", None, turned_nan_by="aten.sub", finite_in="float64"),
    ),
    "extreme sample overflows downstream": lambda: in_net(
        lambda x: x**2, with_row(1e30), at("aten.pow", finite_in="float64", sample_max=1e30)
    ),
    "spectrum of silence in decibel": lambda: in_net(
        lambda x: torch.log10(torch.fft.fft(x).abs()),
        with_row(0.0),
        at("aten.log10", argument="zero", argument_from="aten.abs"),
    ),
    "mask written as a product with infinity": lambda: in_loss(
        lambda m, b: torch.softmax(m(b["x"]) + (1 - b["mask"]) * -INF, -1).pow(2).mean(),
        {"mask": torch.ones(4, 3)},
        at("aten.mul", (), zero_times_inf=True, intended_inf=True),
    ),
    "fully masked softmax, not the mask": lambda: in_loss(
        lambda m, b: torch.softmax(masked(m, b), -1).pow(2).mean(),
        {"mask": closed(2)},
        at("aten._softmax", (2,), masked_rows=1, rows=4, intended_inf=True),
    ),
    "logsumexp over a masked row": lambda: in_loss(
        lambda m, b: torch.logsumexp(masked(m, b), -1).mean(),
        {"mask": closed(2)},
        at("aten.logsumexp", (2,), masked_rows=1, intended_inf=True),
    ),
    "target class is masked": lambda: in_loss(
        masked_classes,
        {"mask": closed((2, 1)), "y": torch.tensor([0, 1, 1, 2])},
        at("aten.nll_loss_forward", (2,), zero_target_probability=True),
    ),
    "all targets ignored": lambda: in_loss(
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
        {"y": torch.full((4,), -100)},
        at("aten.nll_loss_forward", (), valid_targets=0, targets=4),
    ),
    "cosine with a zero vector": lambda: in_loss(
        lambda m, b: (
            1 - ((h := m(b["x"])) * b["y"]).sum(-1) / (h.norm(dim=-1) * b["y"].norm(dim=-1))
        ).mean(),
        {"y": with_row(0.0, row=3, width=4)},
        at("aten.div", (3,)),
        model=nn.Linear(3, 4),
    ),
    "divergence with a zero probability": lambda: in_loss(
        lambda m, b: (b["q"] * (b["q"].log() - m(b["x"]).log_softmax(-1))).sum(-1).mean(),
        {"q": torch.tensor([[0.3, 0.3, 0.4], [0.0, 0.5, 0.5], *[[0.2, 0.3, 0.5]] * 2])},
        at("aten.log", (1,), argument="zero", argument_root="batch:q", turned_nan_by="aten.mul"),
    ),
    "attention weights that sum to zero": lambda: Case(
        Gate(),
        {"x": noise(4, 3), "mask": closed(0, value=False).float()},
        lambda m, b: m(b["x"], b["mask"]).pow(2).mean(),
        at(
            "aten.div",
            (0,),
            phase="forward",
            module="",
            zero_denominator=True,
            denominator_from="aten.sum",
        ),
    ),
    "masked mean without any valid element": lambda: in_loss(
        lambda m, b: (m(b["x"]).squeeze(-1) * b["mask"]).sum() / b["mask"].sum(),
        {"mask": torch.zeros(4)},
        at(
            "aten.div",
            (),
            zero_denominator=True,
            zero_numerator=True,
            denominator_from="aten.sum",
            denominator_root="batch:mask",
        ),
        model=nn.Linear(3, 1),
    ),
    "mean of an empty selection": lambda: in_loss(
        lambda m, b: m(b["x"])[b["keep"]].mean(),
        {"keep": torch.zeros(4, dtype=torch.bool)},
        at("aten.mean", (), reduced_elements=0),
    ),
    "overflow in half precision": overflow_in_half,
    "sum that overflows in half precision names no sample": lambda: in_loss(
        lambda m, b: (m(b["x"]).abs() * 20).sum(),
        {"x": (noise(64, 3) * 100).abs().half()},
        at("aten.sum", (), finite_in="float32", confounded_samples=True),
        model=nn.Linear(3, 8).half(),
    ),
    "bfloat16 rounds a denominator to zero": lambda: in_loss(
        lambda m, b: (m(b["x"].bfloat16()).pow(2).mean(-1) / (1 - b["t"].bfloat16())).mean(),
        {"t": torch.tensor([0.5, 0.9995, 0.3, 0.2])},
        at(
            "aten.div", (1,), half_precision=True, zero_denominator=True, denominator_root="batch:t"
        ),
        model=nn.Linear(3, 3).bfloat16(),
    ),
    "epsilon that vanishes in half precision": lambda: Case(
        Norm().half(),
        {"x": with_row(0.0).half(), "y": noise(4, 3).half()},
        mse,
        at(
            "aten.div",
            (1,),
            phase="forward",
            module="",
            zero_denominator=True,
            eps_vanished=1e-08,
            half_precision=True,
        ),
    ),
    "weight norm of a zero row": weight_norm,
    "target that is too long for CTC": ctc,
    "negative running variance in evaluation mode": lambda: Case(
        with_element(linear_norm().eval(), "1.running_var", 2, -1.0),
        {"x": noise(4, 3), "y": noise(4, 1)},
        mse,
        at("aten.native_batch_norm", (), phase="forward", module="1", argument="negative"),
    ),
    "named losses lead to the bad one": lambda: in_loss(
        lambda m, b: {"main": squares(m, b), "penalty": (m(b["x"]) * 0).log().mean()},
        {},
        at("aten.log", None),
    ),
    "softmax after an in-place mask": padded_attention,
    "memory that was never written": lambda: Case(
        Scratch(),
        {"x": noise(4, 3)},
        squares,
        at("aten.empty", None, phase="forward", module="", uninitialised=True),
    ),
    "forces computed in the forward": forces,
    "modules without tensor outputs": lambda: Case(
        Outer(), {"x": noise(4, 3)}, squares, at("aten.log", None, phase="forward", module="loader")
    ),
    "a shared module": lambda: Case(
        Twice(), {"x": noise(4, 3)}, squares, at("aten.exp", None, phase="forward", module="")
    ),
    "dead row of a mask buffer blames the softmax": lambda: Case(
        Masked(torch.tensor([[0.0] * 3] * 2 + [[-INF] * 3] + [[0.0] * 3])),
        {"x": noise(4, 3)},
        squares,
        at("aten._softmax", (), phase="forward", module=""),
    ),
    "NaN that a condition chose": lambda: in_loss(
        lambda m, b: m(b["x"]).mean() - torch.logdet(m.weight),
        {},
        at("aten.where", None, chosen_by="aten._linalg_slogdet"),
        model=with_weights(
            nn.Linear(3, 3, bias=False), "weight", torch.diag(torch.tensor([1.0, 1.0, -0.5]))
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", FORWARD)
def test_forward_origin_is_exact(name: str) -> None:
    origin = check(FORWARD[name]())
    assert origin.source is not None
    assert origin.source.partition(":")[0].endswith(("test_places.py", "cases.py"))


def bad(*where: Any, value: float = math.nan, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    x = noise(*shape)
    for place in where:
        x[place] = value
    return x


Y = {"y": noise(4, 1)}
OUTSIDE: dict[str, Callable[[], Case]] = {
    "one feature": lambda: Case(
        nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)),
        {"x": bad((3, 1)), **Y},
        mse,
        at("aten.addmm", (3,), phase="input", module="0", tensor="batch:x", index=(3, 1)),
    ),
    "one weight": lambda: Case(
        with_element(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), "1.weight", (0, 2), math.nan),
        {"x": noise(4, 3), **Y},
        mse,
        at(
            "aten.addmm",
            (),
            phase="state",
            module="1",
            tensor="param:1.weight",
            index=(0, 2),
            bad_elements=1,
            elements=4,
        ),
    ),
    "one row of an embedding": lambda: Case(
        with_element(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1)), "0.weight", (3, 1), INF),
        {"x": torch.tensor([0, 3, 2, 1]), **Y},
        mse,
        at("aten.embedding", (), phase="state", module="0", tensor="param:0.weight", index=(3, 1)),
    ),
    **{
        f"{value} in a table": lambda value=value: Case(
            WithBuffer(bad(2, value=value, shape=(3,))),
            {"x": noise(4, 3)},
            squares,
            at("aten.add", (), phase="state", module="", tensor="buffer:table", index=(2,)),
        )
        for value in (math.nan, INF)
    },
    "infinite entry of a table that multiplies the loss": lambda: Case(
        WithBuffer(torch.tensor([-INF, -1.0, 0.0])),
        {"x": noise(4, 3), "t": torch.tensor([1, 2, 0, 2])},
        lambda m, b: m(b["x"], b["t"]).mean(),
        at("aten.index", None, phase="state", module="", tensor="buffer:table", as_data=True),
    ),
    "running variance that training never reads": lambda: Case(
        with_element(linear_norm(), "1.running_var", 1, math.nan),
        {"x": noise(6, 3), "y": noise(6, 1)},
        mse,
        at(
            "aten.native_batch_norm",
            None,
            phase="state",
            module="1",
            tensor="buffer:1.running_var",
            index=(1,),
        ),
    ),
    "a target inside a nested batch": lambda: Case(
        nn.Linear(3, 1),
        ({"features": [noise(4, 3)]}, bad(1, shape=(4, 1))),
        lambda m, b: (m(b[0]["features"][0]) - b[1]).pow(2).mean(),
        at("aten.sub", (1,), phase="input", module=None, tensor="batch:1"),
    ),
    "a batch of the user's own class": lambda: Case(
        nn.Linear(3, 1),
        Graph(bad((2, 1))),
        lambda m, b: m(b.nodes).pow(2).mean(),
        at("aten.addmm", (2,), phase="input", module="", tensor="batch:nodes", index=(2, 1)),
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_bad_data_and_bad_state_are_named_with_their_element(name: str) -> None:
    check(OUTSIDE[name]())


def test_exp_overflow_inside_a_block_names_block_line_and_sample() -> None:
    origin = check(in_net(lambda x: torch.exp(x), with_row(500.0), at("aten.exp")))
    assert origin.source is not None and "test_places.py:" in origin.source
    assert any("torch.exp(x)" in line for line in origin.context)
    exponent = origin.inputs[0]
    assert exponent.name == "self" and exponent.value is not None and exponent.value > 88


def loop_of(model: nn.Module, loss: Callable[[Any], Any]) -> Loop:
    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


def test_nan_gradient_masked_by_relu_is_healthy() -> None:
    model = nn.Linear(3, 1, bias=False)

    def loss(batch: Tensor) -> Tensor:
        value = model(batch).abs()
        return torch.relu(-torch.sqrt(value)).sum() + model(batch).pow(2).mean()

    assert loop_of(model, loss).step(0, [noise(4, 3)]) is None


def test_legitimate_minus_infinity_mask_is_healthy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(torch.relu))

    def loss(x: Tensor) -> Tensor:
        h = model(x)
        scores = h @ h.transpose(1, 2) + torch.full((5, 5), -INF).triu(1)
        return F.mse_loss(torch.softmax(scores, -1) @ h, x)

    assert loop_of(model, loss).step(0, [noise(2, 5, 4)]) is None


def test_poisoned_optimizer_slot_names_slot_element_and_parameter() -> None:
    model = nn.Linear(3, 1)
    loop = Loop(model, torch.optim.Adam(model.parameters(), lr=0.01), lambda b: mse(model, b))
    batch = {"x": noise(4, 3), **Y}
    assert loop.step(0, [batch]) is None
    loop.optimizer.state[model.weight]["exp_avg"][0, 2] = math.nan
    origin = loop.step(1, [batch])
    assert origin is not None
    assert (origin.phase, origin.tensor, origin.inputs[0].index) == ("state", "opt:exp_avg", (0, 2))
    assert origin.evidence.parameter == "weight"


def test_infinite_value_in_the_second_micro_batch_names_it() -> None:
    model = nn.Linear(3, 1)
    micro = [{"x": noise(4, 3, seed=i), **Y} for i in range(3)]
    micro[1]["x"][2, 0] = INF
    origin = loop_of(model, lambda b: mse(model, b)).step(0, micro)
    assert origin is not None
    found = (origin.phase, origin.tensor, origin.micro_batch, origin.samples)
    assert (*found, origin.inputs[0].index) == ("input", "batch:x", 1, (2,), (2, 0))


def test_sharded_parameters_are_not_replayed_alone() -> None:
    model = nn.Linear(3, 1)
    loop = loop_of(model, lambda b: mse(model, b) * math.nan)
    loop.sharded = True
    origin = loop.step(0, [{"x": noise(4, 3), **Y}])
    assert isinstance(origin, Origin) and origin.reproduced is None
    assert origin.evidence.no_replay == "parameters are sharded over ranks"


def test_finite_divergence_is_an_optimizer_origin_by_evidence() -> None:
    model = nn.Linear(3, 1)
    loop = loop_of(model, lambda b: mse(model, b) * math.nan)
    loop.step(0, [{"x": noise(4, 3), **Y}])
    assert loop.last is not None
    seen = {"loss": 9.0, "micro_losses": (9.0,), "grad_norm": 1.0, "repeat_loss": 8.5}
    origin = locate(loop.last[0], Reading(step=7, lr=(4.0,), **seen))  # type: ignore[arg-type]
    assert (origin.phase, origin.op, origin.method) == ("optimizer", None, "evidence")
    assert (origin.evidence.lr, origin.evidence.repeat_loss) == (4.0, 8.5)


# --- samples: named only when leaving them out, and keeping them, proves it
# --------------------------------------------------------------------------------------------------


def log_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return squares(model, batch) + batch["w"].log().mean()


def weights(count: int, *zeros: int) -> Tensor:
    return torch.tensor([float(row not in zeros) for row in range(count)])


def strict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Any batch of four is bad, whoever is in it."""
    h = model(batch["x"])
    return (h.pow(2).sum() / torch.tensor(float(h.shape[0] - 4))).abs()


def fixed_size(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    assert len(batch["x"]) == 4, "fixed batch size"
    return squares(model, batch)


def lost_row(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A reduction over a transposed batch: no row of the result is a sample."""
    return model(batch["x"]).t().contiguous().pow(2).sum(0).mean().float()


def images(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    seen = torch.stack([image.mean((1, 2)) for image in batch["images"]])
    return (model(seen) - batch["y"]).pow(2).mean()


def five_images() -> dict[str, Any]:
    made = [noise(3, 4 + k, 4) for k in range(5)]
    made[4][1, 2, 2] = math.nan
    return {"images": made, "y": noise(5, 1)}


SAMPLES: dict[str, tuple[Any, Callable[[], Any], str, tuple[int, ...]]] = {
    "several guilty": (
        *(log_loss, lambda: {"x": noise(8, 3), "w": weights(8, 2, 5)}, "aten.log", (2, 5)),
    ),
    "all guilty": (
        *(log_loss, lambda: {"x": noise(4, 3), "w": weights(4, 0, 1, 2, 3)}, "aten.log", ()),
    ),
    **{
        f"row {row} lost in a reduction": (
            *(lost_row, lambda row=row: {"x": bad(row, value=1e25, shape=(13, 3))}),
            *("aten.pow", (row,)),
        )
        for row in (0, 5, 12)
    },
    "statistics that any sample breaks": (strict, lambda: {"x": noise(4, 3)}, "aten.div", ()),
    "a batch that cannot be smaller": (
        *(fixed_size, lambda: {"x": bad((1, 1), value=INF)}, "aten.addmm", ()),
    ),
    "a single sample cannot be confirmed": (
        *(squares, lambda: {"x": bad((0, 0), shape=(1, 3))}, "aten.addmm", ()),
    ),
    "the image of a list, not its channel": (images, five_images, "aten.mean", (4,)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_named_where_that_is_proven(name: str) -> None:
    loss, batch, op, samples = SAMPLES[name]
    origin = find(Case(nn.Linear(3, 1), batch(), loss, at()))
    assert (origin.op, origin.samples) == (op, samples)
    assert origin.evidence.confounded_samples or name != "all guilty"


def test_batch_norm_does_not_hide_the_guilty_sample() -> None:
    batch = {"x": bad((4, 0), shape=(6, 3)), "y": noise(6, 1)}
    assert find(Case(linear_norm(), batch, mse, at())).samples == (4,)


def test_rows_of_heads_and_tokens_lead_to_samples() -> None:
    assert suspects_from_rows([2, 3], 8, 4) == [1]
    assert suspects_from_rows([0, 1], 3, 4) == []
    assert suspects_from_rows([], 0, 4) == []


# --- the statement behind an operation; a line of a package is not the user's


def test_statement_is_quoted_whole_with_the_operation_in_it(tmp_path: Path) -> None:
    file = tmp_path / "two_lines.py"
    text = "def f(a, look):\n    b = (\n        a +\n        look())\n    if look() > 1: return b\n"
    file.write_text(text, encoding="utf-8")
    space: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), space)
    lines: list[Line] = []

    def look() -> int:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        caller = frame.f_back
        lines.append(Line(str(file), caller.f_lineno, caller.f_code, caller.f_lasti))
        return 1

    space["f"](1, look)
    first, second = map(statement, lines)
    assert first is not None and second is not None
    assert (first.line, first.text) == (2, "    b = (\n        a +\n        look())")
    assert first.text.encode()[first.start : first.end] == b"look()"
    assert (second.line, second.text[second.start : second.end]) == (5, "look()")


LIBRARY = "def mean_of(loss, count):\n    return loss / count\n"


def test_operation_of_a_package_is_placed_at_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own line is named beside it, and no remedy rewrites it."""
    package = tmp_path / "site-packages" / "a_loss_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    import a_loss_library  # type: ignore[import-not-found]

    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.Guard(net, optimizer, config=config) as guard:

        def loss_fn(x: torch.Tensor) -> torch.Tensor:
            total = net(x).sum()
            return a_loss_library.mean_of(total, total * 0)  # type: ignore[no-any-return]

        guard.step(loss_fn, torch.ones(3, 2))
    (incident,) = guard.incidents
    origin = incident.origin
    assert origin is not None and origin.library == "a_loss_library/__init__.py:2"
    assert (origin.source or "").partition(":")[0].endswith("test_places.py")
    assert any("mean_of(" in line for line in origin.context)
    assert incident.findings[0].code == "SG201"
    for remedy in incident.findings[0].remedies:
        assert not remedy.snippet and not remedy.edits
        assert "a_loss_library" in remedy.title and "test_places.py" in remedy.title
