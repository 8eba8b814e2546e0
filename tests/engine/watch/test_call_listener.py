"""A watched model can be copied, pickled, saved, compiled, exported and transformed; no copy
carries our hooks.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from stepguard import GuardConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.outer(F.relu(self.norm(self.inner(x)) * scale[:, None]))


@pytest.fixture
def watched_model() -> Any:
    model = Net()
    guard = stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    )
    assert _hears(model)
    yield model
    guard.close()
    assert "_compiled_call_impl" not in vars(model)


def _hears(model: nn.Module) -> bool:
    return "stepguard" in type(vars(model).get("_compiled_call_impl")).__module__


def _hooks(model: nn.Module) -> list[Any]:
    hooked = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "hooks" in name
    ]
    return [hooks for hooks in hooked if hooks]


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved],
    ids=["deepcopy", "pickle", "save"],
)
def test_a_copy_carries_no_hook_of_ours_and_works(watched_model: nn.Module, duplicate: Any) -> None:
    twin = duplicate(watched_model)
    assert vars(twin).keys() == vars(Net()).keys()
    assert not _hooks(twin)
    assert not _hooks(watched_model)
    x, scale = torch.randn(6, 4), torch.ones(6)
    assert torch.equal(twin(x, scale), watched_model(x, scale))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_saved_model_is_the_same_file_as_without_a_guard(steps: int) -> None:
    def saved(guarded: bool) -> bytes:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet"))
            if guarded
            else nullcontext()
        ):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(6, 4), torch.ones(6)).sum().backward()
                optimizer.step()
            file = io.BytesIO()
            torch.save(model, file)
        return file.getvalue()

    assert saved(guarded=True) == saved(guarded=False)


def test_a_saved_model_loads_under_the_safe_globals_of_the_script() -> None:
    model = nn.Linear(3, 1)
    with stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    ):
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Linear]):
        assert torch.equal(torch.load(file, weights_only=True).weight, model.weight)


class KeepsItsWholeDict(Net):
    def __getstate__(self) -> Any:
        return vars(self)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_a_model_that_pickles_its_whole_dict_still_leaves_us_out(duplicate: Any) -> None:
    model = KeepsItsWholeDict()
    with stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    ):
        twin = duplicate(model)
    assert twin._compiled_call_impl is None
    assert torch.equal(
        twin(torch.ones(2, 4), torch.ones(2)), model(torch.ones(2, 4), torch.ones(2))
    )


def test_a_replica_that_shares_the_attributes_runs_its_own_forward(
    watched_model: nn.Module,
) -> None:
    replica: Any = watched_model._replicate_for_data_parallel()
    replica.forward = lambda x: x + 1  # as DataParallel gives each its own parameters
    assert torch.equal(replica(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_guards_on_one_model_either_may_close_first(first: int) -> None:
    model = Net()
    halves = [list(model.inner.parameters()), list(model.outer.parameters())]
    config = GuardConfig(terminal="quiet")
    guards = [
        stepguard.watch(model, torch.optim.SGD(half, lr=0.1), config=config) for half in halves
    ]
    guards[first].close()
    assert _hears(model)
    guards[1 - first].close()
    assert vars(model).keys() == vars(Net()).keys()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # from torch 2.15 on
def test_a_watched_model_can_be_scripted_and_traced(watched_model: nn.Module) -> None:
    args = torch.randn(6, 4), torch.ones(6)
    watched_model.eval()
    traced = torch.jit.trace(watched_model, args)  # type: ignore[no-untyped-call]
    assert torch.equal(traced(*args), watched_model(*args))
    linear = nn.Linear(4, 3)
    with stepguard.watch(
        linear, torch.optim.SGD(linear.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    ):
        assert torch.equal(torch.jit.script(linear)(args[0]), linear(args[0]))


def test_saving_the_output_does_not_warn(watched_model: nn.Module) -> None:
    torch.save(watched_model(torch.randn(6, 4), torch.ones(6)).detach(), io.BytesIO())
    out = watched_model(torch.randn(6, 4), torch.ones(6))
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    assert torch.equal(torch.load(file), out)


def test_a_watched_model_compiles_and_exports(watched_model: nn.Module) -> None:
    args = torch.randn(6, 4), torch.ones(6)
    watched_model.eval()
    wanted = watched_model(*args)
    assert torch.equal(torch.compile(watched_model, backend="eager", fullgraph=True)(*args), wanted)
    exported = torch.export.export(watched_model, args)
    assert torch.equal(exported.module()(*args), wanted)
    torch._dynamo.reset()
    watched_model.train()
    torch.compile(watched_model, backend="eager")(*args).sum().backward()
    torch._dynamo.reset()


def test_function_transforms_of_a_watched_model_work(watched_model: nn.Module) -> None:
    watched_model.norm = nn.Identity()  # statistics cannot be written inside a transform
    params = dict(watched_model.named_parameters())

    def loss(params: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(
            watched_model, params, (torch.ones(2, 4), torch.ones(2))
        )
        return out.sum()

    assert torch.func.grad(loss)(params)["inner.weight"].shape == (8, 4)


@pytest.mark.slow
def test_whoever_keeps_a_loss_does_not_keep_the_guard() -> None:
    model = Net()
    guard = stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    )
    loss = model(torch.ones(2, 4), torch.ones(2)).sum()
    loss.backward(retain_graph=True)
    guard.close()
    gone = weakref.ref(guard)
    del guard
    gc.collect()
    assert gone() is None
    loss.backward()  # nobody listens any more
