"""Loss and pre-clip norm of a watched loop, observed without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepguard import GuardConfig
from stepguard.engine.build import build_context
from stepguard.engine.reader import Reader, gradients_of
from stepguard.engine.watch.observed_loss import ObservedLoss


class Scene:
    """A model with gradients, and what a guard observes of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        config = GuardConfig(terminal="quiet")
        self.context = build_context(self.model, optimizer, None, None, None, None, config)
        self.observed = ObservedLoss(self.context, Reader(self.context).announce)

    def backward(self) -> bool:
        loss = self.model(torch.ones(2, 3)).pow(2).mean()
        self.observed.before_backward(loss)
        loss.backward()
        return self.observed.after_backward(failed=False)

    def clip(self) -> Tensor:
        gradients = [p.grad for p in self.context.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        self.observed.after_norm(gradients, norm)  # where torch's clipping is patched
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 1e-3, norm)
        return norm

    def close(self) -> None:
        self.context.resources.close()


def test_losses_of_micro_batches_are_kept_until_the_update() -> None:
    scene = Scene()
    assert scene.backward()
    assert scene.backward()
    assert len(scene.observed.losses) == 2
    scene.observed.clear()
    assert scene.observed.losses == []
    scene.close()


def test_losses_whose_gradients_were_dropped_are_dropped() -> None:
    scene = Scene()
    scene.backward()
    scene.context.optimizer.zero_grad(set_to_none=True)
    scene.backward()
    assert len(scene.observed.losses) == 1
    scene.close()


def test_backward_of_another_loss_is_not_ours() -> None:
    scene = Scene()
    other = nn.Linear(3, 1)
    loss = other(torch.ones(2, 3)).mean()
    scene.observed.before_backward(loss)
    loss.backward()
    assert not scene.observed.after_backward(failed=False)
    assert scene.observed.losses == []
    scene.close()


def test_norm_of_clipping_is_used_and_not_taken_again() -> None:
    scene = Scene()
    scene.backward()
    norm = scene.clip()
    found = scene.observed.norm(gradients_of(scene.context))
    assert found is not None
    assert found.total is norm
    assert scene.observed.clipped
    scene.close()


def test_gradients_written_after_clipping_ask_for_a_new_norm() -> None:
    scene = Scene()
    scene.backward()
    scene.clip()
    for parameter in scene.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)
    assert scene.observed.norm(gradients_of(scene.context)) is None
    scene.close()


def test_norm_taken_for_another_optimizer_is_reused() -> None:
    scene = Scene()
    scene.backward()
    taken = scene.observed.take_norm()
    found = scene.observed.norm(gradients_of(scene.context))
    assert found is not None
    assert found.total is taken
    scene.close()
