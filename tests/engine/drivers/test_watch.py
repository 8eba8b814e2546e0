"""`watch` protects a loop that stays as it is, and leaves nothing on the user's objects."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.utils import clip_grad

import stepguard
from scenes import (
    FEATURES,
    NAN,
    QUIET,
    Batch,
    Scene,
    bare,
    batches,
    calm_net,
    difference,
    grouped,
    noisy_net,
    plain_net,
    plain_step,
    poisoned,
    quiet,
    state_of,
    watched,
)
from stepguard import ConfigError, Guard, GuardConfig
from stepguard.journal import read_run

DATA = batches(12)


def _sgd(model: nn.Module, lr: float = 0.05) -> Scene:
    return Scene(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def _fused(model: nn.Module) -> Scene:
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


def _losses(folder: Path) -> list[Any]:
    return [line.get("loss") for line in read_run(folder).steps]


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


@pytest.mark.parametrize("set_to_none", [False, True])
def test_two_players_each_see_their_own_loss(set_to_none: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    nets = maker, judge = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    folders = [tmp_path / "maker", tmp_path / "judge"]
    guards = [
        stepguard.watch(net, optimizer, config=quiet(run_dir=folder))
        for net, optimizer, folder in zip(nets, optimizers, folders, strict=True)
    ]
    expected: list[list[float]] = [[], []]

    def turn(player: int, loss: Tensor) -> None:
        optimizers[player].zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizers[player].step()
        expected[player].append(loss.item())

    for index, (noise, _) in enumerate(DATA[:4]):
        factor = NAN if index == 2 else 1.0
        turn(1, (judge(maker(noise).detach()) - 1).square().mean() * factor)
        turn(0, judge(maker(noise)).square().mean())  # leaves gradients in the judge too
    assert [[i.step for i in guard.incidents] for guard in guards] == [[], [2]]
    for guard in guards:
        guard.close()
    for folder, losses in zip(folders, expected, strict=True):
        assert difference(_losses(folder), losses) == ""


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


# --- copies, files, compiled and exported models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.outer(F.relu(self.norm(self.inner(x)) * scale[:, None]))


@pytest.fixture
def watched_model() -> Any:
    model = Net()
    guard = stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    )
    assert _hears(model)
    yield model
    guard.close()
    assert "_compiled_call_impl" not in vars(model)


def _hears(model: nn.Module) -> bool:
    return "stepguard" in type(vars(model).get("_compiled_call_impl")).__module__


@pytest.mark.parametrize("steps", [0, 3])
def test_a_saved_model_is_the_same_file_as_without_a_guard(steps: int) -> None:
    def saved(guarded: bool) -> bytes:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet"))
            if guarded
            else nullcontext()
        ):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(6, 4), torch.ones(6)).sum().backward()
                optimizer.step()
            file = io.BytesIO()
            torch.save(model, file)
        return file.getvalue()

    assert saved(guarded=True) == saved(guarded=False)


def test_a_saved_model_loads_under_the_safe_globals_of_the_script() -> None:
    scene, file = _sgd(nn.Linear(3, 1)), io.BytesIO()
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET):
        torch.save(scene.model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Linear]):
        assert torch.equal(torch.load(file, weights_only=True).weight, scene.model.weight)


def test_saving_the_output_does_not_warn(watched_model: nn.Module) -> None:
    out, file = watched_model(torch.randn(6, 4), torch.ones(6)), io.BytesIO()
    torch.save(out.detach(), io.BytesIO())
    torch.save(out, file)
    file.seek(0)
    assert torch.equal(torch.load(file), out)


class KeepsItsWholeDict(Net):
    def __getstate__(self) -> Any:
        return vars(self)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_a_model_that_pickles_its_whole_dict_still_leaves_us_out(duplicate: Any) -> None:
    model = KeepsItsWholeDict()
    with stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    ):
        twin = duplicate(model)
    assert twin._compiled_call_impl is None
    assert torch.equal(
        twin(torch.ones(2, 4), torch.ones(2)), model(torch.ones(2, 4), torch.ones(2))
    )


def test_a_replica_that_shares_the_attributes_runs_its_own_forward(
    watched_model: nn.Module,
) -> None:
    replica: Any = watched_model._replicate_for_data_parallel()
    replica.forward = lambda x: x + 1  # as DataParallel gives each its own parameters
    assert torch.equal(replica(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_guards_on_one_model_either_may_close_first(first: int) -> None:
    model = Net()
    guards = [
        stepguard.watch(model, torch.optim.SGD(half.parameters(), lr=0.1), config=QUIET)
        for half in (model.inner, model.outer)
    ]
    guards[first].close()
    assert _hears(model)
    guards[1 - first].close()
    assert vars(model).keys() == vars(Net()).keys()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # from torch 2.15 on
def test_a_watched_model_can_be_scripted_and_traced(watched_model: nn.Module) -> None:
    args = torch.randn(6, 4), torch.ones(6)
    watched_model.eval()
    traced = torch.jit.trace(watched_model, args)  # type: ignore[no-untyped-call]
    assert torch.equal(traced(*args), watched_model(*args))
    scene = _sgd(nn.Linear(4, 3))
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET):
        assert torch.equal(torch.jit.script(scene.model)(args[0]), scene.model(args[0]))


def test_function_transforms_of_a_watched_model_work(watched_model: nn.Module) -> None:
    watched_model.norm = nn.Identity()  # statistics cannot be written inside a transform
    args = torch.ones(2, 4), torch.ones(2)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(watched_model, params, args).sum()

    params = dict(watched_model.named_parameters())
    assert torch.func.grad(loss)(params)["inner.weight"].shape == (8, 4)


def test_a_watched_model_compiles_and_exports(watched_model: nn.Module) -> None:
    args = torch.randn(6, 4), torch.ones(6)
    watched_model.eval()
    wanted = watched_model(*args)
    assert torch.equal(torch.compile(watched_model, backend="eager", fullgraph=True)(*args), wanted)
    exported = torch.export.export(watched_model, args)
    assert torch.equal(exported.module()(*args), wanted)
    torch._dynamo.reset()
    watched_model.train()
    torch.compile(watched_model, backend="eager")(*args).sum().backward()
    torch._dynamo.reset()


@pytest.mark.slow
def test_whoever_keeps_a_loss_does_not_keep_the_guard() -> None:
    model = Net()
    guard = stepguard.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(terminal="quiet")
    )
    loss = model(torch.ones(2, 4), torch.ones(2)).sum()
    loss.backward(retain_graph=True)
    guard.close()
    gone = weakref.ref(guard)
    del guard
    gc.collect()
    assert gone() is None
    loss.backward()  # nobody listens any more


# --- output gradients, held until the step is judged


class Doubling(torch.autograd.Function):
    """Its backward writes into the gradient it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(2.0)


