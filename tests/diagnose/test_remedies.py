"""TO DO in the user's own words: their line with the safe function in it, and it mends the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import stepguard.numerics
from report.literals import MASKED_ROW
from stepguard import Guard, GuardConfig, Probes
from stepguard.diagnose import RunFacts
from stepguard.diagnose.engine import diagnose
from stepguard.diagnose.source_line import expression_of
from stepguard.engine.incident.run_facts import run_facts
from stepguard.records import Finding, Incident, Origin, Reading, Remedy

ZERO = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
UNIT = torch.tensor([[1.0, 0.5], [0.25, 0.5]])


class Scale(nn.Module):
    """A weight of 1: gradients reach it, and values stay what the test wants them to be."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


def log_of_zero(net: Scale, noise: Tensor) -> Tensor:
    level = noise * net.gain
    return level.log().mean()


def division(net: Scale, total: Tensor) -> Tensor:
    duration = total * net.gain
    return (1.5 / duration).mean()


def slope_of_sqrt(net: Scale, power: Tensor) -> Tensor:
    energy = power * net.gain
    return torch.sqrt(energy).mean()


def slope_of_acos(net: Scale, cosine: Tensor) -> Tensor:
    similarity = cosine * net.gain
    return torch.acos(similarity).mean()


def slope_of_asin(net: Scale, sine: Tensor) -> Tensor:
    height = sine * net.gain
    return height.asin().mean()


def slope_of_pow(net: Scale, rest: Tensor) -> Tensor:
    focus = rest * net.gain
    return (focus**0.5).mean()


def masked_softmax(net: Scale, score: Tensor) -> Tensor:
    hidden = (score * net.gain).masked_fill(score == 0, -math.inf)[:, :1]
    return hidden.softmax(dim=-1).mean()


def exp_of_large(net: Scale, logit: Tensor) -> Tensor:
    energy = logit * 1000 * net.gain
    return energy.exp().mean()


CASES: list[tuple[Callable[[Scale, Tensor], Tensor], Tensor, str, str]] = [
    (log_of_zero, ZERO, "SG202", "return safe_log(level).mean()"),
    (division, ZERO, "SG201", "return (safe_div(1.5, duration)).mean()"),
    (slope_of_sqrt, ZERO, "SG401", "return safe_sqrt(energy).mean()"),
    (slope_of_acos, UNIT, "SG401", "return safe_acos(similarity).mean()"),
    (slope_of_asin, UNIT, "SG401", "return safe_asin(height).mean()"),
    (slope_of_pow, ZERO, "SG401", "return (safe_pow(focus, 0.5)).mean()"),
    (masked_softmax, ZERO, "SG204", "return safe_softmax(hidden, dim=-1).mean()"),
    (exp_of_large, ZERO, "SG203", "return energy.clamp(max=10.0).exp().mean()"),
]


def incident_of(loss_of: Callable[[Scale, Tensor], Tensor], batch: Tensor) -> Incident:
    net = Scale()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = Guard(net, optimizer, config=GuardConfig(terminal="quiet"))
    result = guard.step(lambda batch: loss_of(net, batch), batch)
    guard.close()
    assert result.incident is not None
    return result.incident


