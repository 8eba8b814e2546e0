"""A watched loop that is clipped by its guard is the loop that clips itself, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler

import stepguard
from scenes import Batch, Scene, batches, difference, noisy_net, poisoned, quiet, state_of
from stepguard import ConfigError

CLIP = 0.3
"""Below the norm of every step."""


def built(scaled: bool) -> Scene:
    model = noisy_net()
    torch.manual_seed(1)
    scaler = GradScaler("cpu", init_scale=8.0) if scaled else None
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=0.05), scaler=scaler)


def train(at: Scene, data: list[Batch], *, clips: bool) -> None:
    for batch in data:
        at.optimizer.zero_grad()
        loss = at.loss_fn(batch)
        if at.scaler is None:
            loss.backward()
        else:
            at.scaler.scale(loss).backward()
            at.scaler.unscale_(at.optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(at.model.parameters(), CLIP)
        if at.scaler is None:
            at.optimizer.step()
        else:
            at.scaler.step(at.optimizer)
            at.scaler.update()


@pytest.mark.parametrize("scaled", [False, True])
def test_loop_that_is_clipped_is_the_loop_that_clips(scaled: bool) -> None:
    data = batches(8)
    bare = built(scaled)
    train(bare, data, clips=True)
    unclipped = built(scaled)
    train(unclipped, data, clips=False)
    at = built(scaled)
    with stepguard.watch(
        at.model, at.optimizer, scaler=at.scaler, config=quiet(clip_norm=CLIP)
    ) as guard:
        train(at, data, clips=False)
        # the norm before clipping is what is judged and shown
        assert min(guard._context.history.norms) > CLIP
        assert guard.armed and not guard.incidents
    assert difference(state_of(at), state_of(bare)) == ""
    assert difference(state_of(at), state_of(unclipped)) != ""


def test_bad_step_is_vetoed_all_the_same() -> None:
    data = batches(6)
    bare = built(False)
    train(bare, [*data[:3], *data[4:]], clips=True)
    at = built(False)
    with stepguard.watch(at.model, at.optimizer, config=quiet(clip_norm=CLIP)) as guard:
        train(at, [*data[:3], poisoned(data[3]), *data[4:]], clips=False)
    assert [incident.step for incident in guard.incidents] == [3]
    assert all(bool(p.isfinite().all()) for p in at.model.parameters())


def test_closed_guard_clips_no_more() -> None:
    at = built(False)
    hooks = len(at.optimizer._optimizer_step_pre_hooks)
    stepguard.watch(at.model, at.optimizer, config=quiet(clip_norm=CLIP)).close()
    assert len(at.optimizer._optimizer_step_pre_hooks) == hooks


def test_guard_that_is_refused_leaves_no_hook() -> None:
    at = built(False)
    wrong: Any = quiet(clip_norm=CLIP, checkpoint_every=5)
    with pytest.raises(ConfigError, match="has no folder"):
        stepguard.watch(at.model, at.optimizer, config=wrong)
    assert not at.optimizer._optimizer_step_pre_hooks


def test_optimizers_that_cannot_be_clipped_from_outside_are_refused() -> None:
    model = noisy_net()
    with pytest.raises(ConfigError, match="inside its step"):
        stepguard.watch(model, torch.optim.LBFGS(model.parameters()), config=quiet(clip_norm=CLIP))
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ConfigError, match="still scaled"):
        stepguard.watch(model, fused, scaler=GradScaler("cpu"), config=quiet(clip_norm=CLIP))
