"""A loop of the user's own hands its loss (`guard.loss`) or its micro-batches over, so that its
first bad step is located as that of `guard.step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.case import Case, Scene
from zoo.catalogue import chosen
from zoo.plain import autocast, make_scaler
from zoo.score import place_right

import stepguard
from engine.parts import each
from scenes import NAN, QUIET, batches, grouped, plain_net, quiet
from stepguard import ConfigError, Guard, Incident, Policy
from stepguard.records.codec import dumps, to_plain

LOCATED = quiet(locate=True)
Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.drop(self.norm(self.inner(x))))


class Training:
    """A loop as people write it. `weight` 0 makes the loss expression divide by 0."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def loss_fn(self, batch: Batch) -> Tensor:
        each = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        return (each / batch["weight"]).mean()  # BORN HERE

    def run(
        self,
        batches: list[Batch],
        after: Callable[[Tensor], Tensor] = lambda loss: loss,
        *,
        hand_over: bool = True,
        **settings: Any,
    ) -> tuple[Incident, ...]:
        config = quiet(locate=True, **settings)
        with stepguard.watch(self.net, self.optimizer, config=config) as guard:
            for batch in batches:
                self.optimizer.zero_grad()
                loss = guard.loss(self.loss_fn, batch) if hand_over else self.loss_fn(batch)
                after(loss).backward()
                self.optimizer.step()
            return guard.incidents


def made(count: int, bad: int | None = None) -> list[Batch]:
    source = torch.Generator().manual_seed(1)
    batches = []
    for number in range(count):
        weight = torch.rand(6, generator=source) + 0.5
        if number == bad:
            weight[4] = 0.0
        x = torch.randn(6, 4, generator=source)
        batches.append({"x": x, "y": torch.randint(3, (6,), generator=source), "weight": weight})
    return batches


def born_here() -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("# BORN HERE"))
    return f"{Path(__file__).name}:{number}"


def test_first_incident_is_placed_with_line_operation_and_sample() -> None:
    (incident,) = Training().run(made(4, bad=0))
    origin = incident.origin
    assert incident.step == 0 and origin is not None
    assert (origin.phase, origin.op, origin.samples) == ("loss", "aten.div", (4,))
    assert origin.source.endswith(born_here()) and origin.reproduced
    assert incident.findings[0].code == "SG201"
    (untold,) = Training().run(made(4, bad=0), hand_over=False)
    # what is gained: the line, the sample, and a replay that confirms both
    seen = untold.origin
    assert (seen.op, seen.source, seen.samples, seen.reproduced) == ("aten.div", None, (), None)


SCALED = {
    "scaled by a tensor": lambda loss: loss * torch.tensor(1024.0),
    "in another dtype": lambda loss: loss.double(),
}


@pytest.mark.parametrize("after", SCALED.values(), ids=SCALED)
def test_factor_between_loss_and_backward_changes_nothing(
    after: Callable[[Tensor], Tensor],
) -> None:
    (incident,) = Training().run(made(3, bad=1), after)
    assert (incident.origin.op, incident.origin.samples) == ("aten.div", (4,))