class Logarithm(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(4, 3), writes

    def forward(self, x: Tensor) -> Tensor:
        out = torch.log(self.inner(x) * 0.0 + x[:, :3])
        return Doubling.apply(out) if self.writes else out


def _capture(model: nn.Module) -> Any:
    (capture,) = model._compiled_call_impl.hearers  # type: ignore[attr-defined]
    return capture


@pytest.mark.parametrize("writes", [False, True])
def test_a_gradient_that_was_written_to_is_not_used_for_a_replay(writes: bool) -> None:
    model = Logarithm(writes=writes)
    with stepguard.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quiet()):
        model(torch.ones(2, 4)).square().sum().backward()
        assert (_capture(model).model_fn() is None) == writes


# --- a loop that is clipped by its guard


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


def test_bad_step_of_a_clipped_loop_is_vetoed_all_the_same() -> None:
    at, data = built(False), batches(6)
    with stepguard.watch(at.model, at.optimizer, config=quiet(clip_norm=CLIP)) as guard:
        train(at, [*data[:3], poisoned(data[3]), *data[4:]], clips=False)
    assert [incident.step for incident in guard.incidents] == [3]
    assert all(bool(p.isfinite().all()) for p in at.model.parameters())
    assert not at.optimizer._optimizer_step_pre_hooks  # a closed guard clips no more


def test_optimizers_that_cannot_be_clipped_from_outside_are_refused() -> None:
    model = noisy_net()
    with pytest.raises(ConfigError, match="inside its step"):
        stepguard.watch(model, torch.optim.LBFGS(model.parameters()), config=quiet(clip_norm=CLIP))
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ConfigError, match="still scaled"):
        stepguard.watch(model, fused, scaler=GradScaler("cpu"), config=quiet(clip_norm=CLIP))


# --- a model whose root is never called


