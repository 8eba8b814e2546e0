"""A vetoed step leaves everything as if its batch had never come, for every optimizer torch has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import stepguard
from pairwise import pairwise
from scenes import (
    LOOPS,
    NAN,
    QUIET,
    Scene,
    bare,
    batches,
    calm_net,
    difference,
    grouped,
    plain_step,
    poisoned,
    state_of,
    stepped,
)
from stepguard import ConfigError, Guard

DATA = batches(8)
SPECIAL: dict[str, dict[str, Any]] = {
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "SparseAdam": {"lr": 0.1},
}
CLASSES = sorted(
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, SPECIAL.get(name, {"lr": 0.05})) for name in CLASSES},
    **{
        f"{name}-foreach": (name, {"lr": 0.05, "foreach": True})
        for name in ("SGD", "Adam", "AdamW", "RMSprop")
    },
    **{
        f"{name}-fused": (name, {"lr": 0.05, "fused": True})
        for name in ("SGD", "Adam", "AdamW", "Adagrad")
    },
    "SGD-momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam-amsgrad": ("Adam", {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "LBFGS-wolfe": ("LBFGS", {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}),
}
HOW = {"plain": (0, 3, 8), "scaler": (0, 3, 8), "accumulated": (0, 1, 2)}
"""Where the bad step may come: first, in the middle, last."""
WAYS = [
    (variant, loop, place, how)
    for variant, loop, place, how in product(VARIANTS, LOOPS, range(3), HOW)
    if how != "scaler" or not variant.startswith("LBFGS")  # GradScaler refuses closures
]


class Words(nn.Module):
    """Sparse gradients; the input is a set of rows and a factor that may be bad."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 4, sparse=True)

    def forward(self, batch: Any) -> Tensor:
        rows = (batch[0].nan_to_num()[:, :3].abs() * 4).long().clamp(max=11)
        return self.table(rows).sum(1) + batch[0][:, :1]


def _word_loss(scene: Scene, batch: Any) -> Tensor:
    return scene.model(batch).square().mean()


def _scene(variant: str, *, scaled: bool = False) -> Scene:
    name, settings = VARIANTS[variant]
    model = Words() if name == "SparseAdam" else calm_net()
    optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3) if scaled else None
    ema = AveragedModel(model, use_buffers=True) if name != "LBFGS" else None
    loss = _word_loss if name == "SparseAdam" else None
    autocast = torch.float16 if scaled else None
    return Scene(model, optimizer, scheduler, scaler, autocast=autocast, ema=ema, loss=loss)


def _end(
    make: Callable[[], Scene], loop: Callable[..., Any], steps: list[tuple[Any, ...]]
) -> dict[str, Any]:
    scene = make()
    loop(scene, steps)
    return state_of(scene)


def _assert_never_came(make: Callable[[], Scene], loop: str, at: int, *, micro: int = 1) -> None:
    """Run with a step of bad batches at `at` and without that step: the same end."""
    good = grouped(DATA, micro)
    bad = tuple(poisoned(batch) for batch in good[0])
    assert (
        difference(_end(make, LOOPS[loop], [*good[:at], bad, *good[at:]]), _end(make, bare, good))
        == ""
    )


def test_every_optimizer_of_torch_is_here() -> None:
    assert len(CLASSES) >= 15 and {"Muon", "Adafactor", "LBFGS", "SparseAdam"} <= set(CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "loop", "place", "how"), pairwise(WAYS))
def test_bad_batch_never_came(variant: str, loop: str, place: int, how: str) -> None:
    micro = 4 if how == "accumulated" else 1
    make = partial(_scene, variant, scaled=how == "scaler")
    _assert_never_came(make, loop, HOW[how][place], micro=micro)


# --- one bad micro-batch
# --------------------------------------------------------------------------------------------


