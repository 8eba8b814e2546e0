"""A vetoed step leaves everything as it was before its forward pass, in any optimizer; what the
loop did before that stays.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stepguard
from guard.judging import everything, loop_step
from guard.optimizers import OPTIMIZERS, SAM
from scenes import (
    CLASSES,
    FEATURES,
    QUIET,
    Batch,
    Scene,
    batches,
    calm_net,
    difference,
    plain_net,
    poisoned,
    quiet,
)
from stepguard import Guard

DATA = batches(16)
BAD = 9


@contextmanager
def watching(
    model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
) -> Iterator[Guard]:
    guard = stepguard.watch(model, optimizer, config=quiet(**settings))
    try:
        yield guard
    finally:
        guard.close()


# --- every optimizer: parameters, the whole state, plain attributes, inner optimizers


def _scene(name: str) -> Scene:
    model = calm_net()
    return Scene(model, OPTIMIZERS[name](model.parameters()))


def half_steps(scene: Scene, micro: Sequence[Any]) -> None:
    """SAM by its two halves."""
    assert isinstance(scene.optimizer, SAM)
    scene.optimizer.zero_grad()
    scene.loss_fn(micro[0]).backward()
    scene.optimizer.first_step(zero_grad=True)
    scene.loss_fn(micro[0]).backward()
    scene.optimizer.second_step()


@pytest.mark.parametrize(
    ("name", "first", "driver"),
    [
        *(
            pytest.param(*row, marks=[pytest.mark.slow] if row[0] == "adamw-8bit" else [])
            for row in product(OPTIMIZERS, [True, False], ["step", "watch"])
        ),
        ("sam", True, "halves"),
        ("sam", False, "halves"),
    ],
)
def test_vetoed_step_of_any_optimizer_moves_nothing(name: str, first: bool, driver: str) -> None:
    scene, at = _scene(name), 0 if first else 4
    step = half_steps if driver == "halves" else loop_step
    data = [poisoned(batch) if index == at else batch for index, batch in enumerate(DATA[:8])]
    make = Guard if driver == "step" else stepguard.watch
    with make(scene.model, scene.optimizer, config=QUIET) as guard:
        for index, batch in enumerate(data):
            bad, before = index == at, everything(scene)
            if driver == "step":
                assert guard.step(scene.loss_fn, batch).committed is not bad
            else:
                step(scene, (batch,))
                assert guard.port.dropped is bad
            after = everything(scene)
            if bad and driver == "halves":
                # the first half keeps a copy of the weights for the second, by its own design
                after["held"]["state"] = before["held"]["state"]
                after["optimizer"]["state"] = before["optimizer"]["state"]
            assert (difference(after, before) == "") is bad
        assert [incident.step for incident in guard.incidents] == [at]
    fresh = _scene(name)
    for batch in (batch for index, batch in enumerate(data) if index != at):
        step(fresh, (batch,))
    assert difference(everything(scene)["model"], everything(fresh)["model"]) == ""


def test_gradient_that_is_bad_at_the_worst_point_only_is_vetoed() -> None:
    """SAM's second evaluation overflows where the first one does not."""
    scene = _scene("sam")
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET) as guard:
        for batch in DATA[:3]:
            loop_step(scene, (batch,))
        before = everything(scene)
        scene.optimizer.zero_grad()
        scene.loss_fn(DATA[3]).backward()
        scene.optimizer.step(lambda: scene.loss_fn(poisoned(DATA[3])).backward())
        assert guard.port.dropped
        assert difference(everything(scene), before) == ""
        loop_step(scene, (DATA[4],))
        assert not guard.port.dropped