class Agent(nn.Module):
    """An actor and a critic that share a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.critic = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x)

    def value(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        return self.actor(seen) + self.critic(seen)


def by_method(agent: Agent, x: Tensor) -> Tensor:
    return agent.value(x)


def by_children(agent: Agent, x: Tensor) -> Tensor:
    seen = agent.norm(x)
    return agent.actor(seen) + agent.critic(seen)


Way = Callable[[Agent, Tensor], Tensor]
WAYS: dict[str, Way] = {"call": Agent.__call__, "method": by_method, "children": by_children}


def train_agent(way: Way, *, fused: bool) -> tuple[list[Any], dict[str, Any]]:
    """A weight is damaged after step 20; the schedule is part of the loop."""
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    settings = quiet(snapshot_every=4, probation=6)
    with stepguard.watch(agent, optimizer, scheduler=schedule, config=settings) as guard:
        for step in range(30):
            x = torch.randn(16, 8)
            loss = (way(agent, x) - x[:, :1]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step == 20:
                with torch.no_grad():
                    agent.critic.weight[0, 0] = torch.nan
        taken = [
            {n: t.clone() for n, t in s.state.tensors.items()}
            for s in guard._rewinder.snapshots.ring.snapshots
        ]
        done = [
            (i.decision.action, i.decision.rewound_to)
            for i in guard.incidents
            if i.decision is not None
        ]
    return done, {"snapshots": taken, "end": agent.state_dict(), "lr": schedule.get_last_lr()}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("way", ["method", "children"])
def test_damage_is_rewound_as_where_the_model_is_called(way: str, fused: bool) -> None:
    expected_done, expected = train_agent(WAYS["call"], fused=fused)
    done, got = train_agent(WAYS[way], fused=fused)
    assert done == expected_done and done[0][0] == "rewind"
    assert got["lr"] == expected["lr"]
    assert difference(got["end"], expected["end"]) == ""
    if not fused:  # a snapshot before the update holds the buffers from before the forward
        assert len(got["snapshots"]) == len(expected["snapshots"]) > 0
        for left, right in zip(got["snapshots"], expected["snapshots"], strict=True):
            for name in [name for name in right if "rng" not in name]:
                assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("clip", [None, 0.05, 1e4])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_norm_is_unscaled_and_the_one_before_clipping(
    clip: float | None, scale: float, tmp_path: Path
) -> None:
    make = _sgd if scale == 1.0 else _fused  # whose kernel divides by the scale
    scene, other = make(plain_net()), make(plain_net())
    if scale != 1.0:
        scene.scaler = GradScaler("cpu", init_scale=scale)
    scene.clip_norm = clip
    watched(scene, [(DATA[0],)], quiet(run_dir=tmp_path))
    other.loss_fn(DATA[0]).backward()
    expected = nn.utils.get_total_norm([p.grad for p in other.model.parameters()]).item()
    found = read_run(tmp_path).steps[0]["grad_norm"]
    assert found == (expected if scale == 1.0 else pytest.approx(expected, rel=1e-6))


def test_gradients_written_after_clipping_are_measured_again(tmp_path: Path) -> None:
    scene = _sgd(plain_net())
    with stepguard.watch(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)):
        scene.loss_fn(DATA[0]).backward()
        nn.utils.clip_grad_norm_(scene.model.parameters(), 0.05)
        for parameter in scene.model.parameters():
            parameter.grad.mul_(2.0)
        scene.optimizer.step()
    assert read_run(tmp_path).steps[0]["grad_norm"] == pytest.approx(0.1, rel=1e-4)


# --- buffers that are no norm statistics


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(FEATURES, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return self.out(inputs)


@pytest.mark.parametrize("make", [_sgd, _fused])
def test_counter_in_a_buffer_loses_the_bad_step_and_no_other(
    make: Callable[[nn.Module], Scene],
) -> None:
    scene = make(Counting())
    watched(scene, grouped([DATA[0], DATA[1], poisoned(DATA[2]), DATA[3], DATA[4]], 1))
    assert scene.model.seen == 4


def test_buffer_that_first_changes_after_a_late_veto_keeps_its_change() -> None:
    scene = _fused(Counting())
    scene.loss = lambda s, b: F.cross_entropy(
        (s.model if b is DATA[3] else s.model.out)(b[0]), b[1]
    )
    watched(scene, grouped([DATA[0], poisoned(DATA[2]), DATA[3], DATA[4]], 1))
    assert scene.model.seen == 1
