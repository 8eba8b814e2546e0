"""Every harm that was once seen on a healthy run or at an ordinary incident, and what is benign."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional

import stepguard
from forked import FULL
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
from stepguard import Guard, GuardConfig, Incident, Policy, Probes, TrainingHalted, watch
from stepguard.journal import read_run

DATA = batches(60)
LossFn = Callable[[Batch], Tensor]


def loss_of(model: nn.Module) -> LossFn:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


class Clusters:
    """Ten clusters, one class each: a small network learns them to a loss near 0."""

    def __init__(self, seed: int) -> None:
        self._source = torch.Generator().manual_seed(seed)
        self._centres = torch.randn(10, 8, generator=self._source) * 2

    def batch(self) -> Batch:
        labels = torch.randint(10, (64,), generator=self._source)
        return self._centres[labels] + 0.6 * torch.randn(64, 8, generator=self._source), labels


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-2, 3e-3])
@pytest.mark.parametrize("seed", range(4 if FULL else 1))
def test_run_from_a_converged_model_is_left_alone(seed: int, rate: float) -> None:
    data = Clusters(seed)
    model = network(seed)
    train(model, torch.optim.AdamW(model.parameters(), rate), [data.batch() for _ in range(400)])
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ahead = [data.batch() for _ in range(300)]
    train(model, torch.optim.AdamW(model.parameters(), rate), ahead)
    bare_end = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(start)
    with Guard(model, torch.optim.AdamW(model.parameters(), rate), config=quiet()) as guard:
        for batch in ahead:
            guard.step(loss_of(model), batch)
        assert guard.incidents == () and guard.steps == 300
    assert difference(dict(model.state_dict()), bare_end) == ""


@pytest.mark.slow
def test_generator_and_discriminator_in_one_module_keep_their_own_weights() -> None:
    torch.manual_seed(0)
    pair = nn.ModuleDict(
        {"g": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), "d": nn.Linear(2, 1)}
    )
    one = torch.optim.Adam(pair["g"].parameters(), 5e-3)
    two = torch.optim.Adam(pair["d"].parameters(), 5e-3)
    source = torch.Generator().manual_seed(1)
    with Guard(pair, one, config=quiet()) as g, Guard(pair, two, config=quiet()) as d:
        for _ in range(300):
            noise, real = (
                torch.randn(32, 4, generator=source),
                torch.randn(32, 2, generator=source) + 2,
            )
            d.step(
                lambda b: (
                    F.softplus(-pair["d"](b[1])).mean()
                    + F.softplus(pair["d"](pair["g"](b[0]))).mean()
                ),
                (noise, real),
            )
            g.step(lambda b: F.softplus(-pair["d"](pair["g"](b))).mean(), noise)
        assert g.incidents == d.incidents == ()
        assert g.steps == d.steps == 300


@pytest.mark.slow
def test_new_targets_are_learned_and_not_rewound() -> None:
    model = plain_net()
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=quiet()) as guard:
        for index in range(400):
            inputs, targets = DATA[index % 60]
            guard.step(loss_of(model), (inputs, (targets + index // 100) % 3))
        assert guard.incidents == () and guard.steps == 400


def _diverges(folder: Path, loop: str, rate: float, steps: int = 200) -> tuple[Guard, list[float]]:
    """A classifier that learns, and whose rate is then raised until all is lost."""
    data, model = Clusters(3), network(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    config = quiet(run_dir=folder, on_signal="off", checkpoint_every=20)
    scene = Scene(model, optimizer, loss=lambda s, b: loss_of(s.model)(b))
    losses = []
    with (Guard if loop == "step" else stepguard.watch)(model, optimizer, config=config) as guard:
        for index in range(steps):
            if index == 100:
                optimizer.param_groups[0]["lr"] = rate
            batch = data.batch()
            if loop == "step":
                losses.append(guard.step(scene.loss_fn, batch).loss or NAN)
            else:
                losses.append(float(scene.loss_fn(batch).detach()))
                plain_step(scene, (batch,))
        guard.incidents  # noqa: B018 (reads what is still pending)
        guard.save()
    return guard, losses


def _sealed(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for seal in folder.glob("checkpoints/step-*/seal.json"):
        content = json.loads(seal.read_text())["seal"]
        found[content["step"]] = content["health"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rate", [3.0, 30.0], ids=["stays finite", "becomes NaN"])
@pytest.mark.parametrize("loop", ["step", "watch"])
def test_ruin_is_never_called_good_and_never_costs_the_best_state(
    loop: str, rate: float, tmp_path: Path
) -> None:
    _diverges(tmp_path, loop, rate)
    sealed = _sealed(tmp_path)
    good = {step: health for step, health in sealed.items() if health["good"]}
    assert good and all(health["level"] < 0.1 for health in good.values())
    last_good = (tmp_path / "checkpoints" / "last-good").read_text().split()[0]
    assert last_good == f"step-{max(good)}"


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["step", "watch"])
def test_schedule_that_runs_away_to_chance_is_not_sealed_as_good(loop: str, tmp_path: Path) -> None:
    """A warm-up without an end: everything stays finite, and the loss ends where guessing is."""
    data, model = Clusters(5), nn.Sequential(network(5), nn.Tanh(), nn.Linear(10, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scene = Scene(model, optimizer, loss=lambda s, b: loss_of(s.model)(b))
    config = quiet(run_dir=tmp_path, on_signal="off", checkpoint_every=20)
    with (Guard if loop == "step" else stepguard.watch)(model, optimizer, config=config) as guard:
        for index in range(300):
            if index >= 100:
                optimizer.param_groups[0]["lr"] = min(5.0, 1e-2 * 1.2 ** (index - 100))
            batch = data.batch()
            if loop == "step":
                guard.step(scene.loss_fn, batch)
            else:
                plain_step(scene, (batch,))
        assert guard.incidents == () or {
            i.decision.action for i in guard.incidents if i.decision
        } == {"note"}
        last = guard._context.history.level
    sealed = _sealed(tmp_path)
    good = {step: health["level"] for step, health in sealed.items() if health["good"]}
    assert last > 1.0 and good and max(good.values()) < 0.5
    assert any(not health["good"] for health in sealed.values())


@pytest.mark.slow
def test_divergence_under_watch_is_told_as_an_incident(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(3)
    centres = torch.randn(4, 8, generator=source) * 1.5
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 2.0, momentum=0.9)
    with stepguard.watch(
        model, optimizer, config=quiet(run_dir=tmp_path, on_signal="off")
    ) as guard:
        for _ in range(200):
            labels = torch.randint(4, (32,), generator=source)
            batch = (centres[labels] + torch.randn(32, 8, generator=source), labels)
            plain_step(Scene(model, optimizer, loss=lambda s, b: loss_of(s.model)(b)), (batch,))
        told = guard.incidents
        assert guard.save() is None
    assert told and {i.decision.action for i in told if i.decision is not None} == {"note"}
    assert told[0].findings[0].code == "SG505"


def _experiment(folder: Path, seed: int, shift: int, steps: int, bad: int | None = None) -> Guard:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    config = quiet(run_dir=folder, on_signal="off")
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config) as guard:
        for index in range(steps):
            if index == bad:
                model[0].weight.data[0, 0] = NAN
            inputs, targets = DATA[index % 60]
            guard.step(loss_of(model), (inputs, (targets + shift) % 3))
        if bad is None:
            assert guard.save() is not None
    return guard


@pytest.mark.slow
def test_fresh_run_in_a_used_folder_never_takes_the_other_runs_weights(tmp_path: Path) -> None:
    _experiment(tmp_path, 1, 1, 100)
    guard = _experiment(tmp_path, 2, 0, 110, bad=103)
    decision = guard.incidents[0].decision
    assert decision is not None and decision.action == "rewind"
    assert decision.rewound_to != 100 and decision.data == "repeat"


@pytest.mark.slow
def test_second_run_in_a_folder_overwrites_nothing(tmp_path: Path) -> None:
    bad = (DATA[0][0] * NAN, DATA[0][1])
    kept = []
    for _ in range(2):
        model = plain_net()
        with Guard(
            model, torch.optim.SGD(model.parameters(), 0.1), config=quiet(run_dir=tmp_path)
        ) as guard:
            for batch in [*DATA[:5], bad, *DATA[5:8]]:
                guard.step(loss_of(model), batch)
            (incident,) = guard.incidents
        kept.append((incident.id, incident.capsule))
    assert len({name for name, _ in kept}) == len({capsule for _, capsule in kept}) == 2
    assert all((tmp_path / str(capsule)).is_dir() for _, capsule in kept)
    runs = [
        line
        for line in (tmp_path / "journal.jsonl").read_text().splitlines()
        if '"type":"run"' in line
    ]
    assert [json.loads(line)["attempt"] for line in runs] == [1, 2]
    assert len({json.loads(line)["run"] for line in runs}) == 2


@pytest.mark.slow
def test_second_run_leaves_the_checkpoints_of_the_first_alone(tmp_path: Path) -> None:
    _experiment(tmp_path, 1, 0, 20)
    for seed in range(2, 7):
        _experiment(tmp_path, seed, 0, 25 + seed)
    assert (tmp_path / "checkpoints" / "step-20").is_dir()


@pytest.mark.slow
def test_restart_after_a_stop_goes_on_behind_the_bad_stretch(tmp_path: Path) -> None:
    """The same shard of NaN lies ahead at every start; each start gets further, and the last one
    through.
    """
    ends = []
    for _ in range(4):
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        config = GuardConfig(
            run_dir=tmp_path,
            terminal="quiet",
            probes=Probes(locate_budget=0),
            on_signal="off",
            capsule="off",
        )
        try:
            with Guard(model, optimizer, config=config) as guard:
                if (tmp_path / "checkpoints" / "last-good").exists():
                    guard.restore()
                while guard.steps < 260:
                    inputs, targets = DATA[guard.steps % 60]
                    bad = 60 <= guard.steps < 180
                    guard.step(loss_of(model), (inputs * NAN if bad else inputs, targets))
                ends.append("through")
                break
        except TrainingHalted as halted:
            ends.append(halted.incident.step)
    assert ends[-1] == "through" and len(ends) <= 4
    stops = [end for end in ends if isinstance(end, int)]
    assert stops == sorted(stops)


@pytest.mark.slow
def test_policy_stop_leaves_the_newest_good_state_on_disk(tmp_path: Path) -> None:
    model = plain_net()
    config = quiet(run_dir=tmp_path, on_signal="off", policy=Policy(max_consecutive=2))
    with (
        pytest.raises(TrainingHalted),
        Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config) as guard,
    ):
        for batch in [*DATA[:30], *[(DATA[0][0] * NAN, DATA[0][1])] * 5]:
            guard.step(loss_of(model), batch)
    stored = _sealed(tmp_path)
    assert list(stored) == [33] and stored[33]["good"]
    assert any(
        note.get("kind") == "end" or note["type"] == "end" for note in read_run(tmp_path).notes
    )


# --- when stored state is inspected, and what is no incident


FEW = batches(12)


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
        step(FEW[0])
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
            step(FEW[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_veto_of_the_first_step_keeps_the_statistics_that_were_loaded(loop: str) -> None:
    loaded = calm_net()
    plain_step(sgd(loaded), (FEW[0],))
    model = calm_net()
    guard, step = _guarded(loop, sgd(model))
    with guard:
        model.load_state_dict(loaded.state_dict())
        step(poisoned(FEW[1]))
        assert len(guard.incidents) == 1
    assert difference(dict(model.state_dict()), dict(loaded.state_dict())) == ""


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
    assert incidents(adam(Causal(), fused=fused), loop, grouped(FEW, 1)) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_sentinel_buffers_are_not_blamed_for_a_bad_batch(loop: str, fused: bool) -> None:
    scene = adam(Causal(), fused=fused)
    found = incidents(scene, loop, [(FEW[0],), (poisoned(FEW[1]),), (FEW[2],)])
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
        yield (FEW[0],)
        scene.model.count.fill_(NAN)
        if loop == "watch":
            scene.model.load_state_dict(scene.model.state_dict())
        yield (FEW[1],)
        yield (FEW[2],)

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
    assert incidents(scene, loop, grouped(FEW * 4, 1)) == []


@pytest.mark.parametrize("loop", LOOPS)
def test_buffer_that_cannot_be_written_is_no_matter(loop: str) -> None:
    model = plain_net()
    model.register_buffer("wide", torch.ones(1).expand(64))
    found = incidents(sgd(model), loop, [(FEW[0], FEW[1]), (poisoned(FEW[2]), FEW[3]), (FEW[4],)])
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
            for batch in FEW[:4]:
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


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("step", kind) for kind in ("element", "constant", "nan", "target")),
        *(("watch", kind) for kind in ("nan", "target")),
    ],
)
def test_loss_that_is_not_finite_before_it_is_added_up_is_an_incident(mode: str, kind: str) -> None:
    _, incidents = _half_precision_run(mode, kind)
    assert incidents and {i.verdict.kind for i in incidents} == {"nonfinite_loss"}