def test_handing_over_changes_no_bit_of_a_healthy_run() -> None:
    ends = []
    for hand_over in (False, True):
        training = Training()
        torch.manual_seed(5)
        assert training.run(made(8), hand_over=hand_over) == ()
        ends.append([*training.net.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_step_that_is_handed_over_gets_a_capsule(tmp_path: Path) -> None:
    (incident,) = Training().run(made(3, bad=1), run_dir=tmp_path)
    assert incident.capsule is not None and (tmp_path / incident.capsule).is_dir()


def test_term_the_loop_adds_is_not_called_transient() -> None:
    """The handed loss alone replays clean; the guard must not conclude that nothing was wrong."""
    zero = torch.zeros(())

    def add_a_bad_term(loss: Tensor) -> Tensor:
        return loss + zero / zero

    (incident,) = Training().run(made(1), add_a_bad_term)
    assert incident.origin.reproduced is not False
    assert "SG702" not in [finding.code for finding in incident.findings]


def test_exception_in_the_loss_expression_is_on_record_with_its_sample() -> None:
    batches = made(2)
    batches[1]["y"][3] = 7
    training = Training()
    guard = stepguard.watch(training.net, training.optimizer, config=LOCATED)
    with guard, pytest.raises(IndexError):
        for batch in batches:
            training.optimizer.zero_grad()
            guard.loss(training.loss_fn, batch).backward()
            training.optimizer.step()
    (incident,) = guard.incidents
    assert (incident.step, incident.verdict.kind) == (1, "exception")
    assert incident.origin.samples == (3,)


def test_loss_is_refused_where_the_guard_runs_the_step_and_plain_after_close() -> None:
    training = Training()
    with (
        Guard(training.net, training.optimizer, config=LOCATED) as guard,
        pytest.raises(ConfigError, match=r"guard\.step"),
    ):
        guard.loss(training.loss_fn, made(1)[0])
    watcher = stepguard.watch(training.net, training.optimizer, config=LOCATED)
    watcher.close()
    assert watcher.loss(training.loss_fn, made(1)[0]).requires_grad


def born_in_the_step(case: Case) -> bool:
    return not case.control and case.wanted.phase in ("forward", "loss", "backward")


EVERY_TWELFTH = [case for case in chosen() if born_in_the_step(case)][::12]
"""As docs/evidence.md says."""


def first_incident(scene: Scene) -> Incident:
    """Run a plain loop that hands its loss over, up to its first incident."""
    modules = {"criterion": scene.criterion} if scene.criterion is not None else None
    scaler = make_scaler(scene)

    def loss_fn(batch: Batch) -> Tensor:
        with autocast(scene):
            return scene.loss(scene.model, batch)

    guard = stepguard.watch(
        scene.model, scene.optimizer, scaler=scaler, modules=modules, config=LOCATED
    )
    with guard:
        for step in range(scene.steps):
            if scene.before_step is not None:
                scene.before_step(step)
            scene.optimizer.zero_grad()
            for batch in scene.micro_batches(step):
                loss = guard.loss(loss_fn, batch)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scene.clip is not None:
                nn.utils.clip_grad_norm_(scene.model.parameters(), scene.clip)
            if scaler is None:
                scene.optimizer.step()
            else:
                scaler.step(scene.optimizer)
                scaler.update()
            if guard.incidents:
                break
        return guard.incidents[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("case", EVERY_TWELFTH, ids=lambda case: case.name)
def test_first_incident_of_a_zoo_case_is_placed_in_a_plain_loop(case: Case) -> None:
    incident, want = first_incident(case.build(False)), case.wanted
    assert incident.step == want.step
    assert place_right(incident.origin, want), incident.origin
    if want.sample is not None:
        assert incident.origin.samples == (want.sample,)
    assert incident.findings[0].code in case.accepted


# --- guard.port.micro


class Rooted(Training):
    def loss_fn(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]) * batch["weight"].sqrt()[:, None], batch["y"])


FAULTS: dict[str, tuple[type[Training], str, Any, float, str]] = {
    "zero": (Training, "weight", 4, 0.0, "aten.div"),
    "negative zero": (Training, "weight", 4, -0.0, "aten.div"),
    "input": (Training, "x", 4, NAN, "aten.addmm"),
    "no label": (Rooted, "y", slice(None), -100, "aten.nll_loss_forward"),
    "negative root": (Rooted, "weight", 4, -2.0, "aten.sqrt"),
}


@pytest.mark.parametrize(("fault", "fused"), each(FAULTS, [False, True]))
def test_told_micro_batches_give_the_incident_of_guard_step(fault: str, fused: bool) -> None:
    kind, key, rows, value, op = FAULTS[fault]
    # the gradient of the bad rows is there already: only the guard's own loop can drop them
    config = quiet(locate=True, labels_key="y", policy=Policy(actions=("skip", "stop")))
    found, data = [], made(8)
    data[5][key][rows] = value
    for make in (Guard, stepguard.watch):
        training = kind()
        training.optimizer = optimizer = torch.optim.AdamW(training.net.parameters(), fused=fused)
        torch.manual_seed(5)
        with make(training.net, optimizer, config=config) as guard:
            for micro in grouped(data, 2):
                if make is Guard:
                    guard.step(training.loss_fn, *micro)
                    continue
                optimizer.zero_grad()
                for batch in micro:
                    guard.port.micro(training.loss_fn, batch)
                    training.loss_fn(batch).backward()
                optimizer.step()
                assert guard.port.dropped == (micro[1] is data[5])
        found += guard.incidents
    ours, theirs = found
    origin = theirs.origin
    assert (theirs.step, origin.micro_batch, origin.op) == (2, 1, op)
    assert origin.reproduced and origin.samples == (() if fault == "no label" else (4,))
    # a NaN among the numbers of an origin equals nothing
    assert dumps(to_plain(ours.origin)) == dumps(to_plain(origin))
    assert (ours.id, ours.decision) == (theirs.id, theirs.decision)
    assert [f.code for f in ours.findings] == [f.code for f in theirs.findings]
    for name in ("bad_grads", "bad_inputs", "bad_micro_batches", "labels"):
        assert getattr(ours.reading, name) == getattr(theirs.reading, name)


def test_trouble_names_what_must_not_be_saved() -> None:
    training = Training()
    with stepguard.watch(training.net, training.optimizer, config=LOCATED) as guard:
        assert guard.port.trouble() == () and guard.port.finite() and guard.port.good
        with torch.no_grad():
            training.net.outer.weight[0, 0] = torch.nan
            training.net.norm.running_var[1] = torch.nan
        assert guard.port.trouble() == ("param:outer.weight", "buffer:norm.running_var")
        assert not guard.port.finite()
        with torch.no_grad():
            training.net.outer.weight[0, 0] = 0.0
            training.net.norm.running_var[1] = 1.0


def test_start_at_numbers_the_steps_of_a_run_that_goes_on() -> None:
    training = Training()
    with stepguard.watch(training.net, training.optimizer, config=LOCATED) as guard:
        guard.port.start_at(40)
        for batch in made(2, bad=1):
            training.optimizer.zero_grad()
            training.loss_fn(batch).backward()
            training.optimizer.step()
        assert [incident.step for incident in guard.incidents] == [41]


# --- `watch` takes what Guard takes; frameworks use `guard.port`


def test_watch_takes_the_arguments_of_guard_by_name() -> None:
    guard = inspect.signature(stepguard.Guard.__init__).parameters
    watched = inspect.signature(stepguard.watch).parameters
    assert list(guard)[1:] == list(watched)
    assert all(p.kind is not p.VAR_KEYWORD for p in watched.values())


def test_the_loop_keeps_its_schedule_and_is_clipped_only_where_that_is_asked_for() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with stepguard.watch(model, optimizer, scheduler=schedule, config=quiet()) as guard:
        assert not guard._context.declared.advances
        hooks = len(optimizer._optimizer_step_pre_hooks)
    with stepguard.watch(model, optimizer, config=quiet(clip_norm=1.0)):
        assert len(optimizer._optimizer_step_pre_hooks) == hooks + 1


MOVED = ("micro", "dropped", "start_at", "settle", "finite", "trouble", "good", "say")


@pytest.mark.parametrize("name", MOVED)
def test_members_for_frameworks_are_on_the_port(name: str) -> None:
    model = plain_net()
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET) as guard:
        assert not hasattr(guard, name)
        assert hasattr(guard.port, name)


def test_micro_is_for_watched_loops_only() -> None:
    model = plain_net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET)
    with guard, pytest.raises(ConfigError, match=r"stepguard\.watch"):
        guard.port.micro(lambda batch: batch, batches(1)[0])
