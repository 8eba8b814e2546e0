"""A vetoed step leaves no trace in any optimizer: parameters, the whole state, plain attributes,
inner optimizers.

And a healthy run is what it is without the guard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import stepguard
from guard.optimizers import OPTIMIZERS, SAM
from pairwise import pairwise
from scenes import QUIET, Batch, batches, calm_net, difference, poisoned
from stepguard import Guard

DATA = batches(9)
BAD = 4


def held(value: Any) -> Any:
    """Everything an object holds, as plain values that can be compared bit by bit."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        named = [
            (f"#{i}" if isinstance(key, Tensor) else str(key), item)
            for i, (key, item) in enumerate(value.items())
        ]
        return {
            key: held(item)
            for key, item in named
            if not key.endswith("_hooks") and not callable(item)
        }
    if isinstance(value, list | tuple | deque):
        return [held(item) for item in value]
    if hasattr(value, "__dict__"):
        return held(vars(value))
    return value


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": held(model.state_dict()),
        "optimizer": held(optimizer),
        "saved": held(optimizer.state_dict()),
    }


def evaluated(model: nn.Module, batch: Batch) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


def loop_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """A step of an ordinary loop, with the closure that SAM wants."""
    optimizer.zero_grad()
    evaluated(model, batch)
    if isinstance(optimizer, SAM):
        optimizer.step(lambda: evaluated(model, batch))
    else:
        optimizer.step()


def half_steps(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """SAM by its two halves."""
    assert isinstance(optimizer, SAM)
    optimizer.zero_grad()
    evaluated(model, batch)
    optimizer.first_step(zero_grad=True)
    evaluated(model, batch)
    optimizer.second_step()


def built(name: str) -> tuple[nn.Module, Optimizer]:
    model = calm_net()
    return model, OPTIMIZERS[name](model.parameters())


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
def test_step_runs_every_optimizer_as_a_loop_does() -> None:
    for name in OPTIMIZERS:
        (model, optimizer), (bare, theirs) = built(name), built(name)
        with Guard(model, optimizer, config=QUIET) as guard:
            for batch in DATA:
                assert guard.step(partial(_loss_of, model), batch).committed
                loop_step(bare, theirs, batch)
        assert difference(everything(model, optimizer), everything(bare, theirs)) == "", name


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_watched_healthy_run_is_the_bare_one(name: str) -> None:
    (model, optimizer), (bare, theirs) = built(name), built(name)
    guard = stepguard.watch(model, optimizer, config=QUIET)
    for batch in DATA:
        loop_step(model, optimizer, batch)
        loop_step(bare, theirs, batch)
    guard.close()
    assert guard.incidents == ()
    assert difference(everything(model, optimizer), everything(bare, theirs)) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "when", "loop"),
    pairwise(product(OPTIMIZERS, ["first", "later"], ["step", "watch"])),
)
def test_vetoed_step_moves_nothing(name: str, when: str, loop: str) -> None:
    if loop == "step":
        veto_of_a_step(name, when == "first")
    else:
        veto_of_a_loop(loop_step, name, when == "first")


def veto_of_a_step(name: str, first: bool) -> None:
    model, optimizer = built(name)
    data = DATA if not first else DATA[BAD:]
    with Guard(model, optimizer, config=QUIET) as guard:
        for index, batch in enumerate(data):
            bad = index == (0 if first else BAD)
            before = everything(model, optimizer)
            given = poisoned(batch) if bad else batch
            result = guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), given)
            assert result.committed is not bad
            assert (difference(everything(model, optimizer), before) == "") is bad


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_vetoed_step_of_two_halves_moves_nothing(first: bool) -> None:
    veto_of_a_loop(half_steps, "sam", first)


def veto_of_a_loop(
    step: Callable[[nn.Module, Optimizer, Batch], None], name: str, first: bool
) -> None:
    model, optimizer = built(name)
    data = DATA if not first else DATA[BAD:]
    guard = stepguard.watch(model, optimizer, config=QUIET)
    good = []
    for index, batch in enumerate(data):
        bad = index == (0 if first else BAD)
        before = everything(model, optimizer)
        step(model, optimizer, poisoned(batch) if bad else batch)
        assert guard.port.dropped is bad
        after = everything(model, optimizer)
        if (
            bad and step is half_steps
        ):  # the first half keeps a copy of the weights for the second, by its own design
            after["optimizer"]["state"] = before["optimizer"]["state"]
            after["saved"]["state"] = before["saved"]["state"]
        assert (difference(after, before) == "") is bad
        good += [] if bad else [batch]
    guard.close()
    assert [incident.step for incident in guard.incidents] == [0 if first else BAD]
    fresh, theirs = built(name)
    for batch in good:
        step(fresh, theirs, batch)
    assert difference(held(model.state_dict()), held(fresh.state_dict())) == ""


def test_gradient_that_is_bad_at_the_worst_point_only_is_vetoed() -> None:
    """SAM's second evaluation overflows where the first one does not."""
    model, optimizer = built("sam")
    guard = stepguard.watch(model, optimizer, config=QUIET)
    for batch in DATA[:3]:
        loop_step(model, optimizer, batch)
    before = everything(model, optimizer)
    optimizer.zero_grad()
    evaluated(model, DATA[3])
    optimizer.step(partial(evaluated, model, poisoned(DATA[3])))
    assert guard.port.dropped
    assert difference(everything(model, optimizer), before) == ""
    loop_step(model, optimizer, DATA[4])
    assert not guard.port.dropped
    guard.close()


def test_lbfgs_and_its_history_are_put_back() -> None:
    model = calm_net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    guard = stepguard.watch(model, optimizer, config=QUIET)

    def run(batch: Batch) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            return evaluated(model, batch)

        optimizer.step(closure)  # type: ignore[arg-type]

    for batch in DATA[:3]:
        run(batch)
    before = everything(model, optimizer)
    run(poisoned(DATA[3]))
    assert guard.port.dropped
    assert difference(everything(model, optimizer), before) == ""
    guard.close()


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
    model = calm_net()
    optimizer = Fragile(model.parameters(), lr=0.01, momentum=0.9)
    guard = stepguard.watch(model, optimizer, config=QUIET)
    for batch in DATA[:3]:
        loop_step(model, optimizer, batch)
    before = everything(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        loop_step(model, optimizer, poisoned(DATA[3]))
    loop_step(model, optimizer, DATA[4])
    guard.close()
    assert [incident.step for incident in guard.incidents] == [3]
    after = everything(model, optimizer)
    assert difference(after, before) != ""
    assert all(bool(tensor.isfinite().all()) for tensor in after["model"].values())
    reference = calm_net()
    theirs = Fragile(reference.parameters(), lr=0.01, momentum=0.9)
    for batch in (*DATA[:3], DATA[4]):
        loop_step(reference, theirs, batch)
    assert difference(after["model"]["0.weight"], held(reference.state_dict())["0.weight"]) == ""
