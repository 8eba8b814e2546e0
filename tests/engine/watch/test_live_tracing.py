"""Tracing after an incident that could not be placed: one guard of a process at a time, and not for
ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import stepguard
from scenes import quiet
from stepguard.engine.watch import live_tracing
from stepguard.journal import read_run
from stepguard.records import GuardConfig, Origin


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Other tests compile in this process, and a process with compiled code is not traced."""
    torch._dynamo.utils.counters.clear()
    yield
    assert live_tracing.LiveTracing.armed is None


def log_loss(model: nn.Module, x: Tensor, factor: float) -> Tensor:
    return model(x).sigmoid().mul(factor).log().mean()


LOG_LINE = f"test_live_tracing.py:{inspect.getsourcelines(log_loss)[1] + 1}"


class Several:
    """One loop with several models, an optimizer and a guard for each."""

    def __init__(self, count: int, *, armed: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        self.armed = armed
        self.models = [nn.Linear(4, 1) for _ in range(count)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in self.models]
        self.settings = settings
        self.active: list[int] = []

    def run(self, steps: int, bad: dict[int, tuple[int, ...]]) -> list[list[Origin | None]]:
        """`bad`: step -> the models whose loss is bad in it."""
        pairs = zip(self.models, self.optimizers, strict=True)
        guards = [
            stepguard.watch(model, optimizer, config=quiet(**self.settings))
            for model, optimizer in pairs
        ]
        try:
            for guard in guards if self.armed else ():
                guard._driver.tracing._arm(0)  # type: ignore[union-attr]
            for step in range(steps):
                self._step(step, bad.get(step, ()))
        finally:
            found = [[incident.origin for incident in guard.incidents] for guard in guards]
            for guard in guards:
                guard.close()
        return found

    def _step(self, step: int, bad: tuple[int, ...]) -> None:
        x = torch.randn(8, 4)
        self.active.append(len(_get_current_dispatch_mode_stack()))
        for index, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            loss = log_loss(model, x, 0.0 if index in bad else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_of_several_optimizers_one_is_traced_and_the_others_say_so(tmp_path: Path) -> None:
    loop = Several(2, locate=True, run_dir=tmp_path)
    first, second = loop.run(12, {3: (0, 1), 6: (0, 1), 9: (0, 1)})
    assert first[0] is not None and first[0].op is None
    for origin in first[1:]:
        assert origin is not None
        assert (origin.op, origin.method) == ("aten.log", "live")
        assert origin.source is not None and origin.source.endswith(LOG_LINE)
    assert [origin.op for origin in second if origin is not None] == [None] * 3
    assert max(loop.active) == 1
    written = "".join(file.read_text() for file in tmp_path.rglob("journal*.jsonl"))
    assert written.count(live_tracing.ANOTHER_TRACES) == 1


def test_what_another_optimizer_did_is_not_told_of_this_one() -> None:
    """The second model's loss is bad where the first one's is not, within one step of the first."""
    first, second = Several(2, locate=True).run(10, {2: (1,), 5: (1,), 7: (1,)})
    assert not first
    assert [origin.op for origin in second[1:] if origin is not None] == ["aten.log"] * 2


def test_a_value_from_another_guards_model_is_not_called_by_this_ones_names() -> None:
    """The first model's weight turns bad and the second one's loss uses it: it is no parameter of
    the second.
    """
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (one, other)]
    config = quiet(locate=True)
    with (
        stepguard.watch(one, optimizers[0], config=config),
        stepguard.watch(other, optimizers[1], config=config) as b,
    ):
        b._driver.tracing._arm(0)  # type: ignore[union-attr]
        for step in range(3):
            extra = one.weight.detach() if step < 2 else one.weight.detach() * torch.nan
            loss = other(torch.randn(2, 4)).mean() + extra.mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
        (incident,) = b.incidents
    assert incident.origin is not None
    assert (incident.origin.op, incident.origin.tensor) == ("aten.mul", None)


def test_values_are_bit_identical_while_one_of_several_is_traced() -> None:
    def train(guarded: bool) -> list[Tensor]:
        loop = Several(2, armed=True)
        if guarded:
            loop.run(8, {})
            assert loop.active == [0] + [1] * 7
        else:
            for step in range(8):
                loop._step(step, ())
        return [p.detach() for model in loop.models for p in model.parameters()]

    for left, right in zip(train(guarded=True), train(guarded=False), strict=True):
        assert torch.equal(left, right)


def test_tracing_ends_when_it_has_taken_long_enough_and_says_so(tmp_path: Path) -> None:
    loop = Several(1, locate=True, run_dir=tmp_path)
    model, optimizer = loop.models[0], loop.optimizers[0]
    with stepguard.watch(
        model, optimizer, config=GuardConfig(terminal="quiet", run_dir=tmp_path)
    ) as guard:
        for step in range(12):
            if step == 5:
                guard._context.memory.effort.took(1000.0)  # a traced step that took so long
            loop._step(step, (0,) if step == 1 else ())
    assert [step for step, modes in enumerate(loop.active) if modes] == [2, 3, 4, 5]
    notes = [note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "tracing"]
    assert notes[1] == "no longer tracing: it has taken as long as 120 more steps"


def test_where_the_trace_shows_nothing_either_it_is_given_up(tmp_path: Path) -> None:
    """The loss is made bad behind the tracer's back."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    active = []
    with stepguard.watch(model, optimizer, config=quiet(locate=True, run_dir=tmp_path)):
        for step in range(20):
            active.append(bool(_get_current_dispatch_mode_stack()))
            loss = model(torch.randn(2, 4)).mean()
            if step % 2:
                loss.detach().numpy().fill(float("nan"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert active[2] and not active[-1]
    notes = [note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "tracing"]
    assert "none of them showed the origin" in notes[-1]


def test_with_several_guards_every_line_says_which_one_speaks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Critic(nn.Linear):
        pass

    actor, critic = nn.Linear(4, 1), Critic(4, 1)
    optimizers = [
        torch.optim.SGD(actor.parameters(), lr=1e-3),
        torch.optim.Adam(critic.parameters()),
    ]
    with stepguard.watch(actor, optimizers[0]), stepguard.watch(critic, optimizers[1]):
        for _ in range(2):
            optimizers[1].zero_grad()
            (critic(torch.ones(2, 4)) * torch.nan).mean().backward()
            optimizers[1].step()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stepguard")]
    assert len(lines) >= 3
    assert all("(optimizer 1: Adam of critic)" in line for line in lines)


def test_the_only_guard_does_not_name_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 1)
    with stepguard.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3)) as guard:
        guard.step(lambda x: model(x).mean(), torch.full((2, 4), torch.nan))
    assert "SGD of Linear" not in capsys.readouterr().err.splitlines()[0]
