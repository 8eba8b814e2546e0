"""Parameters that come in mid-run: rewinds leave them alone, damage to them is told."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

import stepguard
from guard.test_odd_objects import DATA, Adapted, _inject, _loss
from scenes import difference, quiet
from stepguard import Guard


@pytest.mark.parametrize("what", ["module", "group"])
@pytest.mark.parametrize("hard", [None, 18])
def test_rewind_to_before_an_adapter_came_leaves_the_adapter_alone(
    what: str, hard: int | None
) -> None:
    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    new: list[Tensor] = []
    with Guard(model, optimizer, config=quiet(snapshot_every=8, probation=4)) as guard:
        for index, batch in enumerate(DATA[:34]):
            inputs = batch[0] * 50 if index == hard else batch[0]
            if index == 26:
                new = _inject(model, optimizer, what)
            if index == 30:
                kept = copy.deepcopy([(p, optimizer.state.get(p)) for p in new])
                with torch.no_grad():
                    model.a.weight[0, 0] = math.nan
            guard.step(_loss(model), (inputs, batch[1]))
            if index == 30:
                assert difference([(p, optimizer.state.get(p)) for p in new], kept) == ""
        assert guard.armed
    (incident,) = guard.incidents
    assert incident.decision is not None
    assert (incident.decision.action, incident.decision.data) == ("rewind", "skip")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_damaged_adapter_is_not_rewound_to_a_state_that_lacks_it() -> None:
    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Guard(model, optimizer, config=quiet(snapshot_every=8, probation=4)) as guard:
        for index, batch in enumerate(DATA[:27]):
            if index == 26:
                (weight, _) = _inject(model, optimizer, "module")
                before = copy.deepcopy(model.a.state_dict())
                with torch.no_grad():
                    weight[0, 0] = math.nan
            try:
                guard.step(_loss(model), batch)
            except stepguard.TrainingHalted:
                assert index == 26
    (incident,) = guard.incidents
    assert incident.decision is not None and incident.decision.action != "rewind"
    assert difference(dict(model.a.state_dict()), dict(before)) == ""