class Fragile(torch.optim.SGD):
    """Divides by the norm of its gradients on the host, so that an update without any raises."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        for group in self.param_groups:
            group["lr"] = 0.01 / float(torch.stack([g.norm() for g in grads]).sum())
        return super().step(closure)


def test_optimizer_that_raises_in_a_vetoed_step_is_put_back_before_the_next_one() -> None:
    def scene() -> Scene:
        model = calm_net()
        return Scene(model, Fragile(model.parameters(), lr=0.01, momentum=0.9))

    guarded, reference = scene(), scene()
    with stepguard.watch(guarded.model, guarded.optimizer, config=QUIET) as guard:
        for batch in DATA[:3]:
            loop_step(guarded, (batch,))
        with pytest.raises(ZeroDivisionError):
            loop_step(guarded, (poisoned(DATA[3]),))
        loop_step(guarded, (DATA[4],))
    assert [incident.step for incident in guard.incidents] == [3]
    for batch in (*DATA[:3], DATA[4]):
        loop_step(reference, (batch,))
    after, wanted = (dict(one.model.state_dict()) for one in (guarded, reference))
    assert difference(after["0.weight"], wanted["0.weight"]) == ""
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())


# --- what the loop does between two steps


class Annealed(nn.Module):
    """A buffer, a number and an attribute that the loop sets, and a norm that the forward moves."""

    def __init__(self, *, by_method: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.ones(FEATURES))
        self.register_buffer("seen", torch.zeros(()))
        self.temperature, self.phase, self.by_method = 1.0, "warm", by_method

    def encode(self, inputs: Tensor) -> Tensor:
        normed = self.norm(inputs)
        self.seen.add_(1)
        return self.head(normed * self.mask) / self.temperature

    forward = encode

    def loss(self, batch: Batch) -> Tensor:
        out = self.encode(batch[0]) if self.by_method else self(batch[0])
        return nn.functional.cross_entropy(out, batch[1])


@pytest.mark.parametrize("by_method", [False, True], ids=["called", "by its methods"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_what_the_loop_did_before_the_forward_stays(fused: bool, by_method: bool) -> None:
    model = Annealed(by_method=by_method)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    with watching(model, optimizer) as guard:
        for index, batch in enumerate(DATA[:6]):
            if index == 4:
                model.mask[:2] = 0.0
                model.temperature, model.phase = 0.5, "cold"
                statistics = model.norm.running_mean.clone()
            optimizer.zero_grad()
            model.loss(poisoned(batch) if index == 4 else batch).backward()
            optimizer.step()
            if index == 4:
                assert guard.port.dropped
                assert torch.equal(model.norm.running_mean, statistics)
        assert [incident.step for incident in guard.incidents] == [4]
    assert model.mask.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert (model.temperature, model.phase, float(model.seen)) == (0.5, "cold", 5.0)


def test_model_that_is_trained_in_eval_mode_keeps_what_the_loop_did() -> None:
    model = Annealed().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watching(model, optimizer) as guard:
        for index, batch in enumerate(DATA[:6]):
            if index == 4:
                model.mask[:2] = 0.0
            optimizer.zero_grad()
            model.loss(poisoned(batch) if index == 4 else batch).backward()
            optimizer.step()
            assert guard.port.dropped is (index == 4)
    assert model.mask.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert float(model.seen) == 5.0


def test_model_that_is_only_called_by_its_methods_has_snapshots() -> None:
    model = Annealed(by_method=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watching(model, optimizer, snapshot_every=4) as guard:
        for batch in DATA[:10]:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
        assert [snapshot.step for snapshot in guard._rewinder.snapshots.ring.snapshots] == [4, 8]


@pytest.mark.parametrize(("every", "bad", "updates"), [(1, 3, 7), (4, 7, 2)])
def test_average_in_the_loop_takes_in_the_weights_once(every: int, bad: int, updates: int) -> None:
    """Each step, without the bad one; or once an epoch, whatever its last step was."""
    model = plain_net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, optimizer):
        for index, batch in enumerate(DATA[:8]):
            optimizer.zero_grad()
            given = poisoned(batch) if index == bad else batch
            nn.functional.cross_entropy(model(given[0]), given[1]).backward()
            optimizer.step()
            if index % every == every - 1:
                before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
                average.update_parameters(model)
                left_out = every == 1 and index == bad
                assert (difference(dict(average.state_dict()), before) == "") is left_out
    assert int(average.n_averaged) == updates


# --- state of modules that is no buffer


class Stateful(nn.Module):
    """Everything that people keep on modules besides buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.center = torch.zeros(FEATURES)
        self.inplace = torch.zeros(FEATURES)
        self.hidden: Tensor | None = None
        self.history: list[float] = []
        self.counts: dict[str, Any] = {"calls": 0, "nested": {"sum": 0.0}}
        self.recent: deque[float] = deque(maxlen=3)
        self.array = np.zeros(FEATURES)
        self.calls, self.late, self.scale, self.flag = 0, 0, 1.0, False
        self.kinds: set[str] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        mean = inputs.detach().mean(0)
        self.calls += 1
        self.late += self.calls > 7
        self.scale *= 0.99
        self.flag = not self.flag
        self.kinds.add(f"call {self.calls}")
        self.center = 0.9 * self.center + 0.1 * mean
        self.inplace.mul_(0.9).add_(mean)
        self.history.append(float(mean[0]))
        self.recent.append(float(mean[0]))
        self.counts["calls"] += 1
        self.counts["nested"]["sum"] += float(mean[0])
        self.array += mean.numpy()
        out = self.layer(inputs - self.center + 0.01 * self.inplace)
        if self.hidden is not None:
            out = out + 0.01 * self.hidden.detach()
        self.hidden = out.mean(0)
        return out


