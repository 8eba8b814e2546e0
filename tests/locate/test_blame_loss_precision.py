"""Bad values of half precision, extreme values, stored tensors and losses of several parts."""

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
def half_precision_overflow_in_a_linear_layer() -> Case:
    model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 1)).half()
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # type: ignore[union-attr,operator]
    batch = {"x": with_row(60000.0).half(), "y": noise(4, 1).half()}
    evidence = Evidence(
        half_precision=True,
        dtype_limit=65504.0,
        finite_in="float32",
        turned_nan_by="aten.native_layer_norm",
    )
    return Case(
        model,
        batch,
        mse,
        phase="forward",
        module="0",
        op="aten.mm",
        samples=(1,),
        evidence=evidence,
    )


@kind
def half_precision_sum_overflow_names_no_sample() -> Case:
    model = nn.Linear(3, 8).half()
    batch = {"x": (noise(64, 3) * 100).abs().half()}
    evidence = Evidence(finite_in="float32", confounded_samples=True)
    return Case(
        model,
        batch,
        lambda m, b: (m(b["x"]).abs() * 20).sum(),
        phase="loss",
        module=None,
        op="aten.sum",
        samples=(),
        evidence=evidence,
    )


@kind
def bfloat16_rounds_a_denominator_to_zero() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).pow(2).mean(-1) / (1 - batch["t"].bfloat16())).mean()

    batch = {"x": noise(4, 3).bfloat16(), "t": torch.tensor([0.5, 0.9995, 0.3, 0.2])}
    evidence = Evidence(half_precision=True, zero_denominator=True, denominator_root="batch:t")
    return Case(
        nn.Linear(3, 3).bfloat16(),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten.div",
        samples=(1,),
        evidence=evidence,
    )


@kind
def extreme_finite_sample_overflows_downstream() -> Case:
    evidence = Evidence(finite_in="float64", sample_max=1e30)
    return net_case(
        lambda x: x**2,
        with_row(1e30),
        phase="forward",
        module="act",
        op="aten.pow",
        samples=(1,),
        evidence=evidence,
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
        evidence=Evidence(argument="zero", argument_from="aten.abs"),
    )


@kind
def weight_norm_of_a_zero_row() -> Case:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].parametrizations.weight.original1[1] = 0  # type: ignore[union-attr,index]
    place = {
        "phase": "forward",
        "module": "0.parametrizations.weight.0",
        "op": "aten._weight_norm_interface",
    }
    return Case(
        model,
        {"x": noise(4, 3), "y": noise(4, 1)},
        mse,
        **place,
        samples=(),
        evidence=Evidence(zero_denominator=True),
    )


@kind
def ctc_target_longer_than_its_input() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["t"], batch["have"], batch["need"])

    targets = torch.tensor([[1, 2, 3, 1, 2], [1, 1, 1, 1, 1], [1, 2, 3, 1, 2]])
    batch = {
        "x": noise(3, 6, 3),
        "t": targets,
        "have": torch.full((3,), 6),
        "need": torch.full((3,), 5),
    }
    return Case(
        nn.Linear(3, 4),
        batch,
        loss,
        phase="loss",
        module=None,
        op="aten._ctc_loss",
        samples=(1,),
        evidence=Evidence(ctc_infeasible=1),
    )


@kind
def negative_running_variance_in_evaluation_mode() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    model[1].running_var[2] = -1.0  # type: ignore[union-attr,index]
    place = {"phase": "forward", "module": "1", "op": "aten.native_batch_norm"}
    return Case(
        model,
        {"x": noise(4, 3), "y": noise(4, 1)},
        mse,
        **place,
        samples=(),
        evidence=Evidence(argument="negative"),
    )


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
        evidence=Evidence(masked_rows=3, rows=9),
    )


@kind
def memory_that_was_never_written() -> Case:
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
    evidence = Evidence(uninitialised=True)
    return Case(
        Scratch(),
        batch,
        lambda m, b: m(b["x"]).pow(2).mean(),
        phase="forward",
        module="",
        op="aten.empty",
        evidence=evidence,
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
        evidence=Evidence(inner_gradient=True, zero_denominator=True),
    )


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", sorted(CASES))
def test_forward_origin_is_exact(name: str) -> None:
    origin = check(CASES[name]())
    assert origin.source is not None and (
        "test_blame_loss_precision.py:" in origin.source or "cases.py:" in origin.source
    )
