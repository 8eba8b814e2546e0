"""`Policy(on_incident="whatif")`: the cheapest thing that was seen to work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scenes import NAN, Batch, batches, difference, plain_net, poisoned, quiet
from stepguard import ConfigError, Guard, Policy
from stepguard.journal import read_run

DATA = batches(60)
BAD = 40
TRIES = Policy(on_incident="whatif")


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def run(data: list[Batch], policy: Policy, **settings: Any) -> tuple[Guard, nn.Module]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = quiet(locate=True, policy=policy, **settings)
    with Guard(model, optimizer, config=config) as guard:
        for batch in data:
            guard.step(lambda given: loss_of(model, given), batch)
    return guard, model


def test_bad_sample_is_left_out_as_without_trials_and_the_journal_says_why(tmp_path: Path) -> None:
    data = [*DATA[:BAD], poisoned(DATA[BAD], NAN), *DATA[BAD + 1 :]]
    plain = run(data, Policy())[1]
    guard, tried = run(data, TRIES, run_dir=tmp_path)
    assert difference(dict(tried.state_dict()), dict(plain.state_dict())) == ""
    decision = guard.incidents[0].decision
    assert decision is not None and decision.action == "leave_out"
    assert decision.reason.startswith("whatif: leave out")
    notes = [note for note in read_run(tmp_path).notes if note.get("kind") == "whatif"]
    assert [trial["name"] for trial in notes[0]["trials"]][:2] == ["leave out", "skip"]


def test_healthy_run_is_the_same_with_and_without() -> None:
    plain = run(DATA[:30], Policy())[1]
    tried = run(DATA[:30], TRIES)[1]
    assert difference(dict(tried.state_dict()), dict(plain.state_dict())) == ""


class DividesByMoment(torch.optim.Optimizer):
    """Without epsilon, an update whose second moment is 0 is 0 / 0."""

    def __init__(self, parameters: Any, lr: float = 0.01, eps: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    square = parameter.grad.square()
                    update = parameter.grad / (square.sqrt() + group["eps"])
                    parameter.sub_(update * group["lr"])


def test_update_that_divides_by_zero_again_and_again_gets_an_epsilon() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = DividesByMoment(model.parameters())

    def loss_fn(batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    # from step 30 on, two features are 0 in every batch, and so are their gradients
    data = [(x * (torch.arange(6) < 4) if n >= 30 else x, y) for n, (x, y) in enumerate(DATA)]
    config = quiet(locate=True, policy=TRIES)
    with Guard(model, optimizer, config=config) as guard:
        for batch in data:
            guard.step(loss_fn, batch)
        decisions = [one.decision for one in guard.incidents]
    # the first of them is alone among good steps, so that skipping is enough; the second is not
    first, second = [one for one in decisions if one is not None]
    assert (first.action, first.new_eps) == ("undo", None)
    assert (second.action, second.new_eps) == ("undo", 1e-6)
    assert "not so leave out, skip" in second.reason or "not so skip" in second.reason
    assert optimizer.param_groups[0]["eps"] == 1e-6
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_rewind_that_would_end_the_same_way_lowers_the_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_fn(batch: Batch) -> Tensor:
        return (model(batch[0]) - 2.0 * batch[0]).square().mean()

    config = quiet(locate=True, policy=TRIES, anomalies="act")
    with Guard(model, optimizer, config=config) as guard:
        for index, batch in enumerate(batches(90, seed=1)):
            if index == 40:
                optimizer.param_groups[0]["lr"] = 0.4
            guard.step(loss_fn, batch)
        decisions = [one.decision for one in guard.incidents]
    rewinds = [one for one in decisions if one is not None and one.action == "rewind"]
    assert rewinds, [one.summary for one in guard.incidents]
    assert rewinds[0].lr_factor in (0.5, 0.1)
    assert rewinds[0].data == "skip"


def test_word_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_incident"):
        Policy(on_incident="guess")  # type: ignore[arg-type]
