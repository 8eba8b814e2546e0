"""A bad step on disk: what is written, what comes back, and what is refused with one clear
sentence.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import stepguard
from state.capsules import Built, build, capsule_of, guarded, healthy
from stepguard import Guard, GuardConfig, Incident, Origin
from stepguard._errors import CapsuleError
from stepguard.journal import read_run
from stepguard.state.capsule import read_capsule

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


# --- there and back
# ------------------------------------------------------------------------------------------------


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
    steps = [(torch.randn(3, 4),) for _ in range(60)]
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


# --- what is kept
# --------------------------------------------------------------------------------------------------


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
