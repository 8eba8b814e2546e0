"""`guard.micro`: a loop that runs its own steps but tells its micro-batches is located as
`guard.step` is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from scenes import NAN, quiet
from settings_of import config_of
from stepguard import ConfigError, GuardConfig, Incident, Policy
from stepguard.records.codec import dumps, to_plain

LOCATED = quiet(locate=True)
Batch = dict[str, Tensor]


class Net(nn.Module):
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
        self.net = Net()
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
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
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


def test_telling_changes_nothing_of_a_healthy_run() -> None:
    runs = []
    for tell in (False, True):
        loop = Loop(LOCATED)
        torch.manual_seed(5)
        flat = batches(8)
        assert loop.by_itself([flat[i : i + 2] for i in range(0, 8, 2)], tell=tell) == ()
        runs.append(
            (loop.net.state_dict(), loop.optimizer.state_dict()["state"], torch.get_rng_state())
        )
    (net, state, rng), (told_net, told_state, told_rng) = runs
    assert all(torch.equal(net[key], told_net[key]) for key in net)
    assert all(torch.equal(state[p][slot], told_state[p][slot]) for p in state for slot in state[p])
    assert torch.equal(rng, told_rng)


def test_a_vetoed_step_leaves_no_trace_of_its_replay() -> None:
    """The replay calls model and backward; neither may be taken for the loop's next step."""
    clean, dirty = batches(6), batches(6)
    zero_scale(dirty[2])
    bare, told = Loop(LOCATED), Loop(LOCATED)
    torch.manual_seed(5)
    del clean[2]
    bare.net.drop.p = told.net.drop.p = 0.0  # a skip does not rewind random numbers
    bare.by_itself([[b] for b in clean])
    assert len(told.by_itself([[b] for b in dirty])) == 1
    assert all(
        torch.equal(a, b) for a, b in zip(bare.net.parameters(), told.net.parameters(), strict=True)
    )


def test_a_told_step_gets_a_capsule(tmp_path: Path) -> None:
    found = batches(3)
    zero_scale(found[1])
    (incident,) = Loop(quiet(locate=True, run_dir=tmp_path)).by_itself([[b] for b in found])
    assert incident.capsule is not None
    assert (tmp_path / incident.capsule).is_dir()


def test_dropped_says_what_became_of_the_last_update() -> None:
    loop, found = Loop(LOCATED), batches(3)
    zero_scale(found[1])
    said = []
    with stepguard.watch(loop.net, loop.optimizer, config=LOCATED) as guard:
        for batch in found:
            loop.optimizer.zero_grad()
            guard.port.micro(loop.loss_fn, batch)
            loop.loss_fn(batch).backward()
            loop.optimizer.step()
            said.append(guard.port.dropped)
    assert said == [False, True, False]


def test_micro_is_refused_where_the_guard_runs_the_step() -> None:
    loop = Loop(LOCATED)
    with (
        stepguard.Guard(loop.net, loop.optimizer, config=LOCATED) as guard,
        pytest.raises(ConfigError, match="watch"),
    ):
        guard.port.micro(loop.loss_fn, batches(1)[0])


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


def test_start_at_numbers_the_steps_of_a_run_that_goes_on() -> None:
    loop, found = Loop(LOCATED), batches(2)
    zero_scale(found[1])
    with stepguard.watch(loop.net, loop.optimizer, config=LOCATED) as guard:
        guard.port.start_at(40)
        for batch in found:
            loop.optimizer.zero_grad()
            loop.loss_fn(batch).backward()
            loop.optimizer.step()
        assert [incident.step for incident in guard.incidents] == [41]
