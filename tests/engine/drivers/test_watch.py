"""`watch` protects a loop that stays as it is, and leaves nothing on the user's objects."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad

import stepguard
from scenes import (
    FEATURES,
    NAN,
    QUIET,
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
    watched,
)
from stepguard import ConfigError, Guard
from stepguard.journal import read_run

DATA = batches(12)


def _sgd(model: nn.Module, lr: float = 0.05) -> Scene:
    return Scene(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def _fused(model: nn.Module) -> Scene:
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


def _losses(folder: Path) -> list[Any]:
    return [line.get("loss") for line in read_run(folder).steps]


# --- loops people write
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [_sgd, _fused])
@pytest.mark.parametrize("keyword", [False, True])
def test_step_with_a_closure(make: Callable[[nn.Module], Scene], keyword: bool) -> None:
    scene, reference = make(calm_net()), make(calm_net())
    returned = []
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET) as guard:
        for batch in (DATA[0], poisoned(DATA[1]), DATA[2]):

            def closure(batch: Any = batch) -> Tensor:
                scene.optimizer.zero_grad()
                loss: Tensor = scene.loss_fn(batch)
                loss.backward()
                return loss

            out: Any = (
                scene.optimizer.step(closure=closure) if keyword else scene.optimizer.step(closure)
            )
            returned.append(float(out.detach()))
        assert [i.step for i in guard.incidents] == [1]
    bare(reference, grouped([DATA[0], DATA[2]], 1))
    assert difference(state_of(scene), state_of(reference)) == ""
    assert returned[1] != returned[1] and returned[0] == returned[0]


def test_loss_of_several_backwards_is_their_sum(tmp_path: Path) -> None:
    scene = _sgd(plain_net())
    with stepguard.watch(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)):
        scene.optimizer.zero_grad()
        parts = []
        for batch in DATA[:3]:
            loss = scene.loss_fn(batch) / 3
            loss.backward()
            parts.append(loss.item())
        scene.optimizer.step()
    assert _losses(tmp_path) == [sum(parts)]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_loss_whose_gradients_were_dropped_is_part_of_no_update(
    set_to_none: bool, tmp_path: Path
) -> None:
    scene = _sgd(plain_net())
    with stepguard.watch(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        plain_step(scene, (DATA[0],))
        (scene.loss_fn(DATA[1]) * NAN).backward()  # the user sees it and leaves the batch out
        scene.optimizer.zero_grad(set_to_none=set_to_none)
        loss = scene.loss_fn(DATA[2])
        loss.backward()
        scene.optimizer.step()
        assert guard.incidents == ()
    assert _losses(tmp_path)[1] == loss.item()


def test_backward_that_touches_no_watched_gradient_is_somebody_elses(tmp_path: Path) -> None:
    scene = _sgd(plain_net())
    probe = torch.ones(3, requires_grad=True)
    with stepguard.watch(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        loss = scene.loss_fn(DATA[0])
        loss.backward()
        (probe.sum() * NAN).backward()
        scene.optimizer.step()
        assert guard.incidents == ()
    assert _losses(tmp_path) == [loss.item()]


@pytest.mark.parametrize("clip", [None, 0.05, 1e4])
def test_norm_is_the_one_before_clipping(clip: float | None, tmp_path: Path) -> None:
    scene, other = _sgd(plain_net()), _sgd(plain_net())
    scene.clip_norm = clip
    watched(scene, [(DATA[0],)], quiet(run_dir=tmp_path))
    other.loss_fn(DATA[0]).backward()
    expected = nn.utils.get_total_norm([p.grad for p in other.model.parameters()]).item()
    assert read_run(tmp_path).steps[0]["grad_norm"] == expected


def test_norm_is_unscaled_also_where_the_fused_kernel_divides(tmp_path: Path) -> None:
    scene, other = _fused(plain_net()), _fused(plain_net())
    scene.scaler = GradScaler("cpu", init_scale=1024.0)
    watched(scene, [(DATA[0],)], quiet(run_dir=tmp_path))
    other.loss_fn(DATA[0]).backward()
    expected = nn.utils.get_total_norm([p.grad for p in other.model.parameters()]).item()
    assert read_run(tmp_path).steps[0]["grad_norm"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [_sgd, _fused])
def test_scaler_that_skips_by_itself_is_seen(
    make: Callable[[nn.Module], Scene], tmp_path: Path
) -> None:
    scene = make(calm_net())
    scene.scaler = GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    found = watched(scene, [(DATA[0],), (poisoned(DATA[1]),), (DATA[2],)], quiet(run_dir=tmp_path))
    assert [(i.step, i.verdict.kind) for i in found] == [(1, "nonfinite_input")]
    assert [line["committed"] for line in read_run(tmp_path).steps] == [True, False, True]
    assert scene.scaler.get_scale() == 32.0  # grown by two good steps, not halved by the bad one


def test_scale_the_user_sets_is_obeyed() -> None:
    scene = _sgd(plain_net())
    scene.scaler = GradScaler("cpu", init_scale=16.0)
    with stepguard.watch(scene.model, scene.optimizer, scaler=scene.scaler, config=QUIET):
        scene.scaler.scale(scene.loss_fn(DATA[0])).backward()
        scene.scaler.step(scene.optimizer)
        scene.scaler.update(128.0)
    assert scene.scaler.get_scale() == 128.0


def test_other_scalers_are_left_alone() -> None:
    scene, other = _sgd(plain_net()), _sgd(plain_net())
    mine, theirs = GradScaler("cpu", init_scale=16.0), GradScaler("cpu", init_scale=2.0**40)
    with stepguard.watch(scene.model, scene.optimizer, scaler=mine, config=QUIET) as guard:
        theirs.scale(other.loss_fn(DATA[0]) * 1e30).backward()
        theirs.step(other.optimizer)
        theirs.update()
        assert guard.incidents == ()
    assert theirs.get_scale() == 2.0**39


# --- several guards
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_of_one_backward_pass_take_one_decision(fused: bool) -> None:
    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = calm_net()
        return model, [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9, fused=fused),
            torch.optim.AdamW(model[3].parameters(), lr=0.01, fused=fused),
        ]

    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Any) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        for optimizer in optimizers:
            optimizer.step()

    model, optimizers = build()
    guards = [stepguard.watch(model, optimizer, config=QUIET) for optimizer in optimizers]
    for batch in (DATA[0], poisoned(DATA[1]), DATA[2]):
        step(model, optimizers, batch)
    said = [[i.step for i in guard.incidents] for guard in guards]
    for guard in guards:
        guard.close()
    # one incident; only a fused optimizer, whose verdict stays on the device, finds the bad loss
    # again by itself
    assert said == ([[1], [1]] if fused else [[1], []])
    reference, theirs = build()
    for batch in (DATA[0], DATA[2]):
        step(reference, theirs, batch)
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) == ""
    for mine, other in zip(optimizers, theirs, strict=True):
        assert difference(mine.state_dict(), other.state_dict()) == ""


@pytest.mark.parametrize("set_to_none", [False, True])
def test_two_players_each_see_their_own_loss(set_to_none: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
    players = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (maker, judge)]
    folders = [tmp_path / "maker", tmp_path / "judge"]
    guards = [
        stepguard.watch(model, optimizer, config=quiet(run_dir=folder))
        for (model, optimizer), folder in zip(players, folders, strict=True)
    ]
    expected: list[list[float]] = [[], []]
    for index, (noise, _) in enumerate(DATA[:4]):
        judge_loss = (judge(maker(noise).detach()) - 1).square().mean() * (
            NAN if index == 2 else 1.0
        )
        players[1][1].zero_grad(set_to_none=set_to_none)
        judge_loss.backward()
        players[1][1].step()
        maker_loss = judge(maker(noise)).square().mean()
        players[0][1].zero_grad(set_to_none=set_to_none)
        maker_loss.backward()  # leaves gradients in the judge too
        players[0][1].step()
        expected[0].append(maker_loss.item())
        expected[1].append(judge_loss.item())
    assert [[i.step for i in guard.incidents] for guard in guards] == [[], [2]]
    for guard in guards:
        guard.close()
    for folder, losses in zip(folders, expected, strict=True):
        assert difference(_losses(folder), losses) == ""


def test_watched_guard_takes_no_steps_of_its_own() -> None:
    scene = _sgd(plain_net())
    guard = stepguard.watch(scene.model, scene.optimizer, config=QUIET)
    with guard, pytest.raises(ConfigError, match="watches"):
        guard.step(scene.loss_fn, DATA[0])


# --- nothing of ours on the user's objects
# ----------------------------------------------------------------------------


def _ours(model: nn.Module) -> list[str]:
    """Hooks and wrapped methods of stepguard, wherever a module or a parameter may keep one."""
    found: list[Any] = []
    for module in model.modules():
        found += [
            hook
            for name, hooks in vars(module).items()
            if name.endswith("_hooks")
            for hook in hooks.values()
        ]
        found += [
            value
            for value in vars(module).values()
            if callable(value) and not isinstance(value, nn.Module)
        ]
    for parameter in model.parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            found += list((hooks or {}).values())
    return [
        str(hook)
        for hook in found
        if "stepguard" in f"{type(hook).__module__} {getattr(hook, '__module__', '')}"
    ]


@pytest.fixture
def watching() -> Iterator[tuple[Scene, Guard]]:
    scene = _sgd(calm_net())
    scene.scaler = GradScaler("cpu", init_scale=8.0)
    scene.scheduler = torch.optim.lr_scheduler.ExponentialLR(scene.optimizer, 0.9)
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET, **scene.close_over()) as guard:
        plain_step(scene, (DATA[0],))
        yield scene, guard


def test_ear_on_a_watched_model_stays_off_its_copies(watching: tuple[Scene, Guard]) -> None:
    model = watching[0].model
    assert _ours(model) != []  # so that the test below can fail
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _ours(other) == []
        plain_step(_sgd(other), (DATA[1],))
    assert b"stepguard" not in pickle.dumps(model)
    assert len(watching[1]._driver.model_calls.calls) == 0  # nobody listened


def test_stepped_model_carries_no_hook() -> None:
    scene = _sgd(calm_net())
    with Guard(scene.model, scene.optimizer, config=QUIET) as guard:
        guard.step(scene.loss_fn, DATA[0])
        assert _ours(scene.model) == []


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("part", ["model", "optimizer", "scaler", "scheduler"])
def test_copies_of_the_users_objects_are_free_of_the_guard(
    part: str, copied: Callable[[Any], Any], watching: tuple[Scene, Guard]
) -> None:
    scene, guard = watching
    other = copied(getattr(scene, part))
    assert difference(other.state_dict(), getattr(scene, part).state_dict()) == ""
    if part == "optimizer":
        assert not other._optimizer_step_pre_hooks and not other._optimizer_step_post_hooks
    if part == "model":
        bad = _sgd(other)
        bare(bad, [(poisoned(DATA[1]),)])  # unguarded, so it is ruined, and nobody says a word
        assert not next(other.parameters()).isfinite().all()
    assert guard.incidents == ()


def test_copied_scaler_updates_itself_alone(watching: tuple[Scene, Guard]) -> None:
    scene, guard = watching
    other = _sgd(plain_net())
    other.scaler = copy.deepcopy(scene.scaler)
    bare(other, [(DATA[0],), (poisoned(DATA[1]),)])
    assert other.scaler is not None and scene.scaler is not None
    assert (other.scaler.get_scale(), scene.scaler.get_scale()) == (4.0, 8.0)
    assert guard.incidents == ()


def test_close_undoes_everything() -> None:
    scene = _sgd(calm_net())
    before = (
        torch.Tensor.backward,
        clip_grad._get_total_norm,
        GradScaler.update,
        nn.Module.load_state_dict,
    )
    scene.scaler = GradScaler("cpu", init_scale=8.0)
    attributes = set(vars(scene.scaler)) | set(vars(scene.optimizer)) | set(vars(scene.model))
    guards = [
        stepguard.watch(at.model, at.optimizer, scaler=scene.scaler, config=QUIET)
        for at in (scene, _sgd(plain_net()))
    ]
    plain_step(scene, (DATA[0],))
    guards[0].close()
    assert torch.Tensor.backward is not before[0]  # the other one still listens
    guards[1].close()
    assert (
        torch.Tensor.backward,
        clip_grad._get_total_norm,
        GradScaler.update,
        nn.Module.load_state_dict,
    ) == before
    assert (
        not scene.optimizer._optimizer_step_pre_hooks
        and not scene.optimizer._optimizer_step_post_hooks
    )
    assert (
        set(vars(scene.scaler)) | set(vars(scene.optimizer)) | set(vars(scene.model)) == attributes
    )
    assert _ours(scene.model) == []
    bare(scene, [(poisoned(DATA[1]),)])
    assert guards[0].incidents == () and guards[1].incidents == ()


def test_guard_left_by_an_exception_is_closed() -> None:
    scene = _sgd(plain_net())
    with (
        pytest.raises(KeyError),
        stepguard.watch(scene.model, scene.optimizer, config=QUIET),
    ):
        plain_step(scene, (DATA[0],))
        raise KeyError("the user's own")
    assert not scene.optimizer._optimizer_step_pre_hooks