@pytest.mark.parametrize(
    ("loss_of", "batch", "code", "line"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_their_own_line_is_written_anew(
    loss_of: Callable[[Scale, Tensor], Tensor], batch: Tensor, code: str, line: str
) -> None:
    finding = _finding(incident_of(loss_of, batch), code)
    (remedy,) = finding.remedies
    assert remedy.snippet.splitlines()[-1] == line
    assert remedy.snippet.count("\n") <= 1


@pytest.mark.parametrize(
    ("loss_of", "batch", "code", "line"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_the_new_line_is_finite(
    loss_of: Callable[[Scale, Tensor], Tensor], batch: Tensor, code: str, line: str
) -> None:
    """What is offered is run: loss and gradient are finite with the function it names."""
    import inspect

    source = inspect.getsource(loss_of).splitlines()
    source[-1] = f"    {line}"
    space = {**vars(stepguard.numerics), "torch": torch, "math": math, "Tensor": Tensor}
    exec("\n".join(source), {**space, "Scale": Scale}, space)
    net = Scale()
    loss = space[loss_of.__name__](net, batch.clone().requires_grad_())
    loss.backward()
    assert loss.isfinite()
    assert net.gain.grad is None or net.gain.grad.isfinite()


def _finding(incident: Incident, code: str) -> Finding:
    found = [finding for finding in incident.findings if finding.code == code]
    assert found, [finding.code for finding in incident.findings]
    return found[0]


def in_line(line: str) -> Origin:
    return Origin(step=0, phase="loss", op="aten.log", source="a.py:3", context=(f"3 | {line}",))


@pytest.mark.parametrize("line", ["loss = a.log() + b.log()", "loss = (", ""])
def test_line_with_two_such_operations_is_not_guessed_at(line: str) -> None:
    assert expression_of(in_line(line)) is None


def test_statement_that_goes_on_in_the_next_line_is_read() -> None:
    found = expression_of(in_line("loss = torch.stack([p.log(),"))
    assert found is not None and found.operands == ("p",)
    remedy = found.instead("safe_log(p)", "it stays finite")
    assert remedy.snippet.splitlines()[-1] == "loss = torch.stack([safe_log(p),"


def test_bad_samples_are_named() -> None:
    batch = torch.ones(4, 2)
    batch[3, 0] = math.nan
    net = nn.Linear(2, 1)
    guard = Guard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    )
    incident = guard.step(lambda batch: net(batch).mean(), batch).incident
    guard.close()
    assert incident is not None
    assert incident.findings[0].remedies[0].title.startswith("Leave sample 3 out where")


def test_remedies_of_a_page_are_shown_without_their_example() -> None:
    ruined = replace(
        MASKED_ROW,
        origin=None,
        verdict=replace(MASKED_ROW.verdict, kind="spike"),
        reading=replace(MASKED_ROW.reading, loss=9.0, components={}),
    )
    remedies: list[Remedy] = [r for finding in diagnose(ruined) for r in finding.remedies]
    assert remedies and not any(remedy.snippet for remedy in remedies)


class Contrast(nn.Module):
    """Its temperature is learned, and walks through 0 in steps as large as itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.temperature = nn.Parameter(torch.tensor(0.07))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) / self.temperature
        return out


def test_parameter_that_ran_away_is_named() -> None:
    torch.manual_seed(0)
    net = Contrast()
    groups = [
        {"params": net.body.parameters(), "lr": 1e-4},
        {"params": [net.temperature], "lr": 3e-2},
    ]
    optimizer = torch.optim.Adam(groups)
    guard = Guard(
        net, optimizer, config=GuardConfig(terminal="quiet", probes=Probes(anomalies="act"))
    )
    x = torch.randn(64, 4)
    told = None
    for step in range(60):
        rate = 1e-5 if step < 50 else 3e-2
        optimizer.param_groups[1]["lr"] = rate
        told = told or guard.step(lambda x: net(x).pow(2).mean() * 1e-3, x).incident
    facts = run_facts(guard._context, Reading(step=60))
    guard.close()
    assert facts.moved_most is not None and facts.moved_most[0] == "temperature"


def test_runaway_parameter_comes_first_in_what_to_do() -> None:
    spike = replace(MASKED_ROW, origin=None, verdict=replace(MASKED_ROW.verdict, kind="spike"))
    facts = RunFacts(update_ratio=0.007, moved_most=("temperature", 0.4))
    (finding,) = [found for found in diagnose(spike, facts) if found.code == "SG505"]
    assert "`temperature` moved most: by 0.4 of its own size" in finding.evidence
    assert finding.remedies[0].title.startswith("Give `temperature` a learning rate of its own")
