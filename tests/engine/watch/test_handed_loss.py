"""A loop of the user's own hands its loss (`guard.loss`) or its micro-batches over, so that its
first bad step is located as that of `guard.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from scenes import NAN, quiet
from settings_of import config_of
from stepguard import ConfigError, Guard, GuardConfig, Incident, Policy
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
    assert untold.origin.op is None  # what is gained


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


class LogNet(nn.Module):
    """Dropout, norm statistics, and a logarithm that a batch can drive to minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.inner(x)))
        return self.outer(hidden * torch.log(scale)[:, None])


def batches(count: int) -> list[Batch]:
    source = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(6, 4, generator=source),
            "scale": torch.rand(6, generator=source) + 0.5,
            "labels": torch.randint(0, 3, (6,), generator=source),
        }
        for _ in range(count)
    ]


def zero_scale(batch: Batch) -> None:
    batch["scale"][4] = 0.0


def nan_input(batch: Batch) -> None:
    batch["x"][2, 1] = NAN


def no_label(batch: Batch) -> None:
    batch["labels"][:] = -100


def negative_root(batch: Batch) -> None:
    batch["scale"][1] = -2.0


class Loop:
    """The same training, run by the guard or by a loop of its own."""

    def __init__(
        self, config: GuardConfig, *, fused: bool = False, clip: float | None = 1.0
    ) -> None:
        torch.manual_seed(0)
        self.net = LogNet()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 / (1 + step)
        )
        self.config, self.clip = config, clip
        self.losses: list[float] = []

    def loss_fn(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch["x"], batch["scale"]), batch["labels"]) / 2

    def by_the_guard(self, steps: Sequence[Sequence[Batch]]) -> tuple[Incident, ...]:
        config = config_of(**{**_fields(self.config), "clip_norm": self.clip})
        with stepguard.Guard(
            self.net, self.optimizer, scheduler=self.scheduler, config=config
        ) as guard:
            for micro in steps:
                guard.step(self.loss_fn, *micro)
            return guard.incidents

    def by_itself(
        self, steps: Sequence[Sequence[Batch]], *, tell: bool = True
    ) -> tuple[Incident, ...]:
        with stepguard.watch(
            self.net, self.optimizer, scheduler=self.scheduler, config=self.config
        ) as guard:
            for micro in steps:
                self.optimizer.zero_grad()
                for batch in micro:
                    if tell:
                        guard.port.micro(self.loss_fn, batch)
                    self.loss_fn(batch).backward()
                if self.clip is not None:
                    torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
                self.optimizer.step()
                self.scheduler.step()
            return guard.incidents


def _fields(config: GuardConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def facts(incident: Incident) -> dict[str, Any]:
    """What must not depend on who runs the loop."""
    reading = incident.reading
    return {
        "id": incident.id,
        "origin": dumps(to_plain(incident.origin)),  # a NaN among its numbers equals nothing
        "codes": [finding.code for finding in incident.findings],
        "decision": incident.decision,
        "bad_grads": reading.bad_grads,
        "bad_inputs": reading.bad_inputs,
        "bad_micro_batches": reading.bad_micro_batches,
        "labels": reading.labels,
    }


FAULTS = [zero_scale, nan_input, no_label, negative_root]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "fused"), each(FAULTS, [False, True]))
def test_told_micro_batches_give_the_incident_of_guard_step(
    fault: Callable[[Batch], None], fused: bool
) -> None:
    def steps() -> list[list[Batch]]:
        found = [[batch] for batch in batches(5)]
        fault(found[3][0])
        return found

    # a framework has added the gradient of the bad rows already: only the guard's own loop can
    # leave them out
    config = quiet(locate=True, labels_key="labels", policy=Policy(actions=("skip", "stop")))
    ours = Loop(config, fused=fused).by_the_guard(steps())
    theirs = Loop(config, fused=fused).by_itself(steps())
    assert len(ours) == 1
    assert ours[0].origin is not None and ours[0].origin.reproduced
    assert [facts(i) for i in theirs] == [facts(i) for i in ours]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_of_several_micro_batches_the_bad_one_is_named(fused: bool) -> None:
    flat = batches(8)
    zero_scale(flat[5])
    incidents = Loop(LOCATED, fused=fused).by_itself([flat[i : i + 2] for i in range(0, 8, 2)])
    (incident,) = incidents
    assert incident.step == 2
    assert incident.origin is not None
    assert (incident.origin.micro_batch, incident.origin.op) == (1, "aten.log")
    assert incident.origin.samples == (4,)


def test_trouble_names_what_must_not_be_saved() -> None:
    loop = Loop(LOCATED)
    with stepguard.watch(loop.net, loop.optimizer, config=LOCATED) as guard:
        assert guard.port.trouble() == ()
        assert guard.port.finite()
        with torch.no_grad():
            loop.net.outer.weight[0, 0] = NAN
            loop.net.norm.running_var[1] = NAN
        assert guard.port.trouble() == ("param:outer.weight", "buffer:norm.running_var")
        assert not guard.port.finite()
        with torch.no_grad():
            loop.net.outer.weight[0, 0] = 0.0
            loop.net.norm.running_var[1] = 1.0
