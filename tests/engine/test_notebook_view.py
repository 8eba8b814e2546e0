"""What a guard shows of itself."""

from __future__ import annotations

import torch

import stepguard
from scenes import NAN, plain_net, quiet


def test_guard_shows_steps_incidents_and_state() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = next(model.parameters()).shape[1]
    with stepguard.Guard(model, optimizer, config=quiet()) as guard:
        for value in (1.0, NAN, 1.0):
            result = guard.step(lambda b: model(b).square().mean(), torch.full((2, size), value))
            if not result.committed:
                bad = result
        assert repr(guard).endswith(": 3 steps, 1 incident, armed>")
        assert "step 1</th>" in guard._repr_html_()
    assert repr(guard).endswith("closed>")
    assert "step committed" in result._repr_html_() and "gradient norm" in result._repr_html_()
    assert "step not committed" in bad._repr_html_() and "skip" in bad._repr_html_()
    assert "not read yet" in stepguard.StepResult(settle=lambda: None)._repr_html_()
