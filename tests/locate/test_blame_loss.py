"""Bad values of the forward pass or the loss: exact operation, module and guilty sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard.records import Evidence

from .cases import Case, check, mse, net_case, noise, with_row

CASES: dict[str, Callable[[], Case]] = {}


def kind(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


@kind
def log_of_a_negative_activation() -> Case:
    evidence = Evidence(argument="negative", argument_from="aten.mm")
    return net_case(torch.log, phase="forward", module="act", op="aten.log", evidence=evidence)


@kind
def root_of_a_negative_activation() -> Case:
    return net_case(
        torch.sqrt,
        phase="forward",
        module="act",
        op="aten.sqrt",
        evidence=Evidence(argument="negative"),
    )


@kind
def root_in_place() -> Case:
    return net_case(lambda x: x.clone().sqrt_(), phase="forward", module="act", op="aten.sqrt_")


@kind
def power_of_a_negative_base() -> Case:
    return net_case(
        lambda x: x**1.5,
        phase="forward",
        module="act",
        op="aten.pow",
        evidence=Evidence(argument="negative"),
    )


@kind
def arcsine_outside_its_domain() -> Case:
    case = net_case(torch.asin, with_row(50.0), phase="forward", module="act", op="aten.asin")
    with torch.no_grad():
        case.model.fc.weight.mul_(0.1)  # type: ignore[union-attr,operator]
    case.samples = (1,)
    return case


@kind
def division_by_the_norm_of_a_zero_vector() -> Case:
    evidence = Evidence(
        zero_denominator=True, zero_numerator=True, denominator_from="aten.linalg_vector_norm"
    )
    return net_case(
        lambda x: x / x.norm(dim=-1, keepdim=True),
        with_row(0.0),
        phase="forward",
        module="act",
        op="aten.div",
        samples=(1,),
        evidence=evidence,
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
        evidence=Evidence(
            zero_denominator=True, denominator_from="aten.var", turned_nan_by="aten.mul"
        ),
    )


@kind
def deviation_of_a_single_sample() -> Case:
    x = noise(1, 3)
    return net_case(
        lambda h: h / h.std(0),
        x,
        phase="forward",
        module="act",
        op="aten.std",
        samples=(),
        evidence=Evidence(reduced_elements=1),
    )


@kind
def zero_times_infinity_blames_the_exp() -> Case:
    return net_case(
        lambda x: torch.exp(x * 100) * torch.zeros_like(x),
        with_row(5.0),
        phase="forward",
        module="act",
        op="aten.exp",
        evidence=Evidence(turned_nan_by="aten.mul"),
    )


@kind
def infinity_minus_infinity_blames_the_exp() -> Case:
    return net_case(
        lambda x: torch.exp(x * 100) - torch.exp(x * 100 + 1),
        with_row(9.0),
        phase="forward",
        module="act",
        op="aten.exp",
        evidence=Evidence(turned_nan_by="aten.sub", finite_in="float64"),
    )


@kind
def mask_written_as_a_product_with_infinity() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.softmax(model(batch["x"]) + (1 - batch["mask"]) * -math.inf, -1).pow(2).mean()

    batch = {"x": noise(4, 3), "mask": torch.ones(4, 3)}
    evidence = Evidence(zero_times_inf=True, intended_inf=True)
    return Case(
        nn.Linear(3, 3),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten.mul",
        samples=(),
        evidence=evidence,
    )


@kind
def logsumexp_over_a_masked_row() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.logsumexp(model(batch["x"]).masked_fill(batch["mask"], -math.inf), -1).mean()

    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2] = True
    batch = {"x": noise(4, 3), "mask": mask}
    evidence = Evidence(masked_rows=1, intended_inf=True)
    return Case(
        nn.Linear(3, 3),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten.logsumexp",
        samples=(2,),
        evidence=evidence,
    )


@kind
def target_class_is_masked() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).masked_fill(batch["mask"], -math.inf), batch["y"])

    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2, 1] = True
    batch = {"x": noise(4, 3), "mask": mask, "y": torch.tensor([0, 1, 1, 2])}
    evidence = Evidence(zero_target_probability=True)
    return Case(
        nn.Linear(3, 3),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten.nll_loss_forward",
        samples=(2,),
        evidence=evidence,
    )


@kind
def all_targets_ignored() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    batch = {"x": noise(4, 3), "y": torch.full((4,), -100)}
    evidence = Evidence(valid_targets=0, targets=4)
    return Case(
        nn.Linear(3, 3),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten.nll_loss_forward",
        samples=(),
        evidence=evidence,
    )


@kind
def cosine_with_a_zero_vector() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h, y = model(batch["x"]), batch["y"]
        return 1 - ((h * y).sum(-1) / (h.norm(dim=-1) * y.norm(dim=-1))).mean()

    batch = {"x": noise(4, 3), "y": with_row(0.0, row=3, width=4)}
    return Case(
        nn.Linear(3, 4), batch, loss, phase="loss", module=None, op="aten.div", samples=(3,)
    )


@kind
def divergence_with_a_zero_probability() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_p = model(batch["x"]).log_softmax(-1)
        return (batch["q"] * (batch["q"].log() - log_p)).sum(-1).mean()

    q = torch.full((4, 3), 1 / 3)
    q[1] = torch.tensor([0.0, 0.5, 0.5])
    evidence = Evidence(argument="zero", argument_root="batch:q", turned_nan_by="aten.mul")
    return Case(
        nn.Linear(3, 3),
        {"x": noise(4, 3), "q": q},
        loss,
        phase="loss",
        module=None,
        op="aten.log",
        samples=(1,),
        evidence=evidence,
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
    evidence = Evidence(zero_denominator=True, denominator_from="aten.sum")
    return Case(
        Gate(),
        {"x": noise(4, 3), "mask": mask},
        lambda m, b: m(b["x"], b["mask"]).pow(2).mean(),
        phase="forward",
        module="",
        op="aten.div",
        samples=(0,),
        evidence=evidence,
    )


@kind
def masked_mean_without_any_valid_element() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).squeeze(-1) * batch["mask"]).sum() / batch["mask"].sum()

    evidence = Evidence(
        zero_denominator=True,
        zero_numerator=True,
        denominator_from="aten.sum",
        denominator_root="batch:mask",
    )
    batch = {"x": noise(4, 3), "mask": torch.zeros(4)}
    return Case(
        nn.Linear(3, 1),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten.div",
        samples=(),
        evidence=evidence,
    )


@kind
def mean_of_an_empty_selection() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])[batch["keep"]].mean()

    batch = {"x": noise(4, 3), "keep": torch.zeros(4, dtype=torch.bool)}
    return Case(
        nn.Linear(3, 1),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten.mean",
        samples=(),
        evidence=Evidence(reduced_elements=0),
    )


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", sorted(CASES))
def test_forward_origin_is_exact(name: str) -> None:
    origin = check(CASES[name]())
    assert origin.source is not None and (
        "test_blame_loss.py:" in origin.source or "cases.py:" in origin.source
    )


def test_epsilon_that_vanishes_in_half_precision_is_a_fact() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h / (h.abs().sum(-1, keepdim=True) + 1e-8)

    batch = {"x": with_row(0.0).half(), "y": noise(4, 3).half()}
    evidence = Evidence(zero_denominator=True, eps_vanished=1e-08, half_precision=True)
    check(
        Case(
            Norm().half(),
            batch,
            mse,
            phase="forward",
            module="",
            op="aten.div",
            samples=(1,),
            evidence=evidence,
        )
    )


def test_tensors_inside_a_users_own_batch_class_are_found() -> None:
    class Graph:
        def __init__(self, nodes: Tensor) -> None:
            self.nodes, self.name = nodes, "g"

    nodes = noise(4, 3)
    nodes[2, 1] = math.nan
    place = {"phase": "input", "module": "", "op": "aten.addmm", "tensor": "batch:nodes"}
    check(
        Case(
            nn.Linear(3, 1),
            Graph(nodes),
            lambda m, b: m(b.nodes).pow(2).mean(),
            **place,
            samples=(2,),
            index=(2, 1),
        )
    )
