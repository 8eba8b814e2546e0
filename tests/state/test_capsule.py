"""A bad step on disk: what is written, what comes back, and what is refused in one sentence."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from cli.scripts import HEAD, line_of, python, write
from engine.parts import step_of
from scenes import batches, difference
from settings_of import config_of
from state.capsules import Built, build, capsule_of, guarded, healthy
from stepguard import CapsuleError, Guard, GuardConfig, Incident, Origin
from stepguard.journal import read_run
from stepguard.probes.whatif import copied_state
from stepguard.state.capsule import Window, read_capsule, read_window, window_step, write_window
from stepguard.state.run_state import RunState

NAN = math.nan


def same_origin(again: Incident, first: Incident) -> Origin:
    left, right = again.origin, first.origin
    assert left is not None
    assert right is not None
    fields = (
        "phase",
        "op",
        "module",
        "node",
        "source",
        "tensor",
        "samples",
        "micro_batch",
        "reproduced",
    )
    assert {f: getattr(left, f) for f in fields} == {f: getattr(right, f) for f in fields}
    assert [f.code for f in again.findings][:1] == [f.code for f in first.findings][:1]
    return left


def test_a_capsule_run_again_on_other_weights_gives_the_same_origin(tmp_path: Path) -> None:
    first = guarded(tmp_path, build(), [(healthy(),)] * 3 + [(healthy(-1.0),)])
    again = stepguard.replay(capsule_of(tmp_path, first), build=lambda: build(seed=99))
    origin = same_origin(again, first)
    assert (origin.op, origin.samples) == ("aten.log", (4,))


def test_everything_a_step_starts_from_is_filled_in(tmp_path: Path) -> None:
    built = build()
    model, optimizer, _ = built
    wanted: dict[str, Any] = {}

    def bad(batch: Any) -> Tensor:
        return built[2](batch) * NAN

    with Guard(model, optimizer, config=GuardConfig(run_dir=tmp_path, terminal="quiet")) as guard:
        for _ in range(3):
            guard.step(built[2], healthy())
        optimizer.param_groups[0]["lr"] = 0.123
        model.norm.eval()
        wanted = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
        moments = [
            {k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()
        ]
        guard.step(bad, healthy())
    seen: list[Any] = []
    fresh = build(seed=5)
    stepguard.replay(
        capsule_of(tmp_path, guard.incidents[0]),
        build=lambda: fresh,
        inspect=lambda step, _: seen.append(step),
    )
    twin, update = fresh[0], fresh[1]
    found = dict([*twin.named_parameters(), *twin.named_buffers()])
    assert found.keys() == wanted.keys()
    assert {"calls", "late"} <= found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    for parameter, slots in zip(twin.parameters(), moments, strict=True):
        for slot, value in slots.items():
            assert torch.equal(update.state[parameter][slot], value)
    assert update.param_groups[0]["lr"] == 0.123
    assert update.param_groups[0]["betas"] == (0.9, 0.999)
    assert [m.training for m in (twin, twin.inner, twin.norm)] == [True, True, False]  # type: ignore[union-attr]
    assert seen[0].index == 3


def test_a_nan_the_optimizer_makes_is_reproduced(tmp_path: Path) -> None:
    """Adam in fp16: epsilon 1e-8 rounds to 0, and a zero second moment divides 0 by 0."""

    def build_half() -> Built:
        torch.manual_seed(0)
        model = nn.Linear(4, 2, bias=False).half()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8, foreach=False)
        return model, optimizer, lambda x: (model(x) * torch.tensor([1.0, 0.0])).sum().float()

    first = guarded(tmp_path, build_half(), [(torch.ones(2, 4, dtype=torch.half),)])
    again = stepguard.replay(capsule_of(tmp_path, first), build=build_half)
    origin = same_origin(again, first)
    assert (origin.phase, origin.tensor) == ("optimizer", "param:weight")
    assert first.findings[0].code == "SG502"


def test_the_bad_micro_batch_of_several_is_found_again(tmp_path: Path) -> None:
    first = guarded(
        tmp_path, build(), [(healthy(),), (healthy(), healthy(), healthy(-1.0), healthy())]
    )
    origin = same_origin(stepguard.replay(capsule_of(tmp_path, first), build=build), first)
    assert origin.micro_batch == 2


@pytest.mark.slow
@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_a_failure_that_depends_on_random_numbers_is_reproduced(
    tmp_path: Path, source: str
) -> None:
    draws: dict[str, Callable[[], float]] = {
        "torch": lambda: torch.rand(()).item(),
        "numpy": lambda: float(np.random.rand()),
        "python": random.random,
    }

    def build_sampling() -> Built:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def loss_fn(x: Tensor) -> Tensor:
            time = max(draws[source]() - 0.1, 0.0)  # a tenth of all draws ends at exactly 0
            return (model(x) / torch.tensor(time)).pow(2).mean()

        return model, optimizer, loss_fn

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    steps = [(torch.randn(3, 4),) for _ in range(30)]
    policy = stepguard.Policy(max_consecutive=50)
    first = guarded(tmp_path, build_sampling(), steps, {"policy": policy})
    random.seed(0), np.random.seed(0)
    origin = same_origin(stepguard.replay(capsule_of(tmp_path, first), build=build_sampling), first)
    assert (origin.op, origin.reproduced) == ("aten.div", True)


def test_a_step_under_a_gradscaler_is_reproduced_with_its_scale(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    first = guarded(tmp_path, build(), [(healthy(),), (healthy(-1.0),)], scaler=scaler)
    folder = capsule_of(tmp_path, first)
    assert read_capsule(folder).facts["scale"] == 512.0
    same_origin(stepguard.replay(folder, build=build), first)


def test_a_bad_input_is_named_again(tmp_path: Path) -> None:
    batch = healthy()
    batch["x"][2, 1] = NAN
    first = guarded(tmp_path, build(), [(healthy(),), (batch,)])
    origin = same_origin(stepguard.replay(capsule_of(tmp_path, first), build=build), first)
    assert (origin.phase, origin.tensor, origin.samples) == ("input", "batch:x", (2,))


def test_complex_and_sparse_tensors_survive_the_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = torch.eye(3).to_sparse()

    def loss_fn(batch: Any) -> Tensor:
        out: Tensor = (
            torch.sparse.mm(batch["graph"], batch["x"].real) * model(batch["x"]).abs()
        ).sum()
        return out * batch["factor"]

    x = torch.randn(3, 3, dtype=torch.complex64)
    first = guarded(
        tmp_path, (model, optimizer, loss_fn), [({"x": x, "graph": graph, "factor": NAN},)]
    )
    batch = read_capsule(capsule_of(tmp_path, first)).decoded()[1][0]
    assert torch.equal(batch["x"], x)
    assert torch.equal(batch["graph"].to_dense(), torch.eye(3))
    assert batch["graph"].is_sparse


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = guarded(tmp_path, build(), [(healthy(-1.0),)])
    folder = capsule_of(tmp_path, first)
    assert sorted(p.name for p in folder.iterdir()) == ["capsule.json", "tensors.safetensors"]
    json.loads(
        (folder / "capsule.json").read_text(),
        parse_constant=lambda c: pytest.fail(f"{c} is no JSON"),
    )
    for module, name in (
        ("pickle", "load"),
        ("pickle", "loads"),
        ("pickle", "Unpickler"),
        ("torch", "load"),
    ):
        monkeypatch.setattr(f"{module}.{name}", lambda *a, **k: pytest.fail("unpickled"))
    same_origin(stepguard.replay(folder, build=build), first)


def test_no_data_keeps_everything_but_the_batch(tmp_path: Path) -> None:
    first = guarded(tmp_path, build(), [(healthy(-1.0),)], {"capsule": "no-data"})
    folder = capsule_of(tmp_path, first)
    assert not [
        name for name in load_file(folder / "tensors.safetensors") if name.startswith("batch")
    ]
    with pytest.raises(CapsuleError, match=r"holds no batch .*no-data.*not replayed"):
        stepguard.replay(folder, build=build)


def test_off_keeps_nothing(tmp_path: Path) -> None:
    first = guarded(tmp_path, build(), [(healthy(-1.0),)], {"capsule": "off"})
    assert first.capsule is None
    assert not list(tmp_path.rglob("capsule*"))


def test_a_batch_that_cannot_be_kept_says_why(tmp_path: Path) -> None:
    model, optimizer, loss_fn = build()
    batch = {**healthy(-1.0), "odd": object()}
    first = guarded(tmp_path, (model, optimizer, loss_fn), [(batch,)])
    with pytest.raises(CapsuleError, match="odd is a object"):
        stepguard.replay(capsule_of(tmp_path, first), build=build)


def test_a_tensor_safetensors_does_not_take_costs_only_the_capsule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("strange dtype")

    monkeypatch.setattr("stepguard.state.capsule.save_file", refuse)
    first = guarded(tmp_path, build(), [(healthy(-1.0),), (healthy(),)])
    assert first.capsule is None
    assert first.origin is not None
    record = read_run(tmp_path)
    assert [line["committed"] for line in record.steps][-1]
    assert any("strange dtype" in str(note.get("summary")) for note in record.notes)


# --- the steps before a bad one


PLENTY = 2**30


def window() -> Window:
    step = step_of(*batches(2), index=7, scale=8.0, clip_norm=0.5)
    state = copied_state(RunState(step.named_roots(), step.optimizer))
    return Window(state, [window_step(step, 0.25, (0.1,))], [window_step(step, None, ())])


def test_window_comes_back_as_it_was_written(tmp_path: Path) -> None:
    given = window()
    assert write_window(tmp_path, given, PLENTY) == ""
    found = read_window(tmp_path)
    assert found is not None
    assert found.first == 7
    assert difference(found.start.tensors, given.start.tensors) == ""
    assert found.start.facts == given.start.facts
    for before, after in zip(given.steps + given.others, found.steps + found.others, strict=True):
        assert difference(after.micro_batches, before.micro_batches) == ""
        assert (after.loss, after.lr) == (before.loss, before.lr)
        assert (after.scale, after.clip_norm) == (8.0, 0.5)
        assert all(map(torch.equal, (r.cpu for r in after.rng), (r.cpu for r in before.rng)))


def test_window_that_is_too_large_or_not_plain_is_refused_in_words(tmp_path: Path) -> None:
    assert "are left for them" in write_window(tmp_path, window(), 10)
    odd = window()
    odd.steps[0].micro_batches = (object(),)
    assert "object" in write_window(tmp_path, odd, PLENTY)
    assert read_window(tmp_path) is None


def test_damaged_window_is_one_clear_error(tmp_path: Path) -> None:
    write_window(tmp_path, window(), PLENTY)
    (tmp_path / "window" / "window.json").write_text('{"schema": 1}', encoding="utf-8")
    with pytest.raises(CapsuleError, match="damaged"):
        read_window(tmp_path)


# --- a step above `capsule_limit` is kept without weights


LIMIT = 20_000
"""Bytes: room for batch and random numbers of a step, not for the state of the model."""


class LargeNet(nn.Module):
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


def build_large(seed: int = 0) -> Built:
    torch.manual_seed(seed)
    model = LargeNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, lambda b: F.cross_entropy(model(b["x"], b["shift"]), b["y"])


def kept(
    run: Path, *, save_at: int | None = None, bad_at: int = 3, shift: float = -1.0
) -> tuple[Incident, dict[str, torch.Tensor]]:
    """The incident of the last step, and the parameters it began from."""
    model, optimizer, loss_fn = build_large()
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
    model, optimizer, loss_fn = build_large(seed=99)
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
    model, optimizer, loss_fn = build_large(seed=99)
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
    model, optimizer, loss_fn = build_large()
    config = config_of(run_dir=tmp_path, terminal="quiet", capsule_limit=LIMIT)
    with Guard(model, optimizer, config=config) as guard:
        guard.step(loss_fn, healthy())
        guard.save()
        guard.step(loss_fn, healthy())
        with torch.no_grad():
            model.outer.weight.fill_(3e38)  # type: ignore[union-attr,operator]
        guard.step(loss_fn, healthy())
    again = stepguard.replay(capsule_of(tmp_path, guard.incidents[0]), build=build_large)
    assert again.origin is not None
    assert again.origin.reproduced is None
    assert "weights of step 1, the bad step was 2" in again.origin.remarks[-1]
    assert "SG702" not in [finding.code for finding in again.findings]


def test_without_a_checkpoint_the_weights_of_the_build_function_are_used(tmp_path: Path) -> None:
    first, _ = kept(tmp_path)
    assert not first.replayable
    assert "no checkpoint of this run is sealed yet" in notes(tmp_path)
    model, optimizer, loss_fn = build_large(seed=99)
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
    model, optimizer, loss_fn = build_large()
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
    again = stepguard.replay(folder, build=build_large)
    assert again.origin is not None
    assert "weights of step 3, the bad step was 1" in again.origin.remarks[-1]
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CapsuleError, match="no sealed checkpoint has them"):
        stepguard.replay(folder, script="train.py")
    again = stepguard.replay(folder, build=build_large)
    assert again.origin is not None
    assert "the weights are those of the build function" in again.origin.remarks[-1]


def test_a_checkpoint_of_another_run_in_the_folder_is_not_named(tmp_path: Path) -> None:
    model, optimizer, _ = build_large()
    with Guard(model, optimizer, config=config_of(run_dir=tmp_path, terminal="quiet")) as guard:
        assert guard.save() is not None
    first, _ = kept(tmp_path)
    facts = json.loads((capsule_of(tmp_path, first) / "capsule.json").read_text())
    assert "checkpoint" not in facts["without_weights"]


def test_a_batch_above_the_limit_is_not_kept(tmp_path: Path) -> None:
    first = guarded(tmp_path, build_large(), [(healthy(-1.0),)], {"capsule_limit": 100})
    assert first.capsule is None
    assert not list(tmp_path.rglob("capsule*"))
    assert "GuardConfig.capsule_limit allows 100" in notes(tmp_path)


SCRIPT = (
    HEAD
    + """
