"""Modules by call stack in the forward pass and by node numbers in the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate.source import ModuleSpans


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: list[str | None] = []
        self.spans: ModuleSpans | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.spans is not None
        self.seen.append(self.spans.current)
        return self.inner(x).exp()


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError


def test_current_module_and_the_module_of_a_node() -> None:
    model = Outer()
    spans = ModuleSpans({"": model, "criterion": nn.MSELoss()})
    model.spans = spans
    with spans:
        out = model(torch.ones(1, 2))
        after = out.sum()
    assert model.seen == [""]
    assert spans.current is None
    exp = out.grad_fn
    assert exp is not None and after.grad_fn is not None
    linear = exp.next_functions[0][0]
    assert linear is not None
    assert spans.created(exp._sequence_nr()) == ""
    assert spans.created(linear._sequence_nr()) == "inner"
    assert spans.created(after.grad_fn._sequence_nr()) is None


def test_module_that_raises_leaves_the_stack() -> None:
    model = Failing()
    with ModuleSpans({"": model}) as spans:
        with pytest.raises(ValueError):
            model(torch.ones(1))
        assert spans.current is None


def test_criterion_is_outside_the_model() -> None:
    spans = ModuleSpans({"": nn.Linear(1, 1), "criterion": nn.MSELoss()})
    assert spans.belongs_to_model("")
    assert not spans.belongs_to_model("criterion")
    assert not spans.belongs_to_model(None)


class Twice(nn.Linear):
    """Calls itself once."""

    inner = False

    def forward(self, x: Tensor) -> Tensor:
        if self.inner:
            return super().forward(x)
        self.inner = True
        out: Tensor = self(x)
        self.inner = False
        return out


def test_hooks_of_a_module_belong_to_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Twice(2, 2))
    spans = ModuleSpans({"": model})
    seen: list[str | None] = []

    def before(module: nn.Module, args: object) -> None:
        seen.append(spans.current)

    def after(module: nn.Module, args: object, output: Tensor) -> Tensor:
        seen.append(spans.current)
        return output.exp()

    for part in model:
        part.register_forward_pre_hook(before)
        part.register_forward_hook(after)
    with spans:
        out = model(torch.ones(1, 2))
    assert seen == ["0", "0", "1", "1", "1", "1"]
    assert out.grad_fn is not None and spans.created(out.grad_fn._sequence_nr()) == "1"
    assert spans.current is None
    assert [len(part._forward_hooks) for part in model] == [1, 1]


def test_hook_that_raises_leaves_the_stack() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def fail(module: nn.Module, args: object, output: Tensor) -> None:
        raise ValueError

    model[0].register_forward_hook(fail)
    with ModuleSpans({"": model}) as spans:
        with pytest.raises(ValueError):
            model(torch.ones(1, 2))
        assert spans.current is None
    assert len(model[0]._forward_hooks) == 1
