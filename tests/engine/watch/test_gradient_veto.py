"""A vetoed step leaves everything as if its batch had never come: for every optimizer torch has,
for several at once, and for one after another.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import stepguard
from guard.optimizers import Muon
from pairwise import pairwise
from scenes import (
    CLASSES,
    FEATURES,
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
    stepped,
)
from stepguard import ConfigError, Guard, GuardConfig, WiringWarning, watch
from stepguard.run.guarded_script import AutomaticGuards

DATA = batches(8)
SPECIAL: dict[str, dict[str, Any]] = {
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "SparseAdam": {"lr": 0.1},
}
TORCHS = sorted(
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, SPECIAL.get(name, {"lr": 0.05})) for name in TORCHS},
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
    assert len(TORCHS) >= 15 and {"Muon", "Adafactor", "LBFGS", "SparseAdam"} <= set(TORCHS)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "loop", "place", "how"), pairwise(WAYS))
def test_bad_batch_never_came(variant: str, loop: str, place: int, how: str) -> None:
    micro = 4 if how == "accumulated" else 1
    make = partial(_scene, variant, scaled=how == "scaler")
    _assert_never_came(make, loop, HOW[how][place], micro=micro)


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
            ["AdamW", "AdamW-fused", "Muon", "SparseAdam"],
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
    for gradient in _grads(reference):
        assert gradient is not None
        gradient.mul_(3 / 2)
    reference.optimizer.step()
    assert difference(state_of(guarded), state_of(reference)) == ""


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(
    ("schedule", "loop", "fused", "held"),
    pairwise(product(SCHEDULES, LOOPS, [False, True], ["float", "tensor"])),
)
def test_schedule_waits_for_a_real_update(schedule: str, loop: str, fused: bool, held: str) -> None:
    rate: Any = 0.05 if held == "float" else torch.tensor(0.05)

    def make() -> Scene:
        model = plain_net()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=copy.deepcopy(rate), fused=fused, foreach=False
        )
        return Scene(model, optimizer, SCHEDULES[schedule](optimizer))

    _assert_never_came(make, loop, 4)


@pytest.mark.parametrize("fused", [False, True])
def test_schedule_that_moves_once_an_epoch_is_not_held(fused: bool) -> None:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scene = Scene(model, optimizer)
    with stepguard.watch(model, optimizer, scheduler=scheduler, config=QUIET):
        for epoch in range(3):
            for index in range(4):
                plain_step(scene, (poisoned(DATA[0]) if index == 3 else DATA[index],))
            scheduler.step()
            assert scheduler.last_epoch == epoch + 1
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8


# --- several optimizers of one backward pass update together or not at all


THIRTY = batches(30)
BAD = 4
Halves = tuple[nn.Sequential, list[Optimizer]]


def halves(kinds: tuple[str, str]) -> Halves:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 8, bias=False),
        nn.BatchNorm1d(8, affine=False),
        nn.ReLU(),
        nn.Linear(8, CLASSES, bias=False),
    )
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "muon": Muon,
    }
    return model, [
        makers[kind](model[index].parameters()) for kind, index in zip(kinds, (0, 3), strict=True)
    ]


def one_step(
    model: nn.Sequential, optimizers: list[Optimizer], batch: Batch, bad_half: int | None
) -> None:
    """A NaN gradient that reaches one half only: the root of exactly 0, times 0."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    if bad_half is not None:
        loss = loss + (model[(0, 3)[bad_half]].weight * 0).square().sum().sqrt()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    states = {str(i): o.state_dict()["state"] for i, o in enumerate(optimizers)}
    return {"model": {k: v.clone() for k, v in model.state_dict().items()}, **states}


PAIRS = [("sgd", "adam"), ("muon", "adam"), ("fused", "fused"), ("fused", "sgd"), ("sgd", "fused")]


@pytest.mark.parametrize("bad_half", [0, 1], ids=["first", "second"])
def test_already_the_first_step_is_decided_together(bad_half: int) -> None:
    model, optimizers = halves(("sgd", "adam"))
    before = state(model, optimizers)
    guards = [stepguard.watch(model, optimizer, config=QUIET) for optimizer in optimizers]
    one_step(model, optimizers, THIRTY[0], bad_half)
    for guard in guards:
        guard.close()
    assert difference(state(model, optimizers), before) == ""


