"""Locating in a watched loop: inside the model by replay, outside it by tracing the next bad step
as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import stepguard
from stepguard import GuardConfig
from stepguard.engine.watch import live_tracing
from stepguard.journal import read_run
from stepguard.records import Incident, Origin

HERE = Path(__file__)
NAN = math.nan


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Other tests compile in this process, and a process with compiled code is not traced."""
    torch._dynamo.utils.counters.clear()


def line(mark: str, file: Path = HERE) -> str:
    """`file:number` of the line of this file that carries a mark."""
    numbers = [
        n
        for n, text in enumerate(file.read_text().splitlines(), start=1)
        if text.endswith(f"# {mark}")
    ]
    if file.is_relative_to(Path.cwd()):
        return f"{file.relative_to(Path.cwd())}:{numbers[0]}"
    return f"{file.name}:{numbers[0]}"


class Net(nn.Module):
    """Features go wrong in one of several ways, steered by the second argument."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.fault = fault

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x))
        if self.fault == "forward":
            hidden = hidden * torch.log(scale)[:, None]  # forward
        if self.fault == "backward":
            away = (self.inner.weight.sum() * scale)[:, None].expand(-1, 2)
            hidden = hidden + away.pow(2).sum(1).sqrt()[:, None]  # backward
        return self.outer(F.relu(hidden))


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_loss(out: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def log_loss(out: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    chosen = out.softmax(1).gather(1, y[:, None])[:, 0] * (scale > 0.1)
    return -torch.log(chosen).mean()  # loss


def root_loss(out: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return (out * (scale > 0.1)[:, None]).pow(2).sum(1).sqrt().mean()  # loss backward


@dataclass
class Watched:
    """A loop that stays as it is; sample 3 of the bad steps has scale 0 (or a NaN input)."""

    fault: str = ""
    loss: Loss = plain_loss
    bad: tuple[int, ...] = (2,)
    steps: int = 4
    bad_input: bool = False
    micro: int = 1
    config: GuardConfig = field(default_factory=lambda: GuardConfig(terminal="quiet"))
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    during: Callable[[int, nn.Module], None] = lambda step, model: None
    guarded: bool = True

    def run(self) -> tuple[Incident, ...]:
        torch.manual_seed(0)
        self.model = Net(self.fault)
        self.update = self.optimizer(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        guard = (
            stepguard.watch(self.model, self.update, config=self.config) if self.guarded else None
        )
        try:
            for step in range(self.steps):
                self._step(step)
        finally:
            if guard is not None:
                guard.close()
        return guard.incidents if guard is not None else ()

    def _step(self, step: int) -> None:
        self.update.zero_grad()
        for micro in range(self.micro):
            x, y, scale = torch.randn(6, 4), torch.randint(3, (6,)), torch.rand(6) + 0.5
            if step in self.bad and micro == self.micro - 1:
                if self.bad_input:
                    x[3, 1] = NAN
                else:
                    scale[3] = 0.0
            self.during(step, self.model)
            loss = self.loss(self.model(x, scale), y, scale)
            loss.backward()
            self.losses.append(loss.item())
        self.update.step()


def origin(incident: Incident) -> Origin:
    assert incident.origin is not None
    return incident.origin


# --- inside the model: the first incident is located
# --------------------------------------------------------------


def test_a_value_born_in_the_forward_is_placed_with_line_and_sample() -> None:
    (incident,) = Watched("forward").run()
    found = origin(incident)
    assert (found.phase, found.op, found.module, found.source) == (
        "forward",
        "aten.log",
        "",
        line("forward"),
    )
    assert (found.samples, found.reproduced) == ((3,), True)
    assert incident.findings[0].code == "SG202"


def test_a_value_born_in_the_backward_is_placed_with_line_and_sample() -> None:
    (incident,) = Watched("backward").run()
    found = origin(incident)
    assert (found.phase, found.node, found.module, found.source) == (
        "backward",
        "SqrtBackward0",
        "",
        line("backward"),
    )
    assert (found.samples, found.reproduced) == ((3,), True)
    assert incident.findings[0].code == "SG401"


def test_a_bad_argument_of_the_model_is_named() -> None:
    (incident,) = Watched(bad_input=True).run()
    found = origin(incident)
    assert (found.phase, found.tensor, found.samples) == ("input", "batch:x", (3,))
    assert incident.verdict.kind == "nonfinite_input"


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_with_accumulation_the_bad_call_is_found(fault: str) -> None:
    (incident,) = Watched(fault, micro=3).run()
    assert (origin(incident).source, origin(incident).micro_batch) == (line(fault), 2)


def test_a_fused_optimizer_reads_late_and_is_placed_all_the_same() -> None:
    fused = lambda params, lr: torch.optim.Adam(params, lr=lr, fused=True)  # noqa: E731
    (incident,) = Watched("forward", optimizer=fused).run()
    assert origin(incident).source == line("forward")


def test_a_model_without_a_line_of_the_users_gets_the_line_that_called_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(beta=float("nan")), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        model(torch.randn(2, 4)).sum().backward()  # caller
        optimizer.step()
    found = origin(guard.incidents[0])
    assert (found.op, found.module, found.source) == ("aten.softplus", "1", line("caller"))


def test_what_came_in_computed_is_not_called_an_input() -> None:
    torch.manual_seed(0)
    before, model = nn.Linear(4, 4), Net()
    optimizer = torch.optim.SGD([*before.parameters(), *model.parameters()], lr=0.1)
    with stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        features = before(torch.randn(6, 4)) * NAN
        F.cross_entropy(model(features, torch.ones(6)), torch.zeros(6, dtype=torch.long)).backward()
        optimizer.step()
    found = origin(guard.incidents[0])
    assert (found.phase, found.tensor, found.op, found.reproduced) == ("forward", None, None, None)
    assert any("through an argument" in remark for remark in found.remarks)


# --- outside the model: said honestly, then traced
# ----------------------------------------------------------------


@pytest.mark.parametrize(("loss", "phase"), [(log_loss, "loss"), (root_loss, "backward")])
def test_what_is_born_in_the_loss_is_said_to_be_outside_the_model(loss: Loss, phase: str) -> None:
    (incident,) = Watched(loss=loss).run()
    found = origin(incident)
    assert (found.phase, found.module, found.op, found.source, found.tensor) == (
        phase,
        None,
        None,
        None,
        None,
    )
    assert found.reproduced is None
    assert any("outside the model" in remark for remark in found.remarks)
    assert (
        "output gradient" not in f"{incident.verdict.summary} {found} {incident.reading.bad_inputs}"
    )


@pytest.mark.parametrize(
    ("loss", "op", "mark", "code"),
    [(log_loss, "aten.log", "loss", "SG202"), (root_loss, "aten.div", "loss backward", "SG401")],
)
def test_the_second_incident_is_placed_by_the_live_trace(
    loss: Loss, op: str, mark: str, code: str, tmp_path: Path
) -> None:
    config = GuardConfig(terminal="quiet", run_dir=tmp_path)
    first, second = Watched(loss=loss, bad=(2, 5), steps=8, config=config).run()
    assert origin(first).op is None
    found = origin(second)
    assert (found.op, found.source, found.method) == (op, line(mark), "live")
    assert (found.phase, found.module) == ("loss" if loss is log_loss else "backward", None)
    assert second.findings[0].code == code
    notes = [note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "tracing"]
    assert len(notes) == 1
    assert notes[0].startswith("tracing the next 40 steps, slower")


def test_a_value_computed_before_the_model_is_called_is_no_input() -> None:
    torch.manual_seed(0)
    model, bad = Net(), (1, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        for step in range(5):
            raw = torch.full((6, 4), -1.0 if step in bad else 1.0)
            features = torch.log(raw) * model.norm.weight.mean()  # data
            optimizer.zero_grad()
            F.cross_entropy(
                model(features, torch.ones(6)), torch.zeros(6, dtype=torch.long)
            ).backward()
            optimizer.step()
    first, second = guard.incidents
    assert origin(first).op is None
    assert (origin(second).op, origin(second).phase, origin(second).source) == (
        "aten.log",
        "loss",
        line("data"),
    )
    assert (second.findings[0].code, second.findings[0].certainty) == ("SG202", "certain")


def test_values_are_bit_identical_while_armed() -> None:
    bare = Watched(loss=log_loss, bad=(), steps=8, guarded=False)
    bare.run()
    armed = Watched(loss=log_loss, bad=(), steps=8, during=_arm_at_the_start())
    armed.run()
    assert armed.losses == bare.losses
    for left, right in zip(
        bare.model.state_dict().values(), armed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(left, right)


def _arm_at_the_start() -> Callable[[int, nn.Module], None]:
    """Arms the watcher before the second step, and proves that it stays so."""

    def during(step: int, model: nn.Module) -> None:
        tracing = [
            m for m in _get_current_dispatch_mode_stack() if "LiveTracer" in type(m).__name__
        ]
        assert len(tracing) == (1 if step else 0)
        if step == 0:
            (capture,) = model._compiled_call_impl.hearers  # type: ignore[attr-defined]
            capture._on_call.__self__.tracing._arm(0)

    return during


def test_random_operations_draw_the_same_numbers_while_armed() -> None:
    def drawn(arm: bool) -> Tensor:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
            if arm:
                assert guard._driver is not None
                guard._driver.tracing._arm(0)
            for _ in range(3):
                noise = (
                    torch.bernoulli(torch.full((6, 4), 0.5)) / torch.rand(6, 4).round()
                )  # infinities are born
                model(noise.nan_to_num(0.0, 0.0, 0.0), torch.ones(6)).sum().backward()
                optimizer.step()
        return torch.rand(4)

    assert torch.equal(drawn(arm=True), drawn(arm=False))


def test_tracing_ends_after_a_bounded_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_tracing, "ARMED_STEPS", 2)
    config = GuardConfig(terminal="quiet", run_dir=tmp_path)
    active: list[bool] = []
    Watched(
        loss=log_loss,
        bad=(1,),
        steps=8,
        config=config,
        during=lambda *_: active.append(bool(_modes())),
    ).run()
    assert active == [False, False, True, True, False, False, False, False]
    notes = [note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "tracing"]
    assert [note.split()[0] for note in notes] == ["tracing", "no"]


def _modes() -> list[Any]:
    return list(_get_current_dispatch_mode_stack())


def test_closing_in_the_middle_of_a_traced_step_leaves_nothing_behind() -> None:
    with pytest.raises(KeyboardInterrupt):
        Watched(loss=log_loss, bad=(1,), steps=8, during=_interrupt_at(4)).run()
    assert not _modes()


def _interrupt_at(when: int) -> Callable[[int, nn.Module], None]:
    def during(step: int, model: nn.Module) -> None:
        if step == when:
            assert _modes()
            raise KeyboardInterrupt

    return during
