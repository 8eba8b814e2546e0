"""When stored state is looked at, and what is no incident."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepguard
from guard.judging import adam, first_weight, incidents, kinds, sgd
from scenes import (
    CLASSES,
    FEATURES,
    INF,
    LOOPS,
    NAN,
    QUIET,
    Batch,
    Scene,
    bare,
    batches,
    calm_net,
    difference,
    grouped,
    plain_net,
    plain_step,
    poisoned,
    quiet,
    state_of,
)
from stepguard import Guard, Incident, TrainingHalted, watch

DATA = batches(12)


# --- when state is looked at
# ------------------------------------------------------------------------------------------


def _bad_weights() -> dict[str, Tensor]:
    weights = calm_net().state_dict()
    return {**weights, "0.weight": torch.full_like(weights["0.weight"], NAN)}


def _guarded(loop: str, scene: Scene) -> tuple[Guard, Callable[[Batch], Any]]:
    if loop == "watch":
        return stepguard.watch(scene.model, scene.optimizer, config=QUIET), lambda b: plain_step(
            scene, (b,)
        )
    guard = Guard(scene.model, scene.optimizer, config=QUIET)
    return guard, lambda b: guard.step(scene.loss_fn, b)


@pytest.mark.parametrize("loop", LOOPS)
def test_bad_weights_replaced_before_the_first_step_are_no_matter(loop: str) -> None:
    model = calm_net()
    model.load_state_dict(_bad_weights())
    guard, step = _guarded(loop, sgd(model))
    with guard:
        model.load_state_dict(calm_net().state_dict())
        step(DATA[0])
        assert guard.incidents == ()


@pytest.mark.parametrize("loop", LOOPS)
def test_bad_weights_loaded_after_the_guard_was_built_stop_the_first_step(loop: str) -> None:
    model = calm_net()
    guard, step = _guarded(loop, sgd(model))
    with guard:
        model.load_state_dict(_bad_weights())
        with pytest.raises(
            TrainingHalted, match=r"param:0\.weight was non-finite before this step"
        ):
            step(DATA[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_veto_of_the_first_step_keeps_the_statistics_that_were_loaded(loop: str) -> None:
    loaded = calm_net()
    plain_step(sgd(loaded), (DATA[0],))
    model = calm_net()
    guard, step = _guarded(loop, sgd(model))
    with guard:
        model.load_state_dict(loaded.state_dict())
        step(poisoned(DATA[1]))
        assert len(guard.incidents) == 1
    assert difference(dict(model.state_dict()), dict(loaded.state_dict())) == ""


# --- benign
# --------------------------------------------------------------------------------------------------


class Causal(nn.Module):
    """Attention with a -inf mask in a buffer, and buffers that hold Inf and NaN as sentinels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.values = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
        self.register_buffer("best", torch.tensor(INF))
        self.register_buffer("unset", torch.full((3,), NAN))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        q = self.queries(inputs)
        return (q @ q.T + self.mask).softmax(-1) @ self.values(inputs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_causal_mask_and_sentinel_buffers_are_no_incident(loop: str, fused: bool) -> None:
    assert incidents(adam(Causal(), fused=fused), loop, grouped(DATA, 1)) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_sentinel_buffers_are_not_blamed_for_a_bad_batch(loop: str, fused: bool) -> None:
    scene = adam(Causal(), fused=fused)
    found = incidents(scene, loop, [(DATA[0],), (poisoned(DATA[1]),), (DATA[2],)])
    assert kinds(found) == [(1, "nonfinite_input")]
    assert found[0].decision is not None and found[0].decision.action == "skip"
    assert scene.model.count == 2.0  # the bad forward never counted, the others did


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_buffer_that_turned_bad_during_the_run_and_feeds_the_loss_is_named(
    loop: str, fused: bool
) -> None:
    scene = adam(Causal(), fused=fused)

    def steps() -> Any:
        yield (DATA[0],)
        scene.model.count.fill_(NAN)
        if loop == "watch":
            scene.model.load_state_dict(scene.model.state_dict())
        yield (DATA[1],)
        yield (DATA[2],)

    scene.loss = lambda s, b: nn.functional.cross_entropy(s.model(b[0]), b[1]) + s.model.count * 0
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    assert halted.value.incident.reading.bad_state == ("buffer:count",)
    assert halted.value.incident.verdict.kind == "nonfinite_buffer"


def _masked_targets(scene: Scene, batch: Any) -> Tensor:
    output = scene.model(batch[0])[:, 0]
    targets = torch.tensor([1.0, NAN, 0.5, NAN])
    known = targets.isfinite()
    return (output[known] - targets[known]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "loss",
    [
        _masked_targets,
        lambda s, b: s.model(b[0]).square().mean() * 0.0,
        lambda s, b: -s.model(b[0]).square().mean() - 5.0,
        lambda s, b: s.model(b[0]).square().mean() * 1e-3 + 1e18,
        lambda s, b: s.model(b[0]).square().mean() + (100.0 if b[0][0, 0] > 0.5 else 0.0),
        lambda s, b: (
            s.model(b[0]).masked_fill(b[0][:, :3] > 0, -1e30).logsumexp(-1).clamp(-5, 5).mean()
        ),
    ],
    ids=["nan-targets-masked", "zero", "negative", "huge", "jumping", "hidden-infinity"],
)
def test_benign_losses_are_no_incident(
    loss: Callable[[Scene, Any], Tensor], loop: str, fused: bool
) -> None:
    scene = adam(plain_net(), fused=fused, loss=loss)
    assert incidents(scene, loop, grouped(DATA * 4, 1)) == []


@pytest.mark.parametrize("loop", LOOPS)
def test_buffer_that_cannot_be_written_is_no_matter(loop: str) -> None:
    model = plain_net()
    model.register_buffer("wide", torch.ones(1).expand(64))
    found = incidents(
        sgd(model), loop, [(DATA[0], DATA[1]), (poisoned(DATA[2]), DATA[3]), (DATA[4],)]
    )
    assert [incident.step for incident in found] == [1]


@pytest.mark.parametrize("loop", LOOPS)
def test_weights_that_are_mended_before_anybody_used_them_are_no_incident(loop: str) -> None:
    """The cheap look after an update sees NaN, the closer look at the next step does not: that step
    goes through.
    """

    def run(loop: Callable[..., Any]) -> tuple[Scene, Any]:
        scene = sgd(calm_net())
        weight = first_weight(scene)
        kept: list[Tensor] = []

        def spoil(*_: Any) -> None:
            kept.append(weight.detach().clone())
            weight.data.fill_(NAN)

        def steps() -> Any:
            for batch in DATA[:4]:
                yield (batch,)
                weight.data.copy_(kept.pop())

        scene.optimizer.register_step_post_hook(spoil)
        return scene, loop(scene, steps())

    guarded, found = run(LOOPS[loop])
    incidents = (
        list(found) if loop == "watch" else [r.incident for r in found if r.incident is not None]
    )
    assert incidents == []
    assert difference(state_of(guarded), state_of(run(bare)[0])) == ""


def _half_precision_run(
    mode: str, kind: str, *, fused: bool = False
) -> tuple[list[Tensor], tuple[Incident, ...]]:
    """Five steps of a float16 model whose first losses are infinite, with finite gradients."""
    torch.manual_seed(1)
    model = nn.Linear(8, 8).half()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if fused:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    masked = torch.arange(8) == 3

    def loss_fn(x: Tensor) -> Tensor | dict[str, Tensor]:
        out, target = model(x.half()), (x * 20).half()
        square = (out - target).square()
        match kind:
            case "sum":
                return square.sum()
            case "rows":
                return square.sum(1).float().mean() + square.mean()
            case "terms":
                return {
                    "error": functional.mse_loss(out, target, reduction="sum"),
                    "size": out.sum(),
                }
            case "element":
                return ((out - target) * 30).square().mean()
            case "constant":
                return square.mean() + math.inf
            case "nan":
                return square.mean() + math.nan
        logits = out.masked_fill(masked, -math.inf)
        return functional.cross_entropy(logits, torch.arange(64) % 8)

    guard = None
    if mode != "unguarded":
        guard = (Guard if mode == "step" else watch)(model, optimizer, config=quiet())
    for _ in range(5):
        x = torch.randn(64, 8)
        if guard is not None and mode == "step":
            guard.step(loss_fn, x)
            continue
        optimizer.zero_grad()
        loss = guard.loss(loss_fn, x) if guard is not None and mode == "loss" else loss_fn(x)
        (sum(loss.values()) if isinstance(loss, dict) else loss).backward()  # type: ignore[union-attr]
        optimizer.step()
    if guard is not None:
        guard.close()
    weights = [p.detach().clone() for p in model.parameters()]
    return weights, guard.incidents if guard is not None else ()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["sum", "rows", "terms"])