@pytest.mark.parametrize("hurt", [0, 3], ids=["first", "second"])
def test_damaged_weight_takes_both_back_together(hurt: int) -> None:
    model, optimizers = halves(("sgd", "adam"))
    settings = quiet(snapshot_every=4, probation=4)
    guards = [stepguard.watch(model, optimizer, config=settings) for optimizer in optimizers]
    then: list[dict[str, Any]] = []
    for index, batch in enumerate(THIRTY[:23]):
        then.append(copy.deepcopy(state(model, optimizers)))
        if index == 22:
            with torch.no_grad():
                model[hurt].weight[0, 0] = torch.nan
        one_step(model, optimizers, batch, None)
    actions = {
        i.decision.action for guard in guards for i in guard.incidents if i.decision is not None
    }
    steps = [guard.steps for guard in guards]
    for guard in guards:
        guard.close()
    assert actions == {"rewind"}
    assert steps in ([16, 16], [20, 20])
    assert difference(state(model, optimizers), then[steps[0]]) == ""


class Game(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(FEATURES, 4), nn.Linear(4, 1)

    def forward(self, noise: Tensor, *, detach: bool = False) -> Tensor:
        made = self.maker(noise)
        return self.judge(made.detach() if detach else made)


def play(game: Game, judge: Optimizer, maker: Optimizer, batch: Batch, *, bad: str = "") -> None:
    judge.zero_grad()
    score = game(batch[0] * (torch.nan if bad == "judge" else 1.0), detach=True)
    (score - 1).square().mean().backward()
    judge.step()
    maker.zero_grad()
    loss = (game(batch[0]) + 1).square().mean()
    if bad == "junk":  # NaN in the gradients of the judge, which its own zero_grad will drop
        loss = loss + (game.judge.weight * 0).square().sum().sqrt()
    loss.backward()
    maker.step()


@pytest.mark.parametrize("bad", ["judge", "junk"])
def test_veto_of_one_player_does_not_touch_the_other(bad: str) -> None:
    def run(guarded: bool) -> tuple[Game, list[Guard]]:
        game = Game()
        judge, maker = (
            torch.optim.SGD(net.parameters(), lr=0.1) for net in (game.judge, game.maker)
        )
        guards = [stepguard.watch(game, o, config=QUIET) for o in (judge, maker)] if guarded else []
        for index, batch in enumerate(THIRTY[:8]):
            if index == BAD and bad == "judge" and not guarded:
                # what should happen: the judge's half of this round never came
                maker.zero_grad()
                (game(batch[0]) + 1).square().mean().backward()
                maker.step()
            else:
                play(game, judge, maker, batch, bad=bad if index == BAD else "")
        for guard in guards:
            guard.close()
        return game, guards

    game, guards = run(guarded=True)
    reference, _ = run(guarded=False)
    assert [guard.steps for guard in guards] == [8, 8]
    found = [[incident.step for incident in guard.incidents] for guard in guards]
    assert found == ([[BAD], []] if bad == "judge" else [[], []])
    assert difference(dict(game.state_dict()), dict(reference.state_dict())) == ""


def test_rewind_of_one_player_leaves_the_other_where_it_is() -> None:
    game = Game()
    judge, maker = (torch.optim.SGD(net.parameters(), lr=0.01) for net in (game.judge, game.maker))
    settings = quiet(snapshot_every=4, probation=4)
    mine, other = (stepguard.watch(game, o, config=settings) for o in (maker, judge))
    for batch in THIRTY[:20]:
        play(game, judge, maker, batch)
    with torch.no_grad():
        game.maker.weight[0, 0] = torch.nan
    maker.zero_grad()
    untouched = game.judge.weight.detach().clone()
    (game(THIRTY[20][0]) + 1).square().mean().backward()
    maker.step()
    rewound = [i.decision.action for i in mine.incidents if i.decision is not None]
    mine.close()
    other.close()
    assert rewound == ["rewind"]
    assert bool(game.maker.weight.isfinite().all())
    assert torch.equal(game.judge.weight, untouched)


def test_optimizers_inside_the_backward_keep_nan_out_and_no_copies_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}
    guards = [
        stepguard.watch(model, o, config=quiet(snapshot_every=2)) for o in optimizers.values()
    ]

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for index, batch in enumerate(THIRTY[:12]):
        given = poisoned(batch) if index == 6 else batch
        before = {name: value.clone() for name, value in model.state_dict().items()}
        nn.functional.cross_entropy(model(given[0]), given[1]).backward()
        assert (difference(dict(model.state_dict()), before) == "") is (index == 6)
    assert all(not guard._rewinder.snapshots.ring.snapshots for guard in guards)
    for handle in handles:
        handle.remove()
    for guard in guards:
        guard.close()


