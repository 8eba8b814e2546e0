"""Several optimizers that step from one backward pass update together or not at all; players that
take turns do not.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import stepguard
from guard.optimizers import Muon
from scenes import CLASSES, FEATURES, QUIET, Batch, batches, difference, poisoned, quiet
from stepguard import Guard

DATA = batches(30)
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
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_gradient_that_is_bad_in_one_half_vetoes_both(
    kinds: tuple[str, str], bad_half: int
) -> None:
    model, optimizers = halves(kinds)
    guards = [stepguard.watch(model, optimizer, config=QUIET) for optimizer in optimizers]
    for index, batch in enumerate(DATA[:8]):
        one_step(model, optimizers, batch, bad_half if index == BAD else None)
    found = [[incident.step for incident in guard.incidents] for guard in guards]
    steps = [guard.steps for guard in guards]
    for guard in guards:
        guard.close()
    assert found == [[BAD] if index == bad_half else [] for index in range(2)]
    assert steps == [8, 8]
    reference, theirs = halves(kinds)
    for index, batch in enumerate(DATA[:8]):
        if index != BAD:
            one_step(reference, theirs, batch, None)
    assert difference(state(model, optimizers), state(reference, theirs)) == ""


@pytest.mark.parametrize("bad_half", [0, 1], ids=["first", "second"])
def test_already_the_first_step_is_decided_together(bad_half: int) -> None:
    model, optimizers = halves(("sgd", "adam"))
    before = state(model, optimizers)
    guards = [stepguard.watch(model, optimizer, config=QUIET) for optimizer in optimizers]
    one_step(model, optimizers, DATA[0], bad_half)
    for guard in guards:
        guard.close()
    assert difference(state(model, optimizers), before) == ""


def test_healthy_pair_is_the_bare_one() -> None:
    (model, optimizers), (bare, theirs) = halves(("muon", "adam")), halves(("muon", "adam"))
    guards = [stepguard.watch(model, optimizer, config=QUIET) for optimizer in optimizers]
    for batch in DATA:
        one_step(model, optimizers, batch, None)
        one_step(bare, theirs, batch, None)
    for guard in guards:
        guard.close()
    assert difference(state(model, optimizers), state(bare, theirs)) == ""


@pytest.mark.parametrize("hurt", [0, 3], ids=["first", "second"])
def test_damaged_weight_takes_both_back_together(hurt: int) -> None:
    model, optimizers = halves(("sgd", "adam"))
    settings = quiet(snapshot_every=4, probation=4)
    guards = [stepguard.watch(model, optimizer, config=settings) for optimizer in optimizers]
    then: list[dict[str, Any]] = []
    for index, batch in enumerate(DATA[:23]):
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


# --- players that take turns
# ---------------------------------------------------------------------------------------


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
    def run(guarded: bool) -> tuple[Game, list[int], list[list[int]]]:
        game = Game()
        judge, maker = (
            torch.optim.SGD(net.parameters(), lr=0.1) for net in (game.judge, game.maker)
        )
        guards = [stepguard.watch(game, o, config=QUIET) for o in (judge, maker)] if guarded else []
        for index, batch in enumerate(DATA[:8]):
            if guarded or not (bad == "judge" and index == BAD):
                play(
                    game,
                    judge,
                    maker,
                    batch,
                    bad=bad if index == BAD and (guarded or bad == "junk") else "",
                )
            else:  # what should happen: the judge's half of this round never came
                maker.zero_grad()
                (game(batch[0]) + 1).square().mean().backward()
                maker.step()
        found = [[incident.step for incident in guard.incidents] for guard in guards]
        for guard in guards:
            guard.close()
        return game, [guard.steps for guard in guards], found

    game, steps, found = run(guarded=True)
    reference, _, _ = run(guarded=False)
    assert steps == [8, 8]
    assert found == ([[BAD], []] if bad == "judge" else [[], []])
    assert difference(dict(game.state_dict()), dict(reference.state_dict())) == ""


def test_rewind_of_one_player_leaves_the_other_where_it_is() -> None:
    game = Game()
    judge, maker = (torch.optim.SGD(net.parameters(), lr=0.01) for net in (game.judge, game.maker))
    settings = quiet(snapshot_every=4, probation=4)
    mine, other = (stepguard.watch(game, o, config=settings) for o in (maker, judge))
    for batch in DATA[:20]:
        play(game, judge, maker, batch)
    with torch.no_grad():
        game.maker.weight[0, 0] = torch.nan
    maker.zero_grad()
    untouched = game.judge.weight.detach().clone()
    (game(DATA[20][0]) + 1).square().mean().backward()
    maker.step()
    rewound = [i.decision.action for i in mine.incidents if i.decision is not None]
    mine.close()
    other.close()
    assert rewound == ["rewind"]
    assert bool(game.maker.weight.isfinite().all())
    assert torch.equal(game.judge.weight, untouched)


# --- an optimizer for each parameter, stepped inside the backward pass
# ---------------------------------------------


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
    for index, batch in enumerate(DATA[:12]):
        given = poisoned(batch) if index == 6 else batch
        before = {name: value.clone() for name, value in model.state_dict().items()}
        nn.functional.cross_entropy(model(given[0]), given[1]).backward()
        assert (difference(dict(model.state_dict()), before) == "") is (index == 6)
    assert all(not guard._rewinder.snapshots.ring.snapshots for guard in guards)
    for handle in handles:
        handle.remove()
    for guard in guards:
        guard.close()


def test_scaler_that_nobody_handed_over_is_found() -> None:
    """A fused optimizer divides by the scale in its kernel: calibration is no incident, the loss is
    the real one.
    """

    def run(guarded: bool) -> tuple[nn.Module, list[float], Guard | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)
        guard = stepguard.watch(model, optimizer, config=QUIET) if guarded else None
        scales = []
        for batch in DATA:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(batch[0])
            scaler.scale(8 * nn.functional.cross_entropy(out.float(), batch[1])).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return model, scales, guard

    (model, scales, guard), (bare, theirs, _) = run(guarded=True), run(guarded=False)
    assert guard is not None
    found, losses = guard.incidents, list(guard._context.history.losses)
    guard.close()
    assert found == ()
    assert min(scales) < 2.0**18, "the scale must have overflowed for this test to say anything"
    assert scales == theirs
    assert max(losses) < 100
    assert difference(dict(model.state_dict()), dict(bare.state_dict())) == ""
