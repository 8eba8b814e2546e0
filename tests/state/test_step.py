"""What one step is made of: the user's modules under their wrappers, and its loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepguard.state.batch import Step, total_loss, unwrapped
from stepguard.state.buffers import BufferKeeper


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group: what counts is the name and `.module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Holder(nn.Module):
    """A user's own module that happens to have a `.module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _compiled(model: nn.Module) -> nn.Module:
    wrapper = torch.compile(model, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


def test_plain_model_is_its_own() -> None:
    model = nn.Linear(1, 1)
    assert unwrapped(model) is model


def test_wrappers_are_seen_through_in_any_order() -> None:
    model = nn.Linear(1, 1)
    assert unwrapped(_compiled(model)) is model
    assert unwrapped(nn.DataParallel(model)) is model
    assert unwrapped(DistributedDataParallel(_compiled(model))) is model
    assert unwrapped(_compiled(DistributedDataParallel(model))) is model


def test_module_of_the_user_with_the_same_attribute_is_kept() -> None:
    model = Holder(nn.Linear(1, 1))
    assert unwrapped(model) is model


def test_roots_are_named_as_the_user_named_them() -> None:
    model, criterion = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(0, _compiled(model), optimizer, {"criterion": criterion}, BufferKeeper([model]))
    assert step.named_roots() == {"": model, "criterion": criterion}


def test_named_losses_are_added() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    loss = total_loss({"ce": weight * 3, "kl": weight * 0.5})
    loss.backward()
    assert loss.item() == 7.0
    assert weight.grad is not None and weight.grad.item() == 3.5


def test_scalar_loss_is_taken_as_it_is() -> None:
    loss = torch.tensor(1.0)
    assert total_loss(loss) is loss
    assert total_loss({"only": loss}) is loss


def test_empty_loss_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"empty dict; return .*scalar tensor"):
        total_loss({})
