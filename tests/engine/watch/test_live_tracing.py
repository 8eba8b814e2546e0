"""Locating in a watched loop: inside the model by replay, outside it by tracing the next bad step
as it runs, one guard of a process at a time, and not for ever.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import stepguard
from scenes import quiet
from stepguard import GuardConfig
from stepguard.engine.watch import live_tracing
from stepguard.journal import read_run
from stepguard.records import Incident, Origin

HERE = Path(__file__)
NAN = math.nan


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


@pytest.mark.parametrize(
    ("loss", "read", "op", "mark", "code"),
    [
        (log_loss, "aten.log", "aten.log", "loss", "SG202"),
        (root_loss, "aten.sqrt", "aten.div", "loss backward", "SG401"),
    ],
)
def test_the_second_incident_is_placed_by_the_live_trace(
    loss: Loss, read: str, op: str, mark: str, code: str, tmp_path: Path
) -> None:
    config = GuardConfig(terminal="quiet", run_dir=tmp_path)
    first, second = Watched(loss=loss, bad=(2, 5), steps=8, config=config).run()
    outside = origin(first)
    places = (outside.module, outside.source, outside.tensor, outside.reproduced)
    assert places == (None,) * 4
    assert (outside.op, outside.method, first.findings[0].code) == (read, "graph", code)
    assert any("outside the model" in remark for remark in outside.remarks)
    assert "output gradient" not in f"{first.verdict.summary} {outside} {first.reading.bad_inputs}"
    found = origin(second)
    assert (found.op, found.source, found.method) == (op, line(mark), "live")
    assert (found.phase, found.module) == ("loss" if loss is log_loss else "backward", None)
    assert outside.phase == found.phase
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


def test_a_dispatch_mode_of_the_users_own_survives_ours() -> None:
    class Theirs(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Theirs.seen += 1
            return func(*args, **(kwargs or {}))

    theirs = Theirs()

    def during(step: int, model: nn.Module) -> None:
        if step == 3:
            assert _modes()
            theirs.__enter__()  # type: ignore[no-untyped-call]

    try:
        Watched(loss=log_loss, bad=(1,), steps=6, during=during).run()
        assert _modes() == [theirs]
    finally:
        theirs.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    assert Theirs.seen > 0


def test_a_closure_optimizer_is_not_traced_and_says_so(tmp_path: Path) -> None:
    config = GuardConfig(terminal="quiet", run_dir=tmp_path)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with stepguard.watch(model, optimizer, config=config) as guard:
        for _ in range(2):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = log_loss(
                    model(torch.randn(6, 4), torch.ones(6)),
                    torch.zeros(6, dtype=torch.long),
                    -torch.ones(6),
                )
                loss.backward()
                return loss

            optimizer.step(closure)
            assert not _modes()
    assert len(guard.incidents) == 2
    assert any(
        "several times a step" in str(note.get("summary")) for note in read_run(tmp_path).notes
    )


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


# --- several guards of one process


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Other tests compile in this process, and a process with compiled code is not traced."""
    torch._dynamo.utils.counters.clear()
    yield
    assert live_tracing.LiveTracing.armed is None


def log_of_model(model: nn.Module, x: Tensor, factor: float) -> Tensor:
    return model(x).sigmoid().mul(factor).log().mean()


LOG_LINE = f"test_live_tracing.py:{inspect.getsourcelines(log_of_model)[1] + 1}"


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
            loss = log_of_model(model, x, 0.0 if index in bad else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_of_several_optimizers_one_is_traced_and_the_others_say_so(tmp_path: Path) -> None:
    loop = Several(2, locate=True, run_dir=tmp_path)
    first, second = loop.run(12, {3: (0, 1), 6: (0, 1), 9: (0, 1)})
    assert first[0] is not None and first[0].source is None
    for origin in first[1:]:
        assert origin is not None
        assert (origin.op, origin.method) == ("aten.log", "live")
        assert origin.source is not None and origin.source.endswith(LOG_LINE)
    assert [origin.source for origin in second if origin is not None] == [None] * 3
    assert max(loop.active) == 1
    written = "".join(file.read_text() for file in tmp_path.rglob("journal*.jsonl"))
    assert written.count(live_tracing.ANOTHER_TRACES) == 1


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
                guard._context.memory.effort.took_traced(1000.0)  # a traced step that took so long
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


FUSED: Any = lambda params, lr: torch.optim.Adam(params, lr=lr, fused=True)  # noqa: E731
PLACED: dict[str, tuple[Watched, dict[str, Any], str]] = {
    "forward": (
        Watched("forward"),
        {"phase": "forward", "op": "aten.log", "module": "", "source": line("forward")},
        "SG202",
    ),
    "backward": (
        Watched("backward"),
        {"phase": "backward", "node": "SqrtBackward0", "module": "", "source": line("backward")},
        "SG401",
    ),
    "argument": (Watched(bad_input=True), {"phase": "input", "tensor": "batch:x"}, "SG101"),
    "accumulated forward": (
        Watched("forward", micro=3),
        {"source": line("forward"), "micro_batch": 2},
        "SG202",
    ),
    "accumulated backward": (
        Watched("backward", micro=3),
        {"source": line("backward"), "micro_batch": 2},
        "SG401",
    ),
    "fused, read late": (
        Watched("forward", optimizer=FUSED),
        {"source": line("forward")},
        "SG202",
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_a_value_born_inside_the_model_is_placed_with_line_and_sample(case: str) -> None:
    loop, wanted, code = PLACED[case]
    (incident,) = loop.run()
    found = origin(incident)
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert found.samples == (3,) and (found.reproduced or case == "argument")
    assert incident.findings[0].code == code
