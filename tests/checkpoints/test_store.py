"""A folder of checkpoints: what is kept, opened, refused, and who may write."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.disk.faults import Failing, Lying, Recorder
from benchmarks.disk.states import GOOD, facts_at, state_at
from hypothesis import given
from hypothesis import strategies as st

import forked
from checkpoints.kit import SIZE, held, in_child, names, saved
from stepguard._errors import StepguardError, StoreError
from stepguard.checkpoints import Entry, Store, files, read_seal, seal
from stepguard.checkpoints import store as opening
from stepguard.checkpoints.seal import removable
from stepguard.state.files import Operation

DOUBTFUL = replace(GOOD, good=False)


def test_checkpoint_has_seal_facts_and_tensors(tmp_path: Path) -> None:
    path = Store(tmp_path / "runs" / "checkpoints").save(
        7, state_at(7), {"config": {"lr": 0.1}}, GOOD
    )
    assert path == tmp_path / "runs" / "checkpoints" / "step-7"
    assert sorted(p.name for p in path.iterdir()) == [
        "facts.json",
        "seal.json",
        "tensors-00000.safetensors",
    ]
    seal = read_seal(path)
    assert (seal.step, seal.health, seal.config, seal.serial) == (7, GOOD, {"lr": 0.1}, 1)
    assert seal.versions["torch"] == torch.__version__
    assert (
        json.loads((path / "seal.json").read_text())["seal"]["tensors"]["model/weight"]["dtype"]
        == "float32"
    )


def test_health_that_is_not_a_number_is_sealed_as_it_is(tmp_path: Path) -> None:
    health = replace(DOUBTFUL, loss=math.inf, level=None)
    assert read_seal(Store(tmp_path).save(1, {}, {}, health)).health == health


LIMITED = """
import os, resource, sys
from pathlib import Path
import torch
from benchmarks.disk.states import GOOD
from stepguard.checkpoints import Store

work, folder, kind, spare = sys.argv[1:]
tensor = torch.ones(1).expand(4096, 4096) if kind == "expanded" else torch.ones(4096, 4096)
if kind == "transposed":
    tensor = tensor.t()
if work == "open":
    del tensor
used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + int(spare), used + int(spare)))
store = Store(Path(folder))
if work == "save":
    store.save(1, {"t": tensor}, {}, GOOD)
else:
    store.open()