def _renormalised(scene: Scene, good: list[Any], count: int) -> None:
    """The reference: only the good micro-batches, their gradients multiplied by count / good."""
    scene.optimizer.zero_grad(set_to_none=True)
    for batch in good:
        loss = scene.loss_fn(batch)
        (scene.scaler.scale(loss) if scene.scaler is not None else loss).backward()
    if scene.scaler is not None:
        scene.scaler.unscale_(scene.optimizer)
    for parameter in scene.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(count / len(good))
    if scene.scaler is not None:
        scene.scaler.step(scene.optimizer)
        scene.scaler.update()
    else:
        scene.optimizer.step()
    assert scene.scheduler is not None
    scene.scheduler.step()
    if scene.ema is not None:
        scene.ema.update_parameters(scene.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "scaled", "bad"),
    pairwise(
        product(
            ["SGD", "AdamW", "AdamW-fused", "Adafactor", "Muon", "SparseAdam"],
            [False, True],
            [(0,), (2,), (1, 3)],
        )
    ),
)
def test_bad_micro_batches_are_left_out_and_the_rest_renormalised(
    variant: str, scaled: bool, bad: tuple[int, ...]
) -> None:
    before, after = DATA[:2], DATA[6:]
    micro = [(b[0] * NAN, b[1]) if i in bad else b for i, b in enumerate(DATA[2:6])]
    guarded, reference = _scene(variant, scaled=scaled), _scene(variant, scaled=scaled)
    results = stepped(guarded, [*grouped(before, 1), tuple(micro), *grouped(after, 1)])
    bare(reference, grouped(before, 1))
    _renormalised(reference, [b for i, b in enumerate(micro) if i not in bad], len(micro))
    bare(reference, grouped(after, 1))
    assert difference(state_of(guarded), state_of(reference)) == ""
    assert results[2].committed and results[2].incident is not None
    assert results[2].incident.reading.bad_micro_batches == bad


def test_left_out_micro_batch_draws_the_same_random_numbers_for_the_rest() -> None:
    def noisy() -> Scene:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
        nn.init.ones_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        return Scene(model, torch.optim.SGD(model.parameters(), lr=0.1))

    guarded, reference = noisy(), noisy()
    torch.manual_seed(5)
    stepped(guarded, [(DATA[0], (DATA[1][0] * NAN, DATA[1][1]), DATA[2])])
    end = torch.get_rng_state()
    torch.manual_seed(5)
    reference.loss_fn(DATA[0]).backward()
    reference.loss_fn(DATA[1])  # drawn for, and left out
    reference.loss_fn(DATA[2]).backward()
    assert torch.equal(torch.get_rng_state(), end)
    for parameter in reference.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(3 / 2)
    reference.optimizer.step()
    assert difference(state_of(guarded), state_of(reference)) == ""


# --- what a step leaves behind
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["SGD", "AdamW-fused"])
def test_gradients_are_still_there_after_a_healthy_step(variant: str) -> None:
    scene = _scene(variant)
    expected = _scene(variant)
    expected.loss_fn(DATA[0]).backward()
    stepped(scene, [(DATA[0],)])
    assert difference(_grads(scene), _grads(expected)) == ""


@pytest.mark.parametrize("variant", ["SGD", "AdamW-fused", "LBFGS"])
@pytest.mark.parametrize("loop", LOOPS)
def test_bad_gradients_are_still_there_after_the_veto(variant: str, loop: str) -> None:
    scene = _scene(variant)
    LOOPS[loop](scene, [(poisoned(DATA[0]),)])
    assert all(grad is not None and not grad.isfinite().all() for grad in _grads(scene))


def _grads(scene: Scene) -> list[Tensor | None]:
    return [parameter.grad for parameter in scene.model.parameters()]


@pytest.mark.parametrize("variant", ["SGD", "AdamW-fused"])
def test_user_exception_passes_through_and_leaves_the_guard_usable(variant: str) -> None:
    scene, reference = _scene(variant), _scene(variant)
    interrupted = [True]

    def loss_fn(batch: Any) -> Tensor:
        if interrupted and batch is DATA[2]:
            interrupted.clear()
            raise KeyError("the user's own")
        return scene.loss_fn(batch)

    with Guard(scene.model, scene.optimizer, config=QUIET, **scene.close_over()) as guard:
        guard.step(loss_fn, DATA[0], DATA[1])
        with pytest.raises(KeyError, match="the user's own"):
            guard.step(loss_fn, DATA[2])
        assert guard.step(loss_fn, DATA[2]).committed
        assert guard.armed and [i.verdict.kind for i in guard.incidents] == ["exception"]
    scene.ema = reference.ema = None
    bare(reference, [(DATA[0], DATA[1]), (DATA[2],)])
    assert difference(state_of(scene), state_of(reference)) == ""


class _Torn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("in backward")


