"""A function that no tracer can look into is named as the origin, under every driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import stepguard
from benchmarks import opaque

SCENES = list(opaque.scenes())


@pytest.mark.parametrize("number", range(len(SCENES)), ids=lambda number: SCENES[number].name)
def test_opaque_function_is_the_origin(number: int) -> None:
    """SG208; every scene under one driver, every driver with a third of the scenes."""
    scene, driver = SCENES[number], opaque.DRIVERS[number % len(opaque.DRIVERS)]
    assert opaque.wrong(scene, opaque.incidents_of(scene, driver)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("driver", opaque.DRIVERS)
def test_opaque_functions_are_the_origin_under_every_driver(driver: str) -> None:
    """Also with the two thirds of the scenes that the cases above have under another one."""
    others = [s for n, s in enumerate(SCENES) if driver != opaque.DRIVERS[n % len(opaque.DRIVERS)]]
    assert len(others) >= 2 * len(SCENES) // 3
    faults = {s.name: opaque.wrong(s, opaque.incidents_of(s, driver)) for s in others}
    assert not any(faults.values()), faults


def test_there_are_forty_of_them() -> None:
    assert len([scene for scene in SCENES if scene.way is not None]) >= 40


def test_mask_of_an_opaque_function_is_not_blamed_for_another_fault() -> None:
    def call(self: opaque.Opaque, x: torch.Tensor) -> torch.Tensor:
        weights = opaque.Mask.apply(x @ x.T).softmax(-1)
        return (weights @ x).div(0.0 if opaque.armed["forward"] else 1.0)

    scene = opaque.Scene(name="", way="forward", op="", call=call)
    origin = opaque.incidents_of(scene, "step")[0].origin
    assert origin is not None and (origin.op, origin.module) == ("aten.div", opaque.PLACE)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_function_in_the_loss_is_named_when_the_next_bad_step_is_traced(way: str) -> None:
    """No replay of a watched loop reaches its loss expression."""
    torch._dynamo.utils.counters.clear()
    model = torch.nn.Linear(3, 3)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(2):
            opaque.armed[way] = True
            yield torch.randn(4, 3)
        opaque.armed[way] = False

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return opaque.Scale.apply(model(x)).square().mean()

    incident = opaque.driven("watch", model, loss_fn, batches())[-1]
    origin = incident.origin
    assert origin is not None and (origin.op, origin.module) == ("Scale", None)
    assert origin.method == "live" and origin.phase == ("loss" if way == "forward" else way)
    assert [(one.code, one.certainty) for one in incident.findings] == [("SG208", "likely")]


def test_optimizer_whose_kernel_writes_the_weights_is_named() -> None:
    class Kernel(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.detach().numpy()[0] = float("nan")

    model = torch.nn.Linear(3, 1)
    optimizer = Kernel(model.parameters(), lr=0.1)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        incident = guard.step(lambda x: model(x).square().mean(), torch.ones(2, 3)).incident
    assert incident is not None and incident.origin is not None
    assert (incident.origin.phase, incident.origin.op) == ("optimizer", "Kernel.step")
    assert incident.findings[0].code == "SG208"


class Rescale(torch.nn.Linear):
    """Computes with NumPy in the middle of its forward."""

    factor = float("nan")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * torch.from_numpy(y.detach().numpy() * self.factor)


def test_values_from_numpy_in_plain_code_of_a_module_are_not_a_bad_input() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Rescale(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        guard.step(lambda x: model(x).mean(), torch.ones(2, 4))
    origin, findings = guard.incidents[0].origin, guard.incidents[0].findings
    assert origin is not None and origin.module == "1"
    assert (findings[0].code, findings[0].certainty) == ("SG208", "likely")


@pytest.mark.parametrize("made_by", ["module", "loop", "batch object"])
def test_values_from_numpy_are_judged_alike_in_a_live_trace(made_by: str) -> None:
    """The root is not called, so nothing can be run again; the second bad step is traced."""

    class Data:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Takes(torch.nn.Linear):
        def forward(self, data: Data) -> torch.Tensor:  # type: ignore[override]
            return super().forward(data.x)

    model = torch.nn.Sequential(Takes(4, 4), Rescale(4, 1))
    model[1].factor = float("nan") if made_by == "module" else 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.watch(model, optimizer, config=config) as guard:
        for _ in range(2):
            x = torch.from_numpy(
                torch.ones(2, 4).numpy() * (1.0 if made_by == "module" else np.nan)
            )
            hidden = (
                torch.nn.Linear.forward(model[0], x) if made_by == "loop" else model[0](Data(x))
            )
            model[1](hidden).mean().backward()
            optimizer.step()
    incident = guard.incidents[-1]
    assert incident.origin is not None and incident.origin.method == "live"
    expected = "SG208" if made_by == "module" else "SG101"
    assert incident.findings[0].code == expected
    if made_by == "module":
        assert incident.origin.module == "1" and incident.origin.op == "Rescale.forward"
