"""Stored tensors that were bad before the step, and steps that cannot be replayed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate import locate
from stepguard.records import Evidence, Origin, Reading

from .cases import Case, check, find, mse, noise
from .loop import Loop


class WithBuffer(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + self.table)


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).pow(2).mean()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_element_of_a_table_that_feeds_the_loss_is_state(value: float) -> None:
    table = noise(3)
    table[2] = value
    place = {"phase": "state", "module": "", "op": "aten.add", "tensor": "buffer:table"}
    check(Case(WithBuffer(table), {"x": noise(4, 3)}, squares, **place, index=(2,), samples=()))


def test_mask_buffer_with_a_dead_row_blames_the_softmax() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            mask = torch.zeros(4, 3)
            mask[2] = -math.inf
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.linear(x) + self.mask, -1)

    check(
        Case(
            Masked(),
            {"x": noise(4, 3)},
            squares,
            phase="forward",
            module="",
            op="aten._softmax",
            samples=(),
        )
    )


class Weighted(nn.Module):
    """A table of log variances, -inf where the variance is 0, weighs the errors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("table", torch.tensor([-math.inf, -1.0, 0.0]))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1).pow(2) * torch.exp(-self.table[t])


def test_infinite_entry_of_a_table_that_multiplies_the_loss_is_the_origin() -> None:
    batch = {"x": noise(4, 3), "t": torch.tensor([1, 2, 0, 2])}
    place = {"phase": "state", "module": "", "op": "aten.index", "tensor": "buffer:table"}
    check(
        Case(
            Weighted(),
            batch,
            lambda m, b: m(b["x"], b["t"]).mean(),
            **place,
            evidence=Evidence(as_data=True),
        )
    )


def test_nan_that_a_condition_chose_is_born_where_it_was_chosen() -> None:
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, -0.5])))
    evidence = Evidence(chosen_by="aten._linalg_slogdet")
    place = {"phase": "loss", "module": None, "op": "aten.where"}
    check(
        Case(
            model,
            {"x": noise(4, 3)},
            lambda m, b: m(b["x"]).mean() - torch.logdet(m.weight),
            **place,
            evidence=evidence,
        )
    )


def test_one_row_of_an_embedding() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight[3, 1] = math.nan
    batch = {"x": torch.tensor([0, 3, 2, 1]), "y": noise(4, 1)}
    place = {"phase": "state", "module": "0", "op": "aten.embedding", "tensor": "param:0.weight"}
    check(Case(model, batch, mse, **place, index=(3, 1), samples=()))


def test_running_variance_that_training_never_reads_names_its_reader() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].running_var[1] = math.nan
    batch = {"x": noise(6, 3), "y": noise(6, 1)}
    place = {
        "phase": "state",
        "module": "1",
        "op": "aten.native_batch_norm",
        "tensor": "buffer:1.running_var",
    }
    check(Case(model, batch, mse, **place, index=(1,)))


def test_poisoned_optimizer_slot_names_slot_element_and_parameter() -> None:
    model = nn.Linear(3, 1)
    loop = Loop(model, torch.optim.Adam(model.parameters(), lr=0.01), lambda b: mse(model, b))
    batch = {"x": noise(4, 3), "y": noise(4, 1)}
    assert loop.step(0, [batch]) is None
    loop.optimizer.state[model.weight]["exp_avg"][0, 2] = math.nan
    origin = loop.step(1, [batch])
    assert origin is not None
    assert (origin.phase, origin.tensor, origin.inputs[0].index) == ("state", "opt:exp_avg", (0, 2))
    assert origin.evidence.parameter == "weight"


def test_infinite_value_in_the_second_micro_batch_names_it() -> None:
    model = nn.Linear(3, 1)
    micro = [{"x": noise(4, 3, seed=i), "y": noise(4, 1)} for i in range(3)]
    micro[1]["x"][2, 0] = math.inf
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda b: mse(model, b))
    origin = loop.step(0, micro)
    assert origin is not None
    said = (origin.phase, origin.tensor, origin.micro_batch, origin.samples, origin.inputs[0].index)
    assert said == ("input", "batch:x", 1, (2,), (2, 0))


def test_bad_target_is_found_inside_nested_batches() -> None:
    model = nn.Linear(3, 1)
    y = noise(4, 1)
    y[1] = math.nan
    batch = ({"features": [noise(4, 3)]}, y)
    case = Case(
        model,
        batch,
        lambda m, b: (m(b[0]["features"][0]) - b[1]).pow(2).mean(),
        "input",
        None,
        "aten.sub",
    )
    case.tensor, case.samples = "batch:1", (1,)
    check(case)


def test_sharded_parameters_are_not_replayed_alone() -> None:
    model = nn.Linear(3, 1)
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda b: mse(model, b) * math.nan
    )
    loop.sharded = True
    origin = loop.step(0, [{"x": noise(4, 3), "y": noise(4, 1)}])
    assert isinstance(origin, Origin) and origin.reproduced is None
    assert origin.evidence.no_replay == "parameters are sharded over ranks"


def test_finite_divergence_is_an_optimizer_origin_by_evidence() -> None:
    case = Case(nn.Linear(3, 1), {"x": noise(4, 3), "y": noise(4, 1)}, mse, "optimizer", None, None)
    loop = Loop(
        case.model, case.optimizer(case.model.parameters()), lambda b: mse(case.model, b) * math.nan
    )
    loop.step(0, [case.batch])
    assert loop.last is not None
    reading = Reading(
        step=7, loss=9.0, micro_losses=(9.0,), grad_norm=1.0, repeat_loss=8.5, lr=(4.0,)
    )
    origin = locate(loop.last[0], reading)
    assert (origin.phase, origin.op, origin.method) == ("optimizer", None, "evidence")
    assert (origin.evidence.lr, origin.evidence.repeat_loss) == (4.0, 8.5)


def test_modules_without_tensor_outputs_are_followed() -> None:
    class Loader(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"name": "x", "values": (torch.log(x * 0), None)}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.loader = nn.Linear(3, 1), Loader()

        def forward(self, x: Tensor) -> Tensor:
            return self.loader(self.linear(x))["values"][0]

    origin = find(Case(Outer(), {"x": noise(4, 3)}, squares, "forward", "loader", "aten.log"))
    assert (origin.phase, origin.module, origin.op) == ("forward", "loader", "aten.log")


def test_a_shared_module_keeps_its_first_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.exp(self.first(x) * 1000))

    origin = find(Case(Twice(), {"x": noise(4, 3)}, squares, "forward", "", "aten.exp"))
    assert (origin.module, origin.op) == ("", "aten.exp")