"""
"""Of its own process: in one that has run other tests, freed memory would count as spare."""


@pytest.mark.parametrize("kind", ["contiguous", "expanded", "transposed"])
def test_neither_saving_nor_opening_needs_a_second_copy(kind: str, tmp_path: Path) -> None:
    size = 4 * 4096 * 4096

    def works(work: str, spare: int) -> bool:
        search = os.pathsep.join(filter(None, sys.path))
        words = ["-c", LIMITED, work, str(tmp_path), kind, str(spare)]
        ended = forked.python(words, variables={**os.environ, "PYTHONPATH": search})
        return ended.returncode == 0

    assert works("save", size // 2)
    assert works("open", size + size // 2)
    assert not works("open", size // 2)


def test_last_good_is_what_was_saved_last(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2)
    opened = store.open()
    assert held(opened) == 2
    assert (opened.health, opened.passed_over) == (GOOD, ())


def test_checkpoint_that_is_not_good_never_becomes_last_good(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1)
    store.save(2, state_at(2, SIZE), facts_at(2), DOUBTFUL)
    assert held(store.open()) == 1
    assert held(store.open("step-2")) == 2
    (tmp_path / "last-good").unlink()
    assert held(store.open()) == 1


def test_nothing_good_yet_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(2, state_at(2, SIZE), facts_at(2), DOUBTFUL)
    with pytest.raises(
        StoreError, match="holds no sealed good checkpoint; there is nothing to open"
    ):
        store.open()
    with pytest.raises(StoreError, match="does not exist; there is no checkpoint to open"):
        Store(tmp_path / "elsewhere").open()


def test_same_step_saved_again_after_a_rewind_is_the_newer_one(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    saved(store, 100, 120)
    store.save(100, {"model/weight": torch.full((3,), 5.0)}, {"turn": 2}, GOOD)
    assert store.open().facts == store.open("step-100").facts == {"turn": 2}
    assert [entry.path.name for entry in store.list()] == ["step-100-2", "step-120", "step-100"]


def test_everything_is_on_disk_before_the_name_and_the_name_before_the_pointer(
    tmp_path: Path,
) -> None:
    disk = Recorder()
    saved(Store(tmp_path, disk=disk), 5)
    done = [(op.kind, (op.target or op.path).name) for op in disk.operations]
    order = [
        done.index(("sync", "tensors-00000.safetensors")),
        done.index(("sync", "facts.json")),
        done.index(("create", "seal.json")),
        done.index(("sync", "seal.json")),
        next(
            i
            for i, (kind, name) in enumerate(done)
            if kind == "sync_folder" and name.endswith(".tmp")
        ),
        done.index(("rename", "step-5")),
        next(
            i
            for i, (kind, name) in enumerate(done)
            if (kind, name) == ("sync_folder", tmp_path.name)
        ),
        done.index(("rename", "last-good")),
    ]
    assert order == sorted(order)
    assert done[-1] == ("sync_folder", tmp_path.name)


def test_large_files_are_synced_as_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PACE", 4000)
    disk = Recorder()
    Store(tmp_path, disk=disk).save(1, {f"t{i}": torch.ones(1000) for i in range(5)}, {}, GOOD)
    kinds = [op.kind for op in disk.operations if op.path.suffix == ".safetensors"]
    assert kinds == ["create", "write", *(["write", "sync"] * 5), "sync"]


def _all_operations(folder: Path) -> list[Operation]:
    disk = Recorder()
    store = Store(folder, keep=1, disk=disk)
    saved(store, 1)
    disk.operations.clear()
    saved(store, 2)
    return disk.operations


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mkdir", "create", "write", "sync", "sync_folder", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_any_failing_operation_leaves_the_previous_checkpoint_and_nothing_else(
    kind: str, code: int, tmp_path: Path
) -> None:
    count = sum(op.kind == kind for op in _all_operations(tmp_path / "counted"))
    for number in range(count):
        folder = tmp_path / f"{number}"
        saved(Store(folder), 1)
        disk = Failing(kind, number=number, code=code, times=1)
        said: list[str] = []
        store = Store(folder, keep=1, disk=disk, say=said.append)
        try:
            saved(store, 2)
        except StoreError as fault:
            assert "the checkpoint of step 2 was not written" in str(fault)
            assert held(Store(folder).open()) == 1
        else:
            assert said, (
                "what does not end the save must be said: a rotation, or the very last sync"
            )
            assert held(Store(folder).open()) == 2
        assert disk.failed == 1
        saved(Store(folder, keep=1), 3)
        assert names(folder) == ["last-good", "step-3"]


def test_failing_save_says_what_failed_and_what_still_is_good(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    with pytest.raises(
        StepguardError, match=r"No space left on device.*last good checkpoint is still step-1\."
    ):
        saved(Store(tmp_path, disk=Failing("write", number=2, code=errno.ENOSPC)), 2)
    assert names(tmp_path) == ["last-good", "step-1"]
    with pytest.raises(StepguardError, match=r"there is no good checkpoint yet\."):
        saved(Store(tmp_path / "new", disk=Failing("sync")), 2)
    assert names(tmp_path / "new") == []


def test_interrupted_save_cleans_up_and_lets_the_interrupt_pass(tmp_path: Path) -> None:
    class Interrupted(Recorder):
        def perform(self, operation, act):  # type: ignore[no-untyped-def]
            if operation.path.name == "facts.json":
                raise KeyboardInterrupt
            return super().perform(operation, act)

    saved(Store(tmp_path), 1)
    with pytest.raises(KeyboardInterrupt):
        saved(Store(tmp_path, disk=Interrupted()), 2)
    assert names(tmp_path) == ["last-good", "step-1"]


def test_disk_that_keeps_wrong_bytes_is_found_before_the_seal(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    for number in range(4):
        with pytest.raises(
            StoreError,
            match="reads back different from what was written; the disk cannot be trusted",
        ):
            saved(Store(tmp_path, disk=Lying(number)), 2)
    assert names(tmp_path) == ["last-good", "step-1"]


def test_litter_of_dead_writers_is_removed_by_the_next_save_and_nothing_else(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    saved(store, 1)
    for name in (".step-2.4711-0.tmp", ".step-1.4711-3.old", ".step-9-2.1-1.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".last-good.4711-5.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".step-7.tmp").mkdir()
    saved(store, 3)
    assert names(tmp_path) == [".step-7.tmp", "last-good", "notes.txt", "step-1", "step-3"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": 0}, "keep=0 would delete the last good checkpoint; use 1 or more"),
        ({"keep_every": 0}, "keep_every=0 is not a number of steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=words):
        Store(tmp_path, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 1.5, True, "7"])
def test_step_that_is_not_a_count_is_refused(step: object, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a number of optimizer steps"):
        Store(tmp_path).save(step, {}, {}, GOOD)  # type: ignore[arg-type]


def test_facts_that_are_not_json_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match="facts of a checkpoint must be plain JSON values: Object of type Tensor"
    ):
        Store(tmp_path).save(1, {}, {"x": torch.ones(1)}, GOOD)
    assert names(tmp_path) == []


# --- opening: every byte is proven, and damaged checkpoints are passed over by name


TENSORS = "tensors-00000.safetensors"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped weight": (
        lambda p: flip(p / TENSORS, -5),
        "is not what was sealed: optimizer/weight/exp_avg_sq differs",
    ),
    "flipped header": (
        lambda p: flip(p / TENSORS, 20),
        "is not what was sealed: its header differs",
    ),
    "flipped fact": (
        lambda p: flip(p / "facts.json", 5),
        "is not what was sealed: its digest differs",
    ),
    "flipped seal": (lambda p: flip(p / "seal.json", 60), "does not match its own digest"),
    "torn tensors": (
        lambda p: (p / TENSORS).write_bytes((p / TENSORS).read_bytes()[:-9]),
        "is incomplete: .* bytes",
    ),
    "longer tensors": (
        lambda p: (p / TENSORS).write_bytes((p / TENSORS).read_bytes() + b"\0"),
        "is incomplete",
    ),
    "empty seal": (lambda p: (p / "seal.json").write_bytes(b""), "is not in the format of a seal"),
    "no seal": (lambda p: (p / "seal.json").unlink(), "seal.json is missing"),
    "no facts": (lambda p: (p / "facts.json").unlink(), "facts.json is missing"),
    "no tensors": (lambda p: (p / TENSORS).unlink(), f"{TENSORS} is missing"),
    "no folder": (lambda p: shutil.rmtree(p), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_passed_over_by_name(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2)
    harm, words = DAMAGES[damage]
    harm(tmp_path / "step-2")
    opened = store.open()
    assert held(opened) == 1
    reasons = " | ".join(f"{passed.path.name}: {passed.reason}" for passed in opened.passed_over)
    assert "step-2" in reasons
    with pytest.raises(StoreError, match=words):
        store.open(tmp_path / "step-2")


def test_error_names_every_candidate_and_why(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2, 3)
    flip(tmp_path / "step-3" / TENSORS, -5)
    (tmp_path / "step-2" / "facts.json").unlink()
    (tmp_path / "step-1" / "seal.json").write_bytes(b"{}")
    with pytest.raises(StoreError) as caught:
        store.open()
    text = str(caught.value)
    assert "holds no good checkpoint that can be used" in text
    for line in (
        "step-3: ",
        "exp_avg_sq differs",
        "step-2: ",
        "facts.json is missing",
        "step-1: ",
        "is not in the format of a seal",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "last-good is missing"),
        (b"", "does not name a checkpoint"),
        (b"step-1\n", "does not name a checkpoint"),
        (b"../../etc/passwd 00000000000000000000000000000000\n", "does not name a checkpoint"),
        (b"step-1 00000000000000000000000000000000\n", "names step-1 with another seal"),
        (b"step-9 00000000000000000000000000000000\n", "step-9/seal.json is missing"),
    ],
)
def test_lost_or_damaged_pointer_falls_back_to_the_newest_good_and_says_so(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2)
    (tmp_path / "last-good").unlink()
    if content is not None:
        (tmp_path / "last-good").write_bytes(content)
    opened = store.open()
    assert held(opened) == 2
    assert [passed.path.name for passed in opened.passed_over] == ["last-good"]
    assert words in opened.passed_over[0].reason
    saved(store, 3)
    assert store.open().passed_over == ()


def test_named_checkpoint_is_that_one_or_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2, 3)
    assert held(store.open("step-2")) == held(store.open(tmp_path / "step-2")) == 2
    flip(tmp_path / "step-2" / TENSORS, -5)
    with pytest.raises(
        StoreError, match=r"exp_avg_sq differs.*Other sealed checkpoints in .*: step-3, step-1"
    ):
        store.open("step-2")
    with pytest.raises(StoreError, match=r"step-7/seal\.json is missing"):
        store.open("step-7")


def test_reader_continues_when_its_checkpoint_is_removed_by_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, keep=1)
    saved(store, 1)
    read_seal = opening.read_seal

    def meanwhile(path: Path):  # type: ignore[no-untyped-def]
        seal = read_seal(path)
        monkeypatch.setattr(opening, "read_seal", read_seal)
        saved(store, 2, 3)
        return seal

    monkeypatch.setattr(opening, "read_seal", meanwhile)
    opened = Store(tmp_path).open()
    assert held(opened) == 3
    assert [(p.path.name, "was removed while" in p.reason) for p in opened.passed_over] == [
        ("step-1", True)
    ]


def test_opening_changes_nothing_on_disk(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    (tmp_path / ".step-2.1-1.tmp").mkdir()
    before = names(tmp_path), (tmp_path / "last-good").read_bytes()
    Store(tmp_path).open()
    assert (names(tmp_path), (tmp_path / "last-good").read_bytes()) == before


def test_opened_tensors_can_be_trained_on(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, state_at(1, 8), {}, GOOD)
    weight = store.open().tensors["model/weight"].requires_grad_()
    weight.square().sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, 2 * weight.detach())


# --- rotation: the newest good ones and the milestones stay, and the last good one always


def _steps(store: Store) -> list[int]:
    return [entry.step for entry in store.list()]


def test_the_newest_good_ones_stay(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    saved(store, *range(1, 6))
    assert _steps(store) == [5, 4]
    assert names(tmp_path) == ["last-good", "step-4", "step-5"]


def test_milestones_stay_for_good(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1, keep_every=10)
    saved(store, 5, 10, 15, 20, 25)
    assert _steps(store) == [25, 20, 10]


def test_milestone_saved_again_after_a_rewind_stays_once(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1, keep_every=10)
    saved(store, 10, 15, 10, 15)
    assert names(tmp_path) == ["last-good", "step-10-2", "step-15"]
    assert held(store.open()) == 15


def test_damaged_folders_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    saved(store, 1)
    (tmp_path / "step-50").mkdir()
    (tmp_path / "step-60").mkdir()
    (tmp_path / "step-60" / "seal.json").write_text("{}")
    saved(store, 2)
    assert names(tmp_path) == ["last-good", "step-2", "step-50", "step-60"]


def _entry(serial: int, step: int, good: bool) -> Entry:
    health = GOOD if good else DOUBTFUL
    return Entry(
        path=Path(f"{serial}"),
        step=step,
        serial=serial,
        health=health,
        sizes={},
    )


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12),
    st.integers(1, 4),
    st.none() | st.integers(1, 7),
    st.integers(0, 11),
)
def test_what_goes_is_never_last_good_nor_among_the_newest_good(
    kinds: list[tuple[int, bool]], keep: int, keep_every: int | None, last: int
) -> None:
    entries = [_entry(serial, *kind) for serial, kind in enumerate(kinds)][::-1]
    pointed = entries[last].path if last < len(entries) else None
    going = removable(entries, pointed, keep, keep_every)
    staying = [entry for entry in entries if entry not in going]
    good = [entry for entry in entries if entry.good]
    assert all(entry in staying for entry in good[:keep])
    assert pointed is None or any(entry.path == pointed for entry in staying)
    milestones = {entry.step for entry in good if keep_every and entry.step % keep_every == 0}
    assert milestones <= {entry.step for entry in staying if entry.good}
    assert len(staying) <= 2 * keep + 1 + len(milestones)


# --- what lies in a folder of checkpoints, and what `last-good` names


def test_every_flipped_bit_of_the_pointer_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2, 3)
    whole = (tmp_path / "last-good").read_bytes()
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / "last-good").write_bytes(content)
        opened = store.open()
        assert (opened.step, len(opened.passed_over)) == (3, 1), bit


def test_entries_are_listed_newest_first_and_damaged_ones_apart(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1, 10, 9)
    (tmp_path / "step-1" / "seal.json").unlink()
    listed, damaged = seal.list_entries(tmp_path)
    assert [entry.path.name for entry in listed] == ["step-9", "step-10"]
    assert [each.path.name for each in damaged] == ["step-1"]


# --- one writer per folder: processes get an error, threads wait


def test_second_process_gets_a_clear_error_until_the_first_has_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1)

    def another() -> None:
        try:
            saved(Store(tmp_path), 2)
        except StoreError as fault:
            if (
                "another process writes checkpoints into" in str(fault)
                and held(Store(tmp_path).open()) == 1
            ):
                return
        raise AssertionError

    assert in_child(another) == 0
    store.close()
    assert in_child(lambda: saved(Store(tmp_path), 2)) == 0
    saved(Store(tmp_path), 3)
    assert held(store.open()) == 3


def test_two_stores_of_one_process_take_turns(tmp_path: Path) -> None:
    one, other = Store(tmp_path), Store(tmp_path)
    saved(one, 1)
    saved(other, 2)
    one.close()
    saved(other, 3)
    saved(one, 4)
    assert held(other.open()) == 4


def test_save_inside_a_save_is_an_error_and_not_a_deadlock(tmp_path: Path) -> None:
    class Reentrant(Recorder):
        def perform(self, operation, act):  # type: ignore[no-untyped-def]
            if operation.path.name == "facts.json" and operation.kind == "create":
                saved(store, 3)
            return super().perform(operation, act)

    store = Store(tmp_path, disk=Reentrant())
    with pytest.raises(StoreError, match="a save cannot start inside a save"):
        saved(store, 2)
    assert names(tmp_path) == []
