"""A function that no tracer can look into is named as the origin, under every driver."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_values_from_numpy_in_plain_code_of_a_module_are_not_a_bad_input() -> None:
    class Rescale(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * torch.from_numpy(y.detach().numpy() * float("nan"))

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Rescale(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        guard.step(lambda x: model(x).mean(), torch.ones(2, 4))
    origin, findings = guard.incidents[0].origin, guard.incidents[0].findings
    assert origin is not None and origin.module == "1"
    assert (findings[0].code, findings[0].certainty) == ("SG208", "likely")
