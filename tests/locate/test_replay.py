"""A replay changes nothing: weights, gradients, buffers, optimizer state, RNG and modes stay."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepguard.locate import locate
from stepguard.locate.replay import Replayer
from stepguard.records import Reading
from stepguard.state.batch import Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.rng import capture_rng

from .cases import noise


class Busy(nn.Module):
    """Dropout, batch statistics, a counter, a power iteration: all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
        self.bn = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.bn.train()
        return self.out(F.dropout(self.bn(self.fc(x)), 0.3))


def bad_step(scale: float = 1.0) -> tuple[Step, Reading]:
    torch.manual_seed(0)
    model = Busy()
    model.bn.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def loss_fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].mul_(1.0)
        return criterion(model(batch["x"]), batch["y"]) + random.random() * 0.0

    good = {"x": noise(6, 4), "y": noise(6, 1)}
    loss_fn(good).backward()
    optimizer.step()
    bad = {"x": noise(6, 4, seed=2), "y": noise(6, 1, seed=3)}
    bad["x"][2, 1] = math.nan
    model.bn.eval()
    keeper = BufferKeeper([model])
    keeper.remember()
    rng = capture_rng()
    optimizer.zero_grad()
    loss = loss_fn(bad)
    (loss * scale).backward()
    keeper.restore()
    model.bn.eval()
    step = Step(
        3, model, optimizer, {"criterion": criterion}, keeper, loss_fn, (bad,), [rng], scale
    )
    return step, Reading(step=3, loss=math.nan, micro_losses=(math.nan,), grads_finite=False)


def picture(step: Step) -> dict[str, Any]:
    """Everything that must not change, as bytes."""
    tensors = {f"p:{n}": p for n, p in step.model.named_parameters()}
    tensors |= {f"g:{n}": p.grad for n, p in step.model.named_parameters() if p.grad is not None}
    tensors |= {f"b:{n}": b for n, b in step.model.named_buffers()}
    tensors |= {f"x:{k}": v for k, v in step.micro_batches[0].items()}
    seen: dict[str, Any] = {
        k: t.detach().clone().view(torch.uint8).tolist() if t.dim() else t.item()
        for k, t in tensors.items()
    }
    seen["opt"] = str(copy.deepcopy(step.optimizer.state_dict()))
    seen["rng"] = torch.get_rng_state().tolist()
    seen["python"] = random.getstate()
    seen["training"] = [m.training for m in step.model.modules()]
    seen["grad objects"] = [id(p.grad) for p in step.model.parameters()]
    seen["buffer objects"] = [id(b) for b in step.model.buffers()]
    seen["autocast"] = torch.is_autocast_enabled("cpu")
    seen["grad mode"] = torch.is_grad_enabled()
    seen["hooks"] = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in step.model.modules()
    ]
    return seen


def test_locate_leaves_everything_bit_identical() -> None:
    step, reading = bad_step()
    before = picture(step)
    origin = locate(step, reading)
    assert origin.tensor == "batch:x" and origin.inputs[0].index == (2, 1)
    after = picture(step)
    assert [k for k in before if repr(before[k]) != repr(after[k])] == []


def test_global_module_hooks_are_gone_afterwards() -> None:
    from torch.nn.modules import module as registry

    before = len(registry._global_forward_hooks), len(registry._global_forward_pre_hooks)
    step, reading = bad_step()
    locate(step, reading)
    assert (len(registry._global_forward_hooks), len(registry._global_forward_pre_hooks)) == before


def test_an_optimizer_fused_into_the_backward_does_not_step_during_a_replay() -> None:
    step, reading = bad_step()
    fired = []
    for parameter in step.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    locate(step, reading)
    assert fired == []
    next(step.model.parameters()).grad = None
    step.model.out(noise(2, 8)).sum().backward()
    assert len(fired) == 2, "the user's hooks work again"


def test_an_error_of_the_users_code_in_the_replay_gives_the_best_known_origin() -> None:
    step, reading = bad_step()

    def broken(batch: Any) -> torch.Tensor:
        raise KeyError("gone")

    step.loss_fn = broken
    before = picture(step)
    origin = locate(step, reading)
    assert origin.reproduced is None and origin.tensor == "batch:x"
    assert (origin.evidence.replay_error or "").startswith("KeyError")
    assert origin.remarks == (f"the replay failed: {origin.evidence.replay_error}",)
    assert repr(picture(step)) == repr(before)


def test_without_a_loss_function_the_scan_still_names_the_element() -> None:
    step, reading = bad_step()
    step.loss_fn = None
    origin = locate(step, reading)
    assert (origin.phase, origin.tensor, origin.reproduced, origin.method) == (
        "input",
        "batch:x",
        None,
        "scan",
    )
    assert origin.inputs[0].index == (2, 1)


def test_a_step_that_is_clean_when_replayed_is_not_reproduced() -> None:
    step, reading = bad_step()
    step.micro_batches[0]["x"].nan_to_num_(0.0)
    origin = locate(step, reading)
    assert origin.reproduced is False and origin.evidence.same_bits is True


def test_a_clean_step_that_does_not_repeat_itself_is_nondeterministic() -> None:
    step, reading = bad_step()
    step.micro_batches[0]["x"].nan_to_num_(0.0)
    steady: Any = step.loss_fn
    calls = iter(range(100))
    assert steady is not None
    step.loss_fn = lambda batch: steady(batch) * (1.0 + 1e-3 * next(calls))
    origin = locate(step, reading)
    assert origin.reproduced is False and origin.evidence.same_bits is False


def test_tests_of_the_guard_are_not_part_of_the_trace() -> None:
    model = nn.Linear(2, 1, bias=False)
    keeper = BufferKeeper([model])
    keeper.remember()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(
        0,
        model,
        optimizer,
        {},
        keeper,
        lambda x: {"main": model(x).pow(2).mean()},
        (noise(3, 2),),
        [capture_rng()],
    )
    with untouched(step) as kept:
        traced = Replayer(step, kept).trace(0)
    calls = traced.calls
    assert traced.ran.clean and traced.ran.parts.keys() == {"main"}
    assert [c.op for c in calls if c.stage == "forward"] == ["aten.mm", "aten.pow", "aten.mean"]
    assert "aten.sum" not in {c.op for c in calls}
