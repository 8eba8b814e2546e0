"""Bad values born in the forward pass or in the loss: exact operation, module and, where one is guilty, sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Case, check, mse, net_case, noise, with_row

CASES: dict[str, Callable[[], Case]] = {}


def kind(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


@kind
def log_of_a_negative_activation() -> Case:
    facts = ("argument=negative", "argument_from=aten.mm")
    return net_case(torch.log, phase="forward", module="act", op="aten.log", facts=facts)


@kind
def root_of_a_negative_activation() -> Case:
    return net_case(torch.sqrt, phase="forward", module="act", op="aten.sqrt", facts=("argument=negative",))


@kind
def root_in_place() -> Case:
    return net_case(lambda x: x.clone().sqrt_(), phase="forward", module="act", op="aten.sqrt_")


@kind
def power_of_a_negative_base() -> Case:
    return net_case(lambda x: x**1.5, phase="forward", module="act", op="aten.pow", facts=("argument=negative",))


@kind
def arcsine_outside_its_domain() -> Case:
    case = net_case(torch.asin, with_row(50.0), phase="forward", module="act", op="aten.asin")
    with torch.no_grad():
        case.model.fc.weight.mul_(0.1)  # type: ignore[union-attr,operator]
    case.samples = (1,)
    return case


@kind
def division_by_the_norm_of_a_zero_vector() -> Case:
    facts = ("denominator=zero", "numerator=zero", "denominator_from=aten.linalg_vector_norm")
    return net_case(
        lambda x: x / x.norm(dim=-1, keepdim=True),
        with_row(0.0),
        phase="forward",
        module="act",
        op="aten.div",
        samples=(1,),
        facts=facts,
    )


@kind
def rsqrt_of_a_zero_variance() -> Case:
    return net_case(
        lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True)),
        with_row(0.0),
        phase="forward",
        module="act",
        op="aten.rsqrt",
        samples=(1,),
        facts=("denominator=zero", "denominator_from=aten.var", "then=aten.mul"),
    )


@kind
def deviation_of_a_single_sample() -> Case:
    x = noise(1, 3)
    return net_case(
        lambda h: h / h.std(0), x, phase="forward", module="act", op="aten.std", samples=(), facts=("one_element",)
    )


@kind
def zero_times_infinity_blames_the_exp() -> Case:
    return net_case(
        lambda x: torch.exp(x * 100) * torch.zeros_like(x),
        with_row(5.0),
        phase="forward",
        module="act",
        op="aten.exp",
        facts=("then=aten.mul",),
    )


@kind
def infinity_minus_infinity_blames_the_exp() -> Case:
    return net_case(
        lambda x: torch.exp(x * 100) - torch.exp(x * 100 + 1),
        with_row(9.0),
        phase="forward",
        module="act",
        op="aten.exp",
        facts=("then=aten.sub", "finite_in=float64"),
    )


@kind
def mask_written_as_a_product_with_infinity() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.softmax(model(batch["x"]) + (1 - batch["mask"]) * -math.inf, -1).pow(2).mean()

    batch = {"x": noise(4, 3), "mask": torch.ones(4, 3)}
    facts = ("zero_times_inf", "tame_inf")
    return Case(nn.Linear(3, 3), batch, loss, phase="loss", module=None, op="aten.mul", samples=(), facts=facts)


@kind
def logsumexp_over_a_masked_row() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.logsumexp(model(batch["x"]).masked_fill(batch["mask"], -math.inf), -1).mean()

    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2] = True
    batch = {"x": noise(4, 3), "mask": mask}
    facts = ("masked_rows=1", "tame_inf")
    return Case(nn.Linear(3, 3), batch, loss, phase="loss", module=None, op="aten.logsumexp", samples=(2,), facts=facts)


@kind
def target_class_is_masked() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).masked_fill(batch["mask"], -math.inf), batch["y"])

    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2, 1] = True
    batch = {"x": noise(4, 3), "mask": mask, "y": torch.tensor([0, 1, 1, 2])}
    facts = ("target_probability=zero",)
    return Case(
        nn.Linear(3, 3), batch, loss, phase="loss", module=None, op="aten.nll_loss_forward", samples=(2,), facts=facts
    )


@kind
def all_targets_ignored() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    batch = {"x": noise(4, 3), "y": torch.full((4,), -100)}
    facts = ("valid_targets=0", "targets=4")
    return Case(
        nn.Linear(3, 3), batch, loss, phase="loss", module=None, op="aten.nll_loss_forward", samples=(), facts=facts
    )


@kind
def cosine_with_a_zero_vector() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h, y = model(batch["x"]), batch["y"]
        return 1 - ((h * y).sum(-1) / (h.norm(dim=-1) * y.norm(dim=-1))).mean()

    batch = {"x": noise(4, 3), "y": with_row(0.0, row=3, width=4)}
    return Case(nn.Linear(3, 4), batch, loss, phase="loss", module=None, op="aten.div", samples=(3,))


@kind
def divergence_with_a_zero_probability() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_p = model(batch["x"]).log_softmax(-1)
        return (batch["q"] * (batch["q"].log() - log_p)).sum(-1).mean()

    q = torch.full((4, 3), 1 / 3)
    q[1] = torch.tensor([0.0, 0.5, 0.5])
    facts = ("argument=zero", "argument_root=batch:q", "then=aten.mul")
    return Case(
        nn.Linear(3, 3),
        {"x": noise(4, 3), "q": q},
        loss,
        phase="loss",
        module=None,
        op="aten.log",
        samples=(1,),
        facts=facts,
    )


@kind
def attention_weights_that_sum_to_zero() -> Case:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            weights = self.score(x).exp() * mask
            return weights / weights.sum(-1, keepdim=True)

    mask = torch.ones(4, 3)
    mask[0] = 0
    facts = ("denominator=zero", "denominator_from=aten.sum")
    return Case(
        Gate(),
        {"x": noise(4, 3), "mask": mask},
        lambda m, b: m(b["x"], b["mask"]).pow(2).mean(),
        phase="forward",
        module="",
        op="aten.div",
        samples=(0,),
        facts=facts,
    )


@kind
def masked_mean_without_any_valid_element() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).squeeze(-1) * batch["mask"]).sum() / batch["mask"].sum()

    facts = ("denominator=zero", "numerator=zero", "denominator_from=aten.sum", "denominator_root=batch:mask")
    batch = {"x": noise(4, 3), "mask": torch.zeros(4)}
    return Case(nn.Linear(3, 1), batch, loss, phase="loss", module=None, op="aten.div", samples=(), facts=facts)


@kind
def mean_of_an_empty_selection() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])[batch["keep"]].mean()

    batch = {"x": noise(4, 3), "keep": torch.zeros(4, dtype=torch.bool)}
    return Case(
        nn.Linear(3, 1), batch, loss, phase="loss", module=None, op="aten.mean", samples=(), facts=("reduced=0",)
    )


@kind
def half_precision_overflow_in_a_linear_layer() -> Case:
    model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 1)).half()
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # type: ignore[union-attr,operator]
    batch = {"x": with_row(60000.0).half(), "y": noise(4, 1).half()}
    facts = ("half", "dtype_limit=65504", "finite_in=float32", "then=aten.native_layer_norm")
    return Case(model, batch, mse, phase="forward", module="0", op="aten.mm", samples=(1,), facts=facts)


@kind
def half_precision_sum_overflow_names_no_sample() -> Case:
    model = nn.Linear(3, 8).half()
    batch = {"x": (noise(64, 3) * 100).abs().half()}
    facts = ("finite_in=float32", "samples=confounded")
    return Case(
        model,
        batch,
        lambda m, b: (m(b["x"]).abs() * 20).sum(),
        phase="loss",
        module=None,
        op="aten.sum",
        samples=(),
        facts=facts,
    )


@kind
def bfloat16_rounds_a_denominator_to_zero() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).pow(2).mean(-1) / (1 - batch["t"].bfloat16())).mean()

    batch = {"x": noise(4, 3).bfloat16(), "t": torch.tensor([0.5, 0.9995, 0.3, 0.2])}
    facts = ("half", "denominator=zero", "denominator_root=batch:t")
    return Case(
        nn.Linear(3, 3).bfloat16(), batch, loss, phase="loss", module=None, op="aten.div", samples=(1,), facts=facts
    )


@kind
def extreme_finite_sample_overflows_downstream() -> Case:
    facts = ("finite_in=float64", "sample_max=1e+30")
    return net_case(
        lambda x: x**2, with_row(1e30), phase="forward", module="act", op="aten.pow", samples=(1,), facts=facts
    )


@kind
def spectrum_of_silence_in_decibel() -> Case:
    return net_case(
        lambda x: torch.log10(torch.fft.fft(x).abs()),
        with_row(0.0),
        phase="forward",
        module="act",
        op="aten.log10",
        samples=(1,),
        facts=("argument=zero", "argument_from=aten.abs"),
    )


@kind
def weight_norm_of_a_zero_row() -> Case:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].parametrizations.weight.original1[1] = 0  # type: ignore[union-attr,index]
    place = {"phase": "forward", "module": "0.parametrizations.weight.0", "op": "aten._weight_norm_interface"}
    return Case(model, {"x": noise(4, 3), "y": noise(4, 1)}, mse, **place, samples=(), facts=("denominator=zero",))


@kind
def ctc_target_longer_than_its_input() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["t"], batch["have"], batch["need"])

    targets = torch.tensor([[1, 2, 3, 1, 2], [1, 1, 1, 1, 1], [1, 2, 3, 1, 2]])
    batch = {"x": noise(3, 6, 3), "t": targets, "have": torch.full((3,), 6), "need": torch.full((3,), 5)}
    return Case(
        nn.Linear(3, 4),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten._ctc_loss",
        samples=(1,),
        facts=("ctc_infeasible=1",),
    )


@kind
def negative_running_variance_in_evaluation_mode() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    model[1].running_var[2] = -1.0  # type: ignore[union-attr,index]
    place = {"phase": "forward", "module": "1", "op": "aten.native_batch_norm"}
    return Case(model, {"x": noise(4, 3), "y": noise(4, 1)}, mse, **place, samples=(), facts=("argument=negative",))


@kind
def named_losses_are_followed_into_the_bad_one() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"main": mse(model, batch), "penalty": (model(batch["x"]) * 0).log().mean()}

    batch = {"x": noise(4, 3), "y": noise(4, 1)}
    return Case(nn.Linear(3, 1), batch, loss, phase="loss", module=None, op="aten.log")


@kind
def softmax_after_an_in_place_mask() -> Case:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4)

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            h = self.q(x)
            scores = (h @ h.transpose(1, 2)).masked_fill_(pad[:, None], -math.inf)
            return scores.softmax(-1) @ h

    pad = torch.zeros(3, 3, dtype=torch.bool)
    pad[1] = True
    return Case(
        Attention(),
        {"x": noise(3, 3, 4), "pad": pad},
        lambda m, b: m(b["x"], b["pad"]).pow(2).mean(),
        phase="forward",
        module="",
        op="aten._softmax",
        samples=(1,),
        facts=("masked_rows=3", "rows=9"),
    )


@kind
def memory_that_nobody_wrote() -> Case:
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

    batch = {"x": noise(4, 3)}
    facts = ("uninitialised",)
    return Case(
        Scratch(), batch, lambda m, b: m(b["x"]).pow(2).mean(), phase="forward", module="", op="aten.empty", facts=facts
    )


@kind
def forces_computed_in_the_forward() -> Case:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(1, 4), nn.Linear(4, 1)

        def forward(self, position: Tensor) -> Tensor:
            at = position.clone().requires_grad_()
            distance = ((at[:, 0] - at[:, 1]) ** 2).sum(-1, keepdim=True).sqrt()
            energy = self.out(torch.tanh(self.hidden(distance)))
            return torch.autograd.grad(energy.sum(), at, create_graph=True)[0]

    position = noise(4, 2, 3)
    position[2, 0] = position[2, 1]
    return Case(
        Energy(),
        {"x": position, "y": noise(4, 2, 3, seed=4)},
        mse,
        phase="forward",
        module="",
        op="aten.div",
        node="SqrtBackward0",
        samples=(2,),
        facts=("inner_grad", "denominator=zero"),
    )


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", sorted(CASES))
def test_forward_origin_is_exact(name: str) -> None:
    origin = check(CASES[name]())
    assert origin.source is not None and ("test_forward_kinds.py:" in origin.source or "cases.py:" in origin.source)


def test_epsilon_that_vanishes_in_half_precision_is_a_fact() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h / (h.abs().sum(-1, keepdim=True) + 1e-8)

    batch = {"x": with_row(0.0).half(), "y": noise(4, 3).half()}
    facts = ("denominator=zero", "eps_vanished=1e-08", "half")
    check(Case(Norm().half(), batch, mse, phase="forward", module="", op="aten.div", samples=(1,), facts=facts))


def test_batches_of_a_users_own_class_are_looked_into() -> None:
    class Graph:
        def __init__(self, nodes: Tensor) -> None:
            self.nodes, self.name = nodes, "g"

    nodes = noise(4, 3)
    nodes[2, 1] = math.nan
    place = {"phase": "input", "module": "", "op": "aten.addmm", "tensor": "batch:nodes"}
    check(
        Case(nn.Linear(3, 1), Graph(nodes), lambda m, b: m(b.nodes).pow(2).mean(), **place, samples=(2,), index=(2, 1))
    )