@pytest.mark.parametrize("mode", ["step", "watch", "loss"])
def test_loss_that_overflows_in_its_last_sum_is_a_step(mode: str, kind: str, fused: bool) -> None:
    unguarded, _ = _half_precision_run("unguarded", kind, fused=fused)
    guarded, incidents = _half_precision_run(mode, kind, fused=fused)
    assert incidents == ()
    assert all(map(torch.equal, unguarded, guarded))


@pytest.mark.parametrize("mode", ["step", "watch"])
@pytest.mark.parametrize("kind", ["nan", "target"])
def test_fused_update_with_a_nan_or_an_impossible_target_is_left_out(mode: str, kind: str) -> None:
    weights, incidents = _half_precision_run(mode, kind, fused=True)
    assert incidents and {i.verdict.kind for i in incidents} == {"nonfinite_loss"}
    assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.parametrize("kind", ["element", "constant", "nan", "target"])
def test_loss_that_is_not_finite_before_it_is_added_up_is_an_incident(kind: str) -> None:
    _, incidents = _half_precision_run("step", kind)
    assert incidents and {i.verdict.kind for i in incidents} == {"nonfinite_loss"}


@pytest.mark.parametrize("kind", ["nan", "target"])
def test_nan_or_impossible_target_of_a_watched_loop_is_an_incident(kind: str) -> None:
    _, incidents = _half_precision_run("watch", kind)
    assert incidents and {i.verdict.kind for i in incidents} == {"nonfinite_loss"}
