"""Causes that no case of the zoo yields come out of real runs here; one is a note and not counted.

With the zoo this shows that every cause the README counts can occur.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from settings_of import config_of
from stepguard import Guard, GuardConfig
from stepguard.diagnose.engine import HEALTHY_SERIES
from stepguard.diagnose.rules import RULES
from stepguard.records import Incident

ROOT = Path(__file__).parents[2]
NOT_COUNTED = {"SG803"}
"""A loss of 0 or a step without labels is told as a note: nothing is wrong with its numbers."""
ELSEWHERE = {
    "SG208": "tests/benchmarks/test_opaque.py",
    "SG701": "tests/report/story/test_story.py",
    "SG702": "tests/locate/test_impurity.py",
    "SG704": "tests/distributed/test_copies.py",
    "SG705": "tests/distributed/test_copies.py",
    "SG801": "tests/engine/incident/test_run_facts.py",
}
"""Real runs of other tests: two ranks, a fault that a replay does not show, a launcher's dtype."""


def codes(incident: Incident | None) -> list[str]:
    assert incident is not None
    return [finding.code for finding in incident.findings]


def quiet(folder: Path | None = None, **settings: Any) -> GuardConfig:
    return config_of(terminal="quiet", run_dir=folder, **settings)


def test_sg506_a_scale_that_collapses() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    guard = Guard(model, optimizer, scaler=scaler, config=quiet())

    def too_much_for_any_scale(x: Tensor) -> Tensor:
        return (model(x).half().float() * 2e5).sum()

    seen: list[str] = []
    for _ in range(6):
        result = guard.step(too_much_for_any_scale, torch.ones(2, 2))
        if result.incident is not None:
            seen += codes(result.incident)
    guard.close()
    assert "SG506" in seen


def test_sg603_a_checkpoint_that_brought_nan_in(tmp_path: Path) -> None:
    def trained() -> tuple[nn.Module, Guard]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, Guard(model, optimizer, config=quiet(tmp_path, probation=1))

    model, guard = trained()
    for _ in range(4):
        guard.step(lambda x: model(x).pow(2).mean(), torch.ones(2, 2))
    assert guard.save() is not None
    guard.close()
    model, guard = trained()
    guard.restore()
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    incident = guard.step(lambda x: model(x).pow(2).mean(), torch.ones(2, 2)).incident
    guard.close()
    assert "SG603" in codes(incident)


def test_sg802_a_restored_rate_above_the_configured_one(tmp_path: Path) -> None:
    def at(rate: float) -> tuple[nn.Module, Guard]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        config = quiet(tmp_path, probation=1, resume_lr="checkpoint")
        return model, Guard(model, optimizer, config=config)

    model, guard = at(0.1)
    for _ in range(4):
        guard.step(lambda x: model(x).pow(2).mean(), torch.ones(2, 2))
    assert guard.save() is not None
    guard.close()
    model, guard = at(0.001)
    guard.restore()
    bad = torch.full((2, 2), math.nan)
    incident = guard.step(lambda x: model(x).pow(2).mean(), bad).incident
    guard.close()
    assert "SG802" in codes(incident)


def test_sg703_only_the_compiled_graph_is_bad() -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            return [out * math.nan for out in graph.forward(*values)]

        return run

    torch.compiler.reset()
    model: Any = torch.compile(nn.Linear(2, 1), backend=wrong)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quiet())
    incident = guard.step(lambda x: model(x).pow(2).mean(), torch.ones(2, 2)).incident
    guard.close()
    torch.compiler.reset()
    assert "SG703" in codes(incident)


@pytest.mark.parametrize("code", [rule.code for rule in RULES])
def test_every_counted_cause_has_a_real_run(code: str) -> None:
    if code in NOT_COUNTED or code.startswith(HEALTHY_SERIES):
        # what is told of healthy steps is no cause of a bad one; test_silent.py and
        # test_forecast.py run each
        return
    if code in ELSEWHERE:
        assert code in (ROOT / ELSEWHERE[code]).read_text(encoding="utf-8")
        return
    here = f"def test_{code.lower()}_" in Path(__file__).read_text(encoding="utf-8")
    zoo = [path.read_text(encoding="utf-8") for path in (ROOT / "zoo/scenes").glob("*.py")]
    # The first code of a case is the one it is named for.
    assert here or any(re.search(rf'accepted=\("{code}"', text) for text in zoo)


def test_readme_counts_the_causes_that_occur() -> None:
    silent = [rule for rule in RULES if rule.code.startswith(HEALTHY_SERIES)]
    counted = len(RULES) - len(NOT_COUNTED) - len(silent)
    assert f"one of {counted} causes" in (ROOT / "README.md").read_text(encoding="utf-8")