# --- a new optimizer, and parts of the model that are replaced


STAGES = ["same", "head", "subset", "superset", "disjoint", "lbfgs", "fused"]
NEW_AT = 6


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def _first(model: nn.Sequential, stage: str) -> Optimizer:
    part = model[3] if stage in ("superset", "disjoint") else model
    return torch.optim.Adam(part.parameters(), lr=1e-3)


def _second(model: nn.Sequential, stage: str) -> Optimizer:
    if stage == "head":
        torch.manual_seed(5)
        model[3] = nn.Linear(16, 3)
    if stage == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=2)
    part = {"subset": model[3], "disjoint": model[0]}.get(stage, model)
    return torch.optim.AdamW(part.parameters(), lr=1e-2, fused=stage == "fused")


def _evaluate(model: nn.Module, optimizer: Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _train(
    stage: str, *, guarded: bool, bad: int | None = None, **settings: Any
) -> tuple[nn.Sequential, Guard | None, Optimizer]:
    model = _net()
    optimizer = _first(model, stage)
    guard = watch(model, optimizer, config=quiet(**settings)) if guarded else None
    for index in range(14):
        if index == NEW_AT:
            optimizer = _second(model, stage)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(index))
        labels = x[:, :3].argmax(1)
        if index == bad:
            x[3, 2] = math.nan

        evaluate = partial(_evaluate, model, optimizer, x, labels)
        if stage == "lbfgs" and index >= NEW_AT:
            optimizer.step(evaluate)  # type: ignore[arg-type]
        else:
            evaluate()
            optimizer.step()
    return model, guard, optimizer


def test_rewind_does_not_go_back_to_a_state_of_the_optimizer_before(tmp_path: Path) -> None:
    settings = {"snapshot_every": 2, "probation": 1, "snapshots": 8, "checkpoint_every": 2}
    model, guard, _ = _train("head", guarded=True, run_dir=tmp_path, **settings)
    assert guard is not None
    with torch.no_grad():
        model[3].weight.fill_(math.nan)
    x = torch.randn(16, 6)
    _evaluate(model, guard.optimizer, x, x[:, :3].argmax(1))
    guard.optimizer.step()
    guard.close()
    decision = guard.incidents[-1].decision
    assert decision is not None and decision.action == "rewind"
    assert decision.rewound_to is not None and decision.rewound_to > NEW_AT
    assert bool(model[3].weight.isfinite().all())


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)


def _of_parts(pair: _Pair) -> dict[str, Optimizer]:
    parts = {"one": pair.one, "two": pair.two}
    return {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in parts.items()}


def _turns(pair: _Pair, optimizers: dict[str, Optimizer], order: list[str]) -> None:
    for name in order:
        optimizers[name].zero_grad()
        loss: Tensor = getattr(pair, name)(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizers[name].step()


def test_other_optimizers_of_the_process_are_left_alone() -> None:
    torch.manual_seed(0)
    pair, elsewhere = _Pair(), _Pair()
    optimizers, theirs = _of_parts(pair), _of_parts(elsewhere)
    with watch(pair, optimizers["one"], config=quiet()) as guard:
        _turns(pair, optimizers, ["one", "two"] * 6)
        _turns(elsewhere, theirs, ["one", "two"] * 6)
        assert guard.optimizer is optimizers["one"] and guard.steps == 6
        assert not guard._context.incidents


def test_each_of_two_guards_keeps_its_optimizer() -> None:
    torch.manual_seed(0)
    pair = _Pair()
    optimizers = {name: torch.optim.SGD(pair.parameters(), 0.1) for name in ("one", "two")}
    with (
        watch(pair, optimizers["one"], config=quiet()) as one,
        watch(pair, optimizers["two"], config=quiet()) as two,
    ):
        _turns(pair, optimizers, ["one"] * 5 + ["two", "one"] * 3)
        assert (one.optimizer, two.optimizer) == (optimizers["one"], optimizers["two"])
        assert (one.steps, two.steps) == (8, 3)


def test_guard_that_is_never_closed_does_not_keep_its_model() -> None:
    model = _net()
    Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quiet())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_checkpoint_holds_the_replaced_part(tmp_path: Path) -> None:
    model, guard, _ = _train("head", guarded=True, run_dir=tmp_path)
    assert guard is not None and guard.save() is not None
    head = model[3].weight.detach().clone()
    with torch.no_grad():
        model[3].weight.zero_()
    assert guard.restore() == 14
    assert torch.equal(model[3].weight, head)
    guard.close()


