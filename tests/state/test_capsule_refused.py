"""Capsules that are damaged, too new, foreign or hostile are refused with one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import stepguard
from state.capsules import Built, build, capsule_of, guarded, healthy
from stepguard._errors import CapsuleError


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
    assert f"says nothing about '{key}'" in refusal(folder, build=build)


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