def state_of(model: Stateful) -> dict[str, Any]:
    names = [name for name in vars(model) if not name.startswith("_") and name != "training"]
    kept = {name: getattr(model, name) for name in names}
    kept = {
        name: sorted(v) if isinstance(v, set) else list(v) if isinstance(v, deque) else v
        for name, v in kept.items()
    }
    return {**kept, "weights": dict(model.state_dict())}


@pytest.mark.parametrize("way", ["step", "watch"])
def test_bad_batch_does_not_poison_attributes_of_modules(way: str) -> None:
    def run(data: list[Batch], guarded: bool) -> tuple[Stateful, Guard | None]:
        model = Stateful()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = None
        if guarded:
            guard = (
                Guard(model, optimizer, config=QUIET)
                if way == "step"
                else stepguard.watch(model, optimizer, config=QUIET)
            )
        for batch in data:
            if guard is not None and way == "step":
                guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
            else:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
        return model, guard

    given = [poisoned(batch) if index == BAD else batch for index, batch in enumerate(DATA)]
    model, guard = run(given, guarded=True)
    assert guard is not None
    guard.close()
    assert [incident.step for incident in guard.incidents] == [BAD]
    reference, _ = run([batch for index, batch in enumerate(DATA) if index != BAD], guarded=False)
    assert difference(state_of(model), state_of(reference)) == ""


def test_replay_starts_from_the_attributes_before_the_step() -> None:
    model = Stateful()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, config=quiet(locate=True)) as guard:
        for index, batch in enumerate(DATA[:5]):
            given = poisoned(batch) if index == 4 else batch
            guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), given)
        (incident,) = guard.incidents
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.tensor) == ("input", "batch:0")
    assert incident.origin.samples == (0,)


def test_tensor_of_the_last_graph_is_not_held_alive() -> None:
    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)
            self.last: Tensor | None = None

        def forward(self, inputs: Tensor) -> Tensor:
            self.last = self.layer(inputs)
            return self.last

    model = Maps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, optimizer):
        for batch in DATA[:3]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        assert model.last is not None
        old = weakref.ref(model.last)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(DATA[3][0]), DATA[3][1])
        assert old() is None
        loss.backward()
        optimizer.step()


class Ledger:
    """A helper object that holds nothing but data."""

    def __init__(self) -> None:
        self.total, self.values = 0.0, [0.0]


class Trainer:
    """Hangs on the module and does more than hold values."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0


def test_objects_that_only_hold_data_are_put_back_and_no_others() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.ledger = nn.Linear(FEATURES, CLASSES), Ledger()
            self.trainer = Trainer(self)

        def forward(self, inputs: Tensor) -> Tensor:
            self.ledger.total += 1.0
            self.ledger.values.append(self.ledger.total)
            self.trainer.calls += 1
            return self.layer(inputs)

    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, optimizer):
        for batch in (DATA[0], poisoned(DATA[1]), DATA[2]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
    assert (model.ledger.total, model.ledger.values, model.trainer.calls) == (
        2.0,
        [0.0, 1.0, 2.0],
        3,
    )