def test_optimizers_of_an_inner_loop_are_taken_for_turns_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = _Pair()
    outer = torch.optim.SGD(pair.parameters(), 0.1)
    with watch(pair, outer, config=quiet(run_dir=tmp_path)) as guard:
        for _ in range(5):
            inner = torch.optim.SGD(pair.parameters(), 0.01)
            _turns(pair, {"one": inner}, ["one", "one"])
            _turns(pair, {"two": outer}, ["two"])
            assert guard.optimizer is outer
    assert (tmp_path / "journal.jsonl").read_text().count("take turns on this model") == 1


def test_clipping_of_the_guard_goes_over_to_the_new_optimizer() -> None:
    model, guard, optimizer = _train("same", guarded=True, clip_norm=1e-3)
    assert guard is not None
    x = torch.randn(16, 6)
    _evaluate(model, optimizer, x, x[:, :3].argmax(1))
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    guard.close()
    assert float(nn.utils.get_total_norm(gradients)) <= 1.001e-3


def test_part_that_the_optimizer_of_guard_step_does_not_hold_is_told() -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    with Guard(model, optimizer, config=quiet()) as guard:
        guard.step(loss_fn, torch.randn(16, 6))
        model[3] = nn.Linear(16, 3)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(WiringWarning, match=r"3\.weight, 3\.bias of the model replaced"):
            guard.step(loss_fn, torch.randn(16, 6))
        loss_fn(torch.randn(16, 6)).backward()
        with pytest.warns(WiringWarning, match="its updates are not guarded"):
            other.step()


def test_run_keeps_one_guard_for_one_optimizer_after_another() -> None:
    model = _net()
    with AutomaticGuards(GuardConfig(terminal="quiet"), print) as automatic:
        for _ in range(3):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(16, 6)).square().mean().backward()
                optimizer.step()
        (guard,) = automatic.guards
        assert guard.optimizer is optimizer and guard.steps == 12


def test_guard_that_is_closed_or_given_no_batch_is_one_clear_error() -> None:
    scene = _scene("SGD")
    guard = Guard(scene.model, scene.optimizer, config=QUIET)
    with pytest.raises(ConfigError, match="no batch"):
        guard.step(scene.loss_fn)
    guard.close()
    guard.close()
    with pytest.raises(ConfigError, match="closed"):
        guard.step(scene.loss_fn, DATA[0])


@pytest.mark.parametrize("bad_half", [0, 1, None], ids=["first", "second", "loss"])
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_gradient_that_is_bad_in_one_half_vetoes_both(
    kinds: tuple[str, str], bad_half: int | None
) -> None:
    model, optimizers = halves(kinds)
    guards = [stepguard.watch(model, optimizer, config=QUIET) for optimizer in optimizers]
    for index, batch in enumerate(THIRTY[:8]):
        bad = index == BAD
        given = poisoned(batch) if bad and bad_half is None else batch
        one_step(model, optimizers, given, bad_half if bad else None)
    found = [[incident.step for incident in guard.incidents] for guard in guards]
    steps = [guard.steps for guard in guards]
    for guard in guards:
        guard.close()
    # where the first verdict stays on the device, the second finds the bad loss by itself
    again = kinds[0] == "fused" if bad_half is None else bad_half == 1
    assert found == [[] if bad_half == 1 else [BAD], [BAD] if again else []]
    assert steps == [8, 8]
    reference, theirs = halves(kinds)
    for index, batch in enumerate(THIRTY[:8]):
        if index != BAD:
            one_step(reference, theirs, batch, None)
    assert difference(state(model, optimizers), state(reference, theirs)) == ""


@pytest.mark.parametrize("bad", [None, NEW_AT, 10], ids=["healthy", "first", "later"])
@pytest.mark.parametrize("stage", STAGES)
def test_new_optimizer_is_guarded_and_a_healthy_run_stays_as_it_is(
    stage: str, bad: int | None
) -> None:
    model, guard, optimizer = _train(stage, guarded=True, bad=bad)
    assert guard is not None and guard.optimizer is optimizer
    guard.close()
    if bad is not None:
        assert [(i.step, i.verdict.bad) for i in guard.incidents] == [(bad, True)]
        assert all(bool(p.isfinite().all()) for p in model.state_dict().values())
        return
    unguarded, _, _ = _train(stage, guarded=False)
    assert (guard.steps, guard.incidents) == (14, ())
    assert difference(model.state_dict(), unguarded.state_dict()) == ""