import stepguard


class LargeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 512), nn.Linear(512, 3)

    def forward(self, x, shift):
        return self.outer(self.inner(x) + torch.log(shift)[:, None])  # BORN HERE


model = LargeNet()
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


# --- capsules that are damaged, too new, foreign or hostile are refused with one sentence


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one capsule, which no test changes."""
    run = tmp_path_factory.mktemp("good")
    guarded(run, build(), [(healthy(-1.0),)])
    return run


@pytest.fixture
def folder(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good capsule, in a project of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    (found,) = tmp_path.glob("incidents/*/capsule")
    return found


def edit(folder: Path, **facts: Any) -> None:
    path = folder / "capsule.json"
    kept = {k: v for k, v in {**json.loads(path.read_text()), **facts}.items() if v is not ...}
    path.write_text(json.dumps(kept))


def refusal(folder: Path, **given: Any) -> str:
    with pytest.raises(CapsuleError) as caught:
        stepguard.replay(folder, confirm=lambda command: True, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_newer_schema_asks_for_an_upgrade(folder: Path) -> None:
    edit(folder, schema=99)
    assert "schema 99; this stepguard reads 3: upgrade it" in refusal(folder, build=build)


def test_a_capsule_of_an_earlier_version_names_the_way_out(folder: Path) -> None:
    edit(folder, schema=1)
    message = refusal(folder, build=build)
    assert "has schema 1" in message
    assert "replay with the version that wrote it" in message


@pytest.mark.parametrize("schema", [None, "1", [1]])
def test_a_schema_that_is_not_a_number_is_refused(folder: Path, schema: Any) -> None:
    edit(folder, schema=schema)
    assert "has schema" in refusal(folder, build=build)


@pytest.mark.parametrize("name", ["capsule.json", "tensors.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"is not a capsule: {name} is missing" in refusal(folder, build=build)


def test_a_folder_that_does_not_exist_is_not_a_capsule(tmp_path: Path) -> None:
    assert "capsule.json is missing" in refusal(tmp_path / "nowhere", build=build)


@pytest.mark.parametrize("name", ["capsule.json", "tensors.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_file_is_refused(folder: Path, name: str, share: float) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])
    assert "cannot be read" in refusal(folder, build=build)


@pytest.mark.parametrize("key", ["reading", "rng", "scale", "step", "verdict", "state"])
def test_a_missing_fact_is_named(folder: Path, key: str) -> None:
    edit(folder, **{key: ...})
    assert f"lacks '{key}'" in refusal(folder, build=build)


@pytest.mark.parametrize(
    "facts",
    [
        {"reading": {"step": "x"}},
        {"rng": [{"name": "nowhere"}]},
        {"micro_batches": [{"tensor": "../../etc/passwd"}]},
        {"micro_batches": [{"nothing": 1}]},
        {"micro_batches": 3},
        {"state": {"groups": 3}},
    ],
)
def test_odd_contents_are_damage(folder: Path, facts: dict[str, Any]) -> None:
    edit(folder, **facts)
    assert "is damaged" in refusal(folder, build=build)


def test_a_batch_nested_without_end_is_damage(folder: Path) -> None:
    edit(folder, micro_batches=["BATCH"])
    path = folder / "capsule.json"
    path.write_text(
        path.read_text().replace('"BATCH"', '{"list": [' * 900 + '{"value": 1}' + "]}" * 900)
    )
    message = refusal(folder, build=build)
    assert "damaged" in message or "cannot be read" in message


def test_another_model_is_refused_with_the_first_difference(folder: Path) -> None:
    def wider() -> Built:
        model, optimizer, loss_fn = build()
        model.outer = nn.Linear(8, 5)
        return model, optimizer, loss_fn

    difference = "model/outer.bias is float32 [5] in the model and float32 [3] in the saved"
    assert difference in refusal(folder, build=wider)
    other = nn.Linear(1, 1)
    message = refusal(folder, build=lambda: (other, torch.optim.AdamW(other.parameters()), len))
    assert "model/weight is in the model and not in the saved state" in message


def test_another_optimizer_is_refused(folder: Path) -> None:
    def other() -> Built:
        model, _, loss_fn = build()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn

    assert "the optimizer is SGD, the capsule's was AdamW" in refusal(folder, build=other)


@pytest.mark.parametrize("built", [None, 3, (1, 2, 3), (nn.Linear(1, 1), None)])
def test_a_build_function_that_returns_something_else_is_told_what_to_return(
    folder: Path, built: Any
) -> None:
    assert "return (model, optimizer, loss_fn)" in refusal(folder, build=lambda: built)


def test_neither_script_nor_build_says_what_to_pass(folder: Path) -> None:
    edit(folder, script=None, build=None)
    assert "pass script='train.py', or build=" in refusal(folder)


@pytest.mark.parametrize("script", ["../../evil.py", "/etc/evil.py", "../evil.py"])
def test_a_script_outside_the_current_directory_is_refused(folder: Path, script: str) -> None:
    evil = (folder.parents[2] / script).resolve()
    if evil.is_relative_to(folder.parents[2].parent):
        evil.write_text("raise SystemExit('executed')")
    edit(folder, script=script)
    assert "outside the current directory" in refusal(folder)
    assert "outside the current directory" in refusal(folder, script=script)


def test_a_link_that_leads_outside_is_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    evil = tmp_path_factory.mktemp("outside") / "evil.py"
    evil.write_text("raise SystemExit('executed')")
    (Path.cwd() / "train.py").symlink_to(evil)
    assert "outside the current directory" in refusal(folder, script="train.py")


@pytest.mark.parametrize(
    "named",
    [
        "../../evil:go",
        "json:loads",
        "os:system",
        "torch.hub:load",
        "nowhere:go",
        "a..b:go",
        ":go",
        "sys:exit",
    ],
)
def test_a_build_function_from_elsewhere_is_refused(folder: Path, named: str) -> None:
    edit(folder, build=named)
    message = refusal(folder)
    assert "outside the current directory" in message or "there is no module" in message


def test_a_build_function_that_is_missing_or_fails_is_said(folder: Path) -> None:
    Path("making_objects.py").write_text("x = 3\n")
    assert "has no function 'go'" in refusal(folder, build="making_objects:go")
    Path("making_trouble.py").write_text("1 / 0\n")
    assert "importing it failed: ZeroDivisionError" in refusal(folder, build="making_trouble:go")


def test_a_script_that_fails_or_never_steps_is_said(folder: Path) -> None:
    Path("fails.py").write_text("1 / 0\n")
    assert "fails.py failed before its step could be taken: ZeroDivisionError" in refusal(
        folder, script="fails.py"
    )
    Path("empty.py").write_text("")
    assert "ended without calling guard.step" in refusal(folder, script="empty.py")
    Path("leaves.py").write_text("raise SystemExit(4)")
    assert "ended with exit code 4" in refusal(folder, script="leaves.py")


@pytest.mark.parametrize("name", ["optimizer/outer.bias/exp_avg", "model/outer.bias"])
def test_a_missing_tensor_is_refused(tmp_path: Path, name: str) -> None:
    steps = [(healthy(),), (healthy(-1.0),)]
    folder = capsule_of(tmp_path, guarded(tmp_path, build(), steps))
    tensors = load_file(folder / "tensors.safetensors")
    del tensors[name]
    save_file(tensors, folder / "tensors.safetensors")
    message = refusal(folder, build=build)
    assert "is damaged" in message or "does not fit" in message
