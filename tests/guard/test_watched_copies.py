"""A watched model can be copied, pickled, saved, compiled, exported and transformed; no copy carries our hooks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
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
    guard = stepguard.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet"))
    yield model
    guard.close()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def _hooks_of_ours(model: nn.Module) -> list[Any]:
    hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
    return [h for h in hooks if "stepguard" in getattr(type(h), "__module__", "") + getattr(h, "__module__", "")]


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved], ids=["deepcopy", "pickle", "save"]
)
def test_a_copy_carries_no_hook_of_ours_and_works(watched_model: nn.Module, duplicate: Any) -> None:
    assert len(_hooks_of_ours(watched_model)) == 2
    twin = duplicate(watched_model)
    assert not _hooks_of_ours(twin)
    x, scale = torch.randn(6, 4), torch.ones(6)
    assert torch.equal(twin(x, scale), watched_model(x, scale))


def test_a_pickle_can_be_read_where_stepguard_is_not_installed(watched_model: nn.Module) -> None:
    assert b"stepguard" not in pickle.dumps(watched_model)


def test_saving_the_output_does_not_warn(watched_model: nn.Module) -> None:
    torch.save(watched_model(torch.randn(6, 4), torch.ones(6)).detach(), io.BytesIO())
    out = watched_model(torch.randn(6, 4), torch.ones(6))
    torch.save(out, io.BytesIO())


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
        out: Tensor = torch.func.functional_call(watched_model, params, (torch.ones(2, 4), torch.ones(2)))
        return out.sum()

    assert torch.func.grad(loss)(params)["inner.weight"].shape == (8, 4)


def test_whoever_keeps_a_loss_does_not_keep_the_guard() -> None:
    model = Net()
    guard = stepguard.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet"))
    loss = model(torch.ones(2, 4), torch.ones(2)).sum()
    loss.backward(retain_graph=True)
    guard.close()
    gone = weakref.ref(guard)
    del guard
    gc.collect()
    assert gone() is None
    loss.backward()  # nobody listens any more
