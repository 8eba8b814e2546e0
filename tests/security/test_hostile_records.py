"""Capsules and seals of anything: a result or one error, never a traceback, within bounds."""

from __future__ import annotations

import copy
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from security.test_capsule_code import build, capsule_of, guarded, healthy
from security.test_hostile_text import JSON, invoke
from stepguard._errors import CapsuleError, StoreError
from stepguard.checkpoints import Health, Store
from stepguard.checkpoints.seal import digest_of
from stepguard.state.capsule import check_capsule, read_capsule

EXAMPLES = settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
MEMORY = 64 << 20
ODD = JSON | st.sampled_from(
    [float("nan"), float("inf"), -1, 2**63, 10**400, "\x1b[2J", "../x", "x" * 3000, [[]] * 500]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, the value itself included."""
    yield path
    for key, one in value.items() if isinstance(value, dict) else ():
        yield from places(one, (*path, key))
    for key, one in enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return made


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capsule")
    return capsule_of(folder / "run", guarded(folder / "run", build(), [(healthy(-1.0),)]))


@pytest.mark.slow
@EXAMPLES
@given(data=st.data(), odd=ODD)
def test_capsule_json_of_anything_is_a_capsule_or_one_error(
    capsule: Path, data: st.DataObject, odd: Any
) -> None:
    path = capsule / "capsule.json"
    facts = path.read_text()
    plain = json.loads(facts)
    content = changed(plain, data.draw(st.sampled_from(list(places(plain)))), odd)
    model, optimizer, _ = build()
    tracemalloc.start()
    try:
        path.write_text(json.dumps(content))
        check_capsule(capsule)
        found = read_capsule(capsule)
        assert not found.made_here or content == plain
        assert isinstance(found.command, str) and isinstance(found.differences(), list)
        found.decoded()
        found.saved_state()
        found.fill({"": model}, optimizer)
    except CapsuleError as error:
        assert len(str(error)) < 5000
    finally:
        path.write_text(facts)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY


@pytest.mark.parametrize("content", ["[" * 200_000, "", "null", "[]", '"x"', "\x00", "{" * 9])
def test_capsule_json_that_is_not_one_is_one_error(capsule: Path, content: str) -> None:
    path = capsule / "capsule.json"
    facts = path.read_text()
    try:
        path.write_text(content)
        for command in ("replay", "whatif", "fix"):
            shown = invoke(command, capsule, "--yes")
            assert shown.exit_code == 2 and isinstance(shown.exception, SystemExit)
    finally:
        path.write_text(facts)


@pytest.mark.parametrize("name", ["capsule.json", "tensors.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_capsule_of_special_files_is_not_opened(
    capsule: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """A FIFO would be waited for, a device read without end, a link lead elsewhere."""
    folder = tmp_path / "capsule"
    folder.mkdir()
    for file in capsule.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "device" else capsule / name)
    for read in (read_capsule, check_capsule):
        with pytest.raises(CapsuleError, match=f"{name} is not a regular file"):
            read(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "checkpoints"
    health = Health(loss=1.0, level=1.1, steps_watched=50, incidents=0, good=True)
    tensors = {"model/w": torch.ones(4, 4), "optimizer/w/exp_avg": torch.ones(4, 4)}
    Store(folder).save(10, tensors, {"note": "x"}, health)
    return folder


@pytest.mark.slow
@EXAMPLES
@given(data=st.data(), odd=ODD)
def test_seal_of_anything_is_a_seal_or_one_error(
    store: Path, data: st.DataObject, odd: Any
) -> None:
    """With a digest that fits: anybody can write one."""
    path = store / "step-10" / "seal.json"
    before = path.read_bytes()
    plain = json.loads(before)["seal"]
    body = json.dumps(changed(plain, data.draw(st.sampled_from(list(places(plain)))), odd)).encode()
    tracemalloc.start()
    try:
        path.chmod(0o600)
        path.write_bytes(b'{"digest":"%b","seal":%b}\n' % (digest_of(body).encode(), body))
        shown = invoke("verify", store, "--json")
        assert isinstance(shown.exception, SystemExit | None)
        Store(store).open("last-good")
    except StoreError as error:
        assert len(str(error)) < 5000
    finally:
        path.write_bytes(before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY
