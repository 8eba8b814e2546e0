"""A step above `capsule_limit` is kept without weights, and run with those of a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from cli.scripts import HEAD, line_of, python, write
from settings_of import config_of
from state.capsules import Built, capsule_of, guarded, healthy
from stepguard import CapsuleError, Guard, Incident
from stepguard.journal import read_run

LIMIT = 20_000
"""Bytes: room for batch and random numbers of a step, not for the state of the model."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = (
            nn.Linear(4, 512),
            nn.BatchNorm1d(512),
            nn.Linear(512, 3),
        )

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.inner(x)) + torch.log(shift)[:, None]
        out: Tensor = self.outer(F.relu(hidden))
        return out


def build(seed: int = 0) -> Built:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, lambda b: F.cross_entropy(model(b["x"], b["shift"]), b["y"])


def kept(
    run: Path, *, save_at: int | None = None, bad_at: int = 3, shift: float = -1.0
) -> tuple[Incident, dict[str, torch.Tensor]]:
    """The incident of the last step, and the parameters it began from."""
    model, optimizer, loss_fn = build()
    config = config_of(run_dir=run, terminal="quiet", capsule_limit=LIMIT)
    with Guard(model, optimizer, config=config) as guard:
        for step in range(bad_at):
            if step == save_at:
                assert guard.save() is not None
            guard.step(loss_fn, healthy())
        optimizer.param_groups[0]["lr"] = 0.123
        if save_at == bad_at:
            assert guard.save() is not None
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        guard.step(loss_fn, healthy(shift))
    return guard.incidents[-1], before


def notes(run: Path) -> str:
    return "\n".join(note.get("summary", "") for note in read_run(run).notes)


def test_it_holds_batch_and_random_numbers_and_names_the_checkpoint(tmp_path: Path) -> None:
    first, _ = kept(tmp_path, save_at=2)
    folder = capsule_of(tmp_path, first)
    names = {name.partition("/")[0] for name in load_file(folder / "tensors.safetensors")}
    assert names == {"batch", "micro_rng"}
    facts = json.loads((folder / "capsule.json").read_text())
    assert facts["without_weights"]["checkpoint"] == "checkpoints/step-2"
    assert facts["without_weights"]["step"] == 2
    assert (tmp_path / "checkpoints" / "step-2" / "seal.json").is_file()
    said = notes(tmp_path)
    assert "more than 20 kB (GuardConfig.capsule_limit)" in said
    assert "takes them from checkpoints/step-2" in said


def test_a_checkpoint_of_the_bad_step_makes_the_replay_exact(tmp_path: Path) -> None:
    first, before = kept(tmp_path, save_at=3)
    model, optimizer, loss_fn = build(seed=99)
    again = stepguard.replay(capsule_of(tmp_path, first), build=lambda: (model, optimizer, loss_fn))
    assert again.origin is not None and first.origin is not None
    assert (again.origin.op, again.origin.samples) == ("aten.log", (4,))
    assert again.origin.source == first.origin.source
    assert again.origin.reproduced is True
    assert again.origin.remarks == first.origin.remarks
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert optimizer.param_groups[0]["lr"] == 0.123
    assert optimizer.state[next(model.parameters())]["step"] == 3


def test_an_older_checkpoint_is_named_with_both_steps(tmp_path: Path) -> None:
    first, _ = kept(tmp_path, save_at=1)
    model, optimizer, loss_fn = build(seed=99)
    again = stepguard.replay(capsule_of(tmp_path, first), build=lambda: (model, optimizer, loss_fn))
    assert again.origin is not None
    assert (again.origin.op, again.origin.samples) == ("aten.log", (4,))
    assert again.origin.reproduced is True
    assert again.origin.remarks[-1] == (
        "weights of step 1, the bad step was 3: the origin may differ"
    )
    # hyperparameters are those of the bad step
    assert optimizer.param_groups[0]["lr"] == 0.123


def test_older_weights_on_which_the_step_is_finite_are_no_transient_fault(tmp_path: Path) -> None:
    """The weights had become so large by then that the loss overflowed."""
    model, optimizer, loss_fn = build()
    config = config_of(run_dir=tmp_path, terminal="quiet", capsule_limit=LIMIT)
    with Guard(model, optimizer, config=config) as guard:
        guard.step(loss_fn, healthy())
        guard.save()
        guard.step(loss_fn, healthy())
        with torch.no_grad():
            model.outer.weight.fill_(3e38)  # type: ignore[union-attr,operator]
        guard.step(loss_fn, healthy())
    again = stepguard.replay(capsule_of(tmp_path, guard.incidents[0]), build=build)
    assert again.origin is not None
    assert again.origin.reproduced is None
    assert "weights of step 1, the bad step was 2" in again.origin.remarks[-1]
    assert "SG702" not in [finding.code for finding in again.findings]


def test_without_a_checkpoint_the_weights_of_the_build_function_are_used(tmp_path: Path) -> None:
    first, _ = kept(tmp_path)
    assert not first.replayable
    assert "no checkpoint of this run is sealed yet" in notes(tmp_path)
    model, optimizer, loss_fn = build(seed=99)
    mine = {name: p.detach().clone() for name, p in model.named_parameters()}
    again = stepguard.replay(capsule_of(tmp_path, first), build=lambda: (model, optimizer, loss_fn))
    assert again.origin is not None
    assert (again.origin.op, again.origin.samples) == ("aten.log", (4,))
    assert "the weights are those of the build function" in again.origin.remarks[-1]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, mine[name]), name
    with pytest.raises(CapsuleError, match=r"holds no weights .*capsule_limit.*Pass --build"):
        stepguard.replay(capsule_of(tmp_path, first), script="train.py")


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_lost_checkpoint_is_replaced_by_the_last_good_one(tmp_path: Path, how: str) -> None:
    model, optimizer, loss_fn = build()
    config = config_of(run_dir=tmp_path, terminal="quiet", capsule_limit=LIMIT)
    with Guard(model, optimizer, config=config) as guard:
        guard.step(loss_fn, healthy())
        guard.save()
        guard.step(loss_fn, healthy(-1.0))
        guard.step(loss_fn, healthy())
        guard.save()
    folder = capsule_of(tmp_path, guard.incidents[0])
    named = tmp_path / "checkpoints" / "step-1"
    if how == "gone":
        shutil.rmtree(named)
    else:
        file = next(named.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    again = stepguard.replay(folder, build=build)
    assert again.origin is not None
    assert "weights of step 3, the bad step was 1" in again.origin.remarks[-1]
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CapsuleError, match="no sealed checkpoint has them"):
        stepguard.replay(folder, script="train.py")
    again = stepguard.replay(folder, build=build)
    assert again.origin is not None
    assert "the weights are those of the build function" in again.origin.remarks[-1]


def test_a_checkpoint_of_another_run_in_the_folder_is_not_named(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    with Guard(model, optimizer, config=config_of(run_dir=tmp_path, terminal="quiet")) as guard:
        guard.save()
    first, _ = kept(tmp_path)
    facts = json.loads((capsule_of(tmp_path, first) / "capsule.json").read_text())
    assert "checkpoint" not in facts["without_weights"]


def test_a_batch_above_the_limit_is_not_kept(tmp_path: Path) -> None:
    first = guarded(tmp_path, build(), [(healthy(-1.0),)], {"capsule_limit": 100})
    assert first.capsule is None
    assert not list(tmp_path.rglob("capsule*"))
    assert "GuardConfig.capsule_limit allows 100" in notes(tmp_path)


SCRIPT = (
    HEAD
    + """
import stepguard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 512), nn.Linear(512, 3)

    def forward(self, x, shift):
        return self.outer(self.inner(x) + torch.log(shift)[:, None])  # BORN HERE


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = stepguard.GuardConfig(
    run_dir="run", terminal="quiet", capsule_limit=20_000, checkpoint_every=EVERY,
    snapshots=stepguard.Snapshots(probation=1),
)
with stepguard.Guard(model, optimizer, config=config) as guard:
    for step in range(7):
        shift = torch.ones(6)
        if step == 6:
            shift[4] = -1.0
        batch = {"x": torch.randn(6, 4), "y": torch.randint(3, (6,)), "shift": shift}
        guard.step(
            lambda b: nn.functional.cross_entropy(model(b["x"], b["shift"]), b["y"]), batch
        )
"""
)


def replayed(folder: Path, script: str) -> Any:
    write(folder, script)
    done = python(folder, "train.py")
    assert done.returncode == 0, done.stderr
    capsule = next(folder.glob("run/incidents/*/capsule")).relative_to(folder)
    return python(folder, "-m", "stepguard", "replay", "--yes", "--json", str(capsule))


@pytest.mark.process
def test_fresh_process_finds_operation_line_and_sample(tmp_path: Path) -> None:
    script = SCRIPT.replace("EVERY", "4")
    done = replayed(tmp_path, script)
    assert done.returncode == 0, done.stderr
    origin = json.loads(done.stdout)["origin"]
    assert (origin["op"], origin["samples"]) == ("aten.log", [4])
    assert origin["source"] == f"train.py:{line_of(script)}"
    assert "weights of step 4, the bad step was 6: the origin may differ" in origin["remarks"][-1]


@pytest.mark.process
def test_fresh_process_without_a_checkpoint_says_what_is_needed(tmp_path: Path) -> None:
    done = replayed(tmp_path, SCRIPT.replace("EVERY", "None"))
    assert done.returncode == 2
    assert "holds no weights" in done.stderr
    assert "--build" in done.stderr