@pytest.mark.parametrize("variant", ["SGD", "AdamW-fused"])
def test_user_exception_in_backward_leaves_a_watched_loop_usable(variant: str) -> None:
    scene = _scene(variant)
    scene.ema = None
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET) as guard:
        plain_step(scene, (DATA[0],))
        with pytest.raises(KeyError, match="in backward"):
            (_Torn.apply(scene.loss_fn(DATA[1])) * NAN).backward()
        plain_step(scene, (DATA[2],))
        assert guard.armed and [i.verdict.kind for i in guard.incidents] == ["exception"]


# --- what a step returns
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["SGD", "AdamW-fused", "LBFGS"])
def test_result_carries_the_exact_loss_and_norm(variant: str) -> None:
    scene, other = _scene(variant), _scene(variant)
    result = stepped(scene, [tuple(DATA[:3])])[0]
    losses = []
    for batch in DATA[:3]:
        loss = other.loss_fn(batch)
        loss.backward()
        losses.append(loss.item())
    assert result.loss == sum(losses)
    assert result.grad_norm == nn.utils.get_total_norm(_grads(other)).item()


def test_loss_under_a_scaler_is_reported_unscaled() -> None:
    scene, other = _scene("SGD", scaled=True), _scene("SGD", scaled=True)
    result = stepped(scene, [(DATA[0],)])[0]
    assert result.loss == other.loss_fn(DATA[0]).item()


def test_named_losses_are_added_and_told_apart() -> None:
    scene = _scene("SGD")

    def loss_fn(batch: Any) -> dict[str, Tensor]:
        logits = scene.model(batch[0])
        named = {
            "text": nn.functional.cross_entropy(logits, batch[1]),
            "size": logits.square().mean(),
        }
        return {**named, "late": logits.sum() * 0.0} if batch is DATA[1] else named

    with Guard(scene.model, scene.optimizer, config=QUIET) as guard:
        reading = guard.step(loss_fn, DATA[0], DATA[1])._read()
        assert reading is not None and list(reading.components) == ["text", "size", "late"]
        assert reading.loss == pytest.approx(sum(reading.components.values()), rel=1e-6)
        bad = guard.step(
            lambda b: {"fine": loss_fn(b)["text"], "broken": loss_fn(b)["size"] * NAN}, DATA[2]
        )
    assert bad.incident is not None and "broken" in bad.incident.verdict.summary
    assert "fine" not in bad.incident.verdict.summary


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (torch.zeros(4, 2, requires_grad=True), r"\(4, 2\)"),
        (1.5, "float"),
        (None, "NoneType"),
        ({}, "empty dict"),
        ({"a": torch.zeros(3, requires_grad=True)}, r"\(3,\)"),
        ({"a": torch.zeros(()), "b": None}, "'b'.*NoneType"),
        ((torch.zeros(()), torch.zeros(())), "tuple"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_loss_that_is_no_scalar_is_one_clear_error(output: Any, words: str) -> None:
    scene = _scene("SGD")
    with Guard(scene.model, scene.optimizer, config=QUIET) as guard:
        with pytest.raises(ConfigError, match=f"loss_fn returned .*{words}") as caught:
            guard.step(lambda batch: output, DATA[0])
        assert caught.value.__cause__ is None and guard.armed
        assert guard.step(scene.loss_fn, DATA[0]).committed


def test_step_without_a_batch_is_one_clear_error() -> None:
    scene = _scene("SGD")
    with (
        Guard(scene.model, scene.optimizer, config=QUIET) as guard,
        pytest.raises(ConfigError, match="no batch"),
    ):
        guard.step(scene.loss_fn)


def test_closed_guard_takes_no_step() -> None:
    scene = _scene("SGD")
    guard = Guard(scene.model, scene.optimizer, config=QUIET)
    guard.close()
    guard.close()
    with pytest.raises(ConfigError, match="closed"):
        guard.step(scene.loss_fn, DATA[0])


# --- schedules of every kind
# -----------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1.0 / (i + 1)),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[3],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.5, 4),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ]
    ),
}


@pytest.mark.parametrize("variant", ["SGD", "AdamW-fused"])
def test_watched_step_with_one_bad_micro_batch_never_came(variant: str) -> None:
    good = grouped(DATA[:4], 2)
    spoilt = (DATA[4], poisoned(DATA[5]))
    expected = _end(lambda: _scene(variant), bare, good)
    assert (
        difference(
            _end(lambda: _scene(variant), LOOPS["watch"], [good[0], spoilt, good[1]]), expected
        )
        == ""
    )
