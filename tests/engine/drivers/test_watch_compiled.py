"""A watched model can be compiled and exported, and a compiled one guarded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stepguard
from engine.drivers.test_watch import DATA, _ours, _sgd
from scenes import (
    LOOPS,
    QUIET,
    bare,
    calm_net,
    difference,
    grouped,
    plain_net,
    plain_step,
    poisoned,
    state_of,
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_watched_model_can_be_compiled() -> None:
    scene, reference = _sgd(calm_net()), _sgd(calm_net())
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET) as guard:
        compiled = torch.compile(scene.model, backend="eager")
        scene.loss = lambda s, b: nn.functional.cross_entropy(compiled(b[0]), b[1])
        for batch in (DATA[0], poisoned(DATA[1]), DATA[2]):
            plain_step(scene, (batch,))
        assert [i.step for i in guard.incidents] == [1]
    assert _ours(scene.model) == []
    bare(reference, grouped([DATA[0], DATA[2]], 1))
    assert difference(state_of(scene), state_of(reference)) == ""
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model_can_be_guarded() -> None:
    for loop in LOOPS.values():
        scene, reference = _sgd(calm_net()), _sgd(calm_net())
        inner, scene.model = scene.model, torch.compile(scene.model, backend="eager")  # type: ignore[assignment]
        loop(scene, [(DATA[0],), (poisoned(DATA[1]),), (DATA[2],)])
        bare(reference, grouped([DATA[0], DATA[2]], 1))
        assert difference(dict(inner.state_dict()), dict(reference.model.state_dict())) == ""
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_watched_model_can_be_exported() -> None:
    scene = _sgd(plain_net())
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET):
        plain_step(scene, (DATA[0],))
        program = torch.export.export(scene.model.eval(), (DATA[0][0],))
    assert torch.equal(program.module()(DATA[0][0]), scene.model(DATA[0][0]))
    assert "stepguard" not in str(program)
    torch._dynamo.reset()
