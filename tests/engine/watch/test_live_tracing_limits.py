"""A watched loop under a scaler, compiled in place, and what placing may cost there."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from engine.watch.test_live_tracing_locate import (
    Net,
    line,
    origin,
)
from stepguard import GuardConfig, Probes

# --- a GradScaler under watch
# -------------------------------------------------------------------------------------


def test_a_nan_in_the_model_is_no_calibration_of_the_scaler() -> None:
    torch.manual_seed(0)
    model = Net("backward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with stepguard.watch(
        model, optimizer, scaler=scaler, config=GuardConfig(terminal="quiet")
    ) as guard:
        for step in range(4):
            scale = torch.ones(6)
            scale[3] = 0.0 if step == 2 else 1.0
            optimizer.zero_grad()
            loss = F.cross_entropy(
                model(torch.randn(6, 4), scale), torch.zeros(6, dtype=torch.long)
            )
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
    (incident,) = guard.incidents
    assert (incident.verdict.kind, origin(incident).source) == (
        "nonfinite_gradient",
        line("backward"),
    )
    assert scaler.get_scale() == 1024.0


def test_a_model_compiled_in_place_is_heard_and_placed() -> None:
    torch.manual_seed(0)
    model = Net("forward")
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        for step in range(3):
            scale = torch.ones(6) * 2
            scale[3] = 0.0 if step == 1 else 1.0
            optimizer.zero_grad()
            F.cross_entropy(
                model(torch.randn(6, 4), scale), torch.zeros(6, dtype=torch.long)
            ).backward()
            optimizer.step()
        assert copy.deepcopy(model)._compiled_call_impl is None
    torch._dynamo.reset()
    (incident,) = guard.incidents
    assert (origin(incident).source, origin(incident).samples) == (line("forward"), (3,))


# --- what placing may cost
# ----------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Attention over the neighbours: it takes all nodes or none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        self.runs += 1
        h = self.inner(x)
        return torch.softmax((h @ h.T).masked_fill(edges == 0, -math.inf), -1) @ h  # graph


def test_a_whole_graph_is_placed_in_a_few_runs_at_every_incident() -> None:
    torch.manual_seed(0)
    model, nodes, runs = Graph(), 300, []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        for step in range(6):
            edges = torch.eye(nodes)
            edges[7] = float(step not in (2, 4))
            before = model.runs
            optimizer.zero_grad()
            model(torch.randn(nodes, 8), edges).pow(2).mean().backward()
            optimizer.step()
            runs.append(model.runs - before)
    assert [origin(incident).source for incident in guard.incidents] == [
        line("graph", Path(__file__))
    ] * 2
    assert [runs[step] for step in (0, 1, 3, 5)] == [1] * 4
    assert runs[2] <= 8
    assert runs[4] <= 4  # and nothing of what was in vain is tried again


def test_the_budget_of_the_settings_is_the_one_that_counts() -> None:
    model = Net()
    config = GuardConfig(terminal="quiet", probes=Probes(locate_budget=2.5))
    with stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), config=config
    ) as guard:
        assert guard._context.memory.effort.steps == 2.5
