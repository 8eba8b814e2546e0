"""An exception in the user's step is an incident, on record with its place and sample, and raised
again unchanged.
"""

from __future__ import annotations

import copy
import inspect
import random
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import forked
import stepguard
import stepguard.engine.incident.incident_record as module
from engine.parts import incident_of, step_of
from scenes import (
    CLASSES,
    Batch,
    Scene,
    batches,
    calm_net,
    difference,
    generators,
    noisy_net,
    plain_net,
    quiet,
    state_of,
)
from stepguard import Guard, Incident, Policy, watch
from stepguard.engine.incident.incident_record import free_id, incident_folder, record
from stepguard.journal import read_run

DATA = batches(6)
GUILTY = 2


class Refusing(nn.Module):
    """Raises for a sample that is exactly zero."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs().sum(1) == 0).any()):
            raise ZeroDivisionError("a sample is all zeros")
        return x


class TornBackward(torch.autograd.Function):
    """Raises in the backward where the forward saw a sample of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.bad = bool((x.abs().sum(1) == 0).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if ctx.bad:
            raise FloatingPointError("torn in the backward")
        return grads[0]


def in_forward(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(Refusing()(batch[0])), batch[1])


def in_model(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def in_linalg(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0]
    eye = torch.eye(x.shape[1]) * (x.abs().sum(1) > 0).float()[:, None, None]
    return nn.functional.cross_entropy(model(x), batch[1]) + torch.linalg.cholesky(eye).sum()


def in_target(model: nn.Module, batch: Batch) -> Tensor:
    beyond = torch.where(batch[0].abs().sum(1) == 0, CLASSES, batch[1])
    return nn.functional.cross_entropy(model(batch[0]), beyond)


def in_backward(model: nn.Module, batch: Batch) -> Tensor:
    x = TornBackward.apply(batch[0].requires_grad_())
    return nn.functional.cross_entropy(model(x), batch[1])


KINDS: dict[str, tuple[Callable[[nn.Module, Batch], Tensor], type[Exception], str, str | None]] = {
    "forward": (in_forward, ZeroDivisionError, "loss", None),
    "module": (in_model, ZeroDivisionError, "forward", None),
    "linalg": (in_linalg, torch.linalg.LinAlgError, "loss", "aten.linalg_cholesky_ex"),
    "target": (in_target, IndexError, "loss", "aten.nll_loss_forward"),
    "backward": (in_backward, FloatingPointError, "backward", None),
}


def guilty(batch: Batch) -> Batch:
    inputs = batch[0].clone()
    inputs[GUILTY] = 0.0
    return inputs, batch[1]


def scene_of(kind: str, *, fused: bool = False, calm: bool = False) -> Scene:
    inner = calm_net() if calm else noisy_net()
    model = nn.Sequential(Refusing(), *inner) if kind == "module" else inner
    loss = KINDS[kind][0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return Scene(model, optimizer, loss=lambda scene, batch: loss(scene.model, batch))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_exception_in_a_step_is_placed_and_raised_again(
    kind: str, fused: bool, tmp_path: Path
) -> None:
    scene, (_, error, phase, op) = scene_of(kind, fused=fused, calm=True), KINDS[kind]
    with Guard(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path, locate=True)) as guard:
        guard.step(scene.loss_fn, DATA[0])
        guard.port.settle()
        before, numbers = state_of(scene), generators()
        with pytest.raises(error):
            guard.step(scene.loss_fn, guilty(DATA[1]))
        assert difference(state_of(scene), before) == ""
        assert difference(generators(), numbers) == ""
        assert all(p.grad is None for p in scene.model.parameters())
        assert guard.step(scene.loss_fn, DATA[1]).committed
        assert guard.armed
    (incident,) = read_run(tmp_path).incidents
    assert incident.verdict.kind == "exception" and error.__name__ in incident.verdict.summary
    assert (
        incident.step == 1 and incident.decision is not None and incident.decision.action == "stop"
    )
    origin = incident.origin
    assert origin is not None and origin.phase == phase and origin.reproduced
    assert origin.samples == (GUILTY,)
    if op is not None:
        assert origin.op == op
    assert origin.source is not None and origin.source.startswith(
        "tests/engine/incident/test_exceptions.py:"
    )
    if kind == "target":
        lines, first = inspect.getsourcelines(in_target)
        assert int(origin.source.rpartition(":")[2]) == first + len(lines) - 1
    assert origin.module == ("0" if kind == "module" else None)
    assert (
        incident.capsule is not None
        and (tmp_path / incident.capsule / "tensors.safetensors").is_file()
    )


def test_exception_is_the_same_object_and_its_traceback_ends_in_the_users_line() -> None:
    scene = scene_of("target")
    mine = KeyError("mine")

    def loss_fn(batch: Batch) -> Tensor:
        raise mine

    with (
        Guard(scene.model, scene.optimizer, config=quiet()) as guard,
        pytest.raises(KeyError) as caught,
    ):
        guard.step(loss_fn, DATA[0])
    assert caught.value is mine and mine.__cause__ is None and mine.__context__ is None
    frames = traceback.extract_tb(mine.__traceback__)
    assert (
        frames[-1].name == "loss_fn" and len(frames) == 5
    )  # this test, guard.step, run, forward_backward, loss_fn


@pytest.mark.parametrize("mode", ["step", "watch"])
@pytest.mark.parametrize("error", [ValueError("odd row"), torch.OutOfMemoryError("out of memory")])
def test_random_numbers_after_a_caught_exception_are_where_an_unguarded_run_has_them(
    mode: str, error: Exception
) -> None:
    runs = [_with_caught_exceptions(how, error) for how in ("unguarded", mode)]
    for unguarded, guarded in zip(*runs, strict=True):
        assert torch.equal(unguarded, guarded)


def test_buffers_after_a_caught_exception_are_as_before_the_step() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(batch: Batch) -> Tensor:
        model(batch[0])
        raise ValueError("odd row")

    before = copy.deepcopy(model.state_dict())
    with Guard(model, optimizer, config=quiet()) as guard, pytest.raises(ValueError, match="odd"):
        guard.step(loss_fn, DATA[0])
    assert difference(model.state_dict(), before) == ""


def _with_caught_exceptions(mode: str, error: Exception) -> list[Tensor]:
    """Weights and the next random numbers of a loop that lives with two failing steps."""
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(index: int) -> Tensor:
        shift = random.random() + numpy.random.rand()
        loss: Tensor = (model(DATA[index][0]) + shift).square().mean()
        if index in (1, 3):
            raise error
        return loss

    guard = None
    if mode != "unguarded":
        guard = (Guard if mode == "step" else watch)(model, optimizer, config=quiet(locate=True))
    for index in range(6):
        with suppress(type(error)):
            if guard is not None and mode == "step":
                guard.step(loss_fn, index)
                continue
            optimizer.zero_grad()
            loss_fn(index).backward()
            optimizer.step()
    if guard is not None:
        guard.close()
    later = [random.random(), numpy.random.rand(), float(torch.rand(()))]
    return [*(p.detach() for p in model.parameters()), torch.tensor(later)]


@pytest.mark.parametrize("variant", ["AdamW", "LBFGS"])
def test_policy_may_skip_a_step_that_raises(variant: str, tmp_path: Path) -> None:
    scene = scene_of("target")
    if variant == "LBFGS":
        scene.optimizer = torch.optim.LBFGS(scene.model.parameters(), lr=0.1, max_iter=3)
    config = quiet(run_dir=tmp_path, policy=Policy(exceptions="skip", max_consecutive=2))
    with Guard(scene.model, scene.optimizer, config=config) as guard:
        guard.step(scene.loss_fn, DATA[0])
        before = state_of(scene)
        result = guard.step(scene.loss_fn, guilty(DATA[1]))
        assert not result.committed and result.loss is None
        assert isinstance(result.incident, Incident) and result.incident.decision is not None
        assert result.incident.decision.action == "skip"
        assert difference(state_of(scene), before) == ""
        guard.step(scene.loss_fn, guilty(DATA[1]))
        with pytest.raises(IndexError):
            guard.step(scene.loss_fn, guilty(DATA[1]))  # the third in a row
    assert [i.decision.action for i in guard.incidents if i.decision] == ["skip", "skip", "stop"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_exhausted_memory_is_never_skipped_nor_run_again(error: Exception, tmp_path: Path) -> None:
    scene, calls = scene_of("target"), []

    def loss_fn(batch: Batch) -> Tensor:
        calls.append(batch)
        raise error

    config = quiet(run_dir=tmp_path, locate=True, policy=Policy(exceptions="skip"))
    with Guard(scene.model, scene.optimizer, config=config) as guard, pytest.raises(type(error)):
        guard.step(loss_fn, DATA[0])
    assert len(calls) == 1
    (incident,) = guard.incidents
    assert (
        incident.origin is not None
        and incident.origin.source is not None
        and incident.origin.reproduced is None
    )
    assert incident.capsule is None


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_interrupts_are_no_incident(ending: type[BaseException]) -> None:
    scene = scene_of("target")

    def loss_fn(batch: Batch) -> Tensor:
        raise ending

    config = quiet(policy=Policy(exceptions="skip"))
    with Guard(scene.model, scene.optimizer, config=config) as guard:
        with pytest.raises(ending):
            guard.step(loss_fn, DATA[0])
        assert guard.incidents == () and guard.step(scene.loss_fn, DATA[0]).committed


def test_exception_that_comes_again_and_again_is_not_run_again_each_time() -> None:
    scene, calls = scene_of("target"), [0]

    def loss_fn(batch: Batch) -> Tensor:
        calls[0] += 1
        return scene.loss_fn(batch)

    with Guard(scene.model, scene.optimizer, config=quiet(locate=True)) as guard:
        for _ in range(3):
            with pytest.raises(IndexError):
                guard.step(loss_fn, guilty(DATA[0]))
        before = calls[0]
        for _ in range(5):
            with pytest.raises(IndexError):
                guard.step(loss_fn, guilty(DATA[0]))
    assert calls[0] == before + 5


@pytest.mark.parametrize("kind", ["module", "backward"])
def test_exception_of_a_watched_loop_is_told_and_nothing_is_changed(
    kind: str, tmp_path: Path
) -> None:
    scene, (_, error, phase, _) = scene_of(kind), KINDS[kind]
    twin = scene_of(kind)
    for made in (scene, twin):
        torch.manual_seed(3)
        guard = stepguard.watch(
            made.model, made.optimizer, config=quiet(run_dir=tmp_path, locate=True)
        )
        if made is twin:
            guard.close()
        for batch in (DATA[0], guilty(DATA[1]), DATA[2]):
            made.optimizer.zero_grad()
            try:
                made.loss_fn(batch).backward()
            except error:
                continue
            made.optimizer.step()
        guard.close()
    assert difference(state_of(scene), state_of(twin)) == ""
    (incident,) = read_run(tmp_path).incidents
    assert (
        incident.verdict.kind == "exception"
        and incident.origin is not None
        and incident.origin.phase == phase
    )
    if kind == "module":
        assert incident.origin.module == "0" and incident.origin.samples == (GUILTY,)


def test_exception_of_another_models_backward_is_not_this_guards() -> None:
    scene, other = scene_of("target"), nn.Linear(2, 1)
    with stepguard.watch(scene.model, scene.optimizer, config=quiet()) as guard:
        with pytest.raises(FloatingPointError):
            TornBackward.apply(other(torch.zeros(3, 2)) * 0).sum().backward()
        assert guard.incidents == ()


SCRIPT = """
import torch, stepguard
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
GUARD
for step in range(6):
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    if step == 4:
        y[5] = 7
    LOOP
"""
LOOPS = {
    "step": (
        "guard = stepguard.Guard(model, optimizer, config=CONFIG)",
        "guard.step(lambda b: loss(b), (x, y))",
    ),
    "watch": ("guard = stepguard.watch(model, optimizer, config=CONFIG)", "plain((x, y))"),
    "run": ("", "plain((x, y))"),
}


@pytest.mark.parametrize("way", LOOPS)
def test_report_never_says_no_incident_of_a_run_that_crashed(way: str, tmp_path: Path) -> None:
    helpers = """
    CONFIG = stepguard.GuardConfig(run_dir="runs/a")
    def loss(batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def plain(batch):
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    """
    guard, loop = LOOPS[way]
    text = SCRIPT.replace("GUARD", textwrap.dedent(helpers) + guard).replace("LOOP", loop)
    (tmp_path / "train.py").write_text(text)
    command = (
        ["train.py"]
        if way != "run"
        else ["-m", "stepguard", "run", "--run-dir", "runs/a", "train.py"]
    )
    done = forked.python(command, folder=tmp_path, seconds=240)
    assert done.returncode == 1 and "IndexError: Target 7 is out of bounds" in done.stderr
    record = read_run(tmp_path / "runs" / "a")
    (incident,) = record.incidents
    assert incident.step == 4 and incident.origin is not None and incident.origin.phase == "loss"
    assert incident.origin.source is not None and incident.origin.source.startswith("train.py:")
    assert incident.origin.samples == ((5,) if way == "step" else ())
    (end,) = [note for note in record.notes if note["type"] == "end"]
    assert end["error"] == "IndexError: Target 7 is out of bounds."
    shown = forked.python(["-m", "stepguard", "report", "runs/a"], folder=tmp_path)
    assert "no incident" not in shown.stdout and "Target 7 is out of bounds" in shown.stdout


def test_exception_outside_of_a_step_is_in_the_end_line(tmp_path: Path) -> None:
    scene = scene_of("target")
    with (
        pytest.raises(FileNotFoundError),
        Guard(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)) as guard,
    ):
        guard.step(scene.loss_fn, DATA[0])
        raise FileNotFoundError("no such shard")
    record = read_run(tmp_path)
    assert (
        record.incidents == [] and record.notes[-1]["error"] == "FileNotFoundError: no such shard"
    )


def test_capsule_of_an_exception_raises_and_is_placed_again(tmp_path: Path) -> None:
    scene = scene_of("target")
    config = quiet(run_dir=tmp_path, locate=True)
    with Guard(scene.model, scene.optimizer, config=config) as guard, pytest.raises(IndexError):
        guard.step(scene.loss_fn, DATA[0], guilty(DATA[1]), DATA[2])
    capsule = guard.incidents[0].capsule
    assert capsule is not None
    fresh = scene_of("target")
    again = stepguard.replay(
        tmp_path / capsule, build=lambda: (fresh.model, fresh.optimizer, fresh.loss_fn)
    )
    assert again.origin is not None and again.origin.reproduced
    assert again.origin.samples == (GUILTY,) and again.origin.micro_batch == 1


# --- the record of an incident


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, config=quiet(run_dir=tmp_path, capsule="off")) as made:
        yield made


def test_name_that_is_taken_in_memory_or_on_disk_gets_a_number(
    guard: Guard, tmp_path: Path
) -> None:
    context = guard._context
    assert free_id(context, "00000000-nonfinite_loss") == "00000000-nonfinite_loss"
    record(context, incident_of(), step_of(DATA[0]))
    assert free_id(context, "00000000-nonfinite_loss") == "00000000-nonfinite_loss-2"
    incident_folder(tmp_path, "00000000-nonfinite_loss-2", 0).mkdir()
    assert free_id(context, "00000000-nonfinite_loss") == "00000000-nonfinite_loss-3"


def test_folder_that_cannot_be_written_costs_the_folder_only(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    incident = record(guard._context, incident_of(), step_of(DATA[0]))
    assert guard.incidents == (incident,)
    notes = [note["summary"] for note in read_run(tmp_path).notes]
    assert any("could not be written: OSError: No space left" in said for said in notes), notes
