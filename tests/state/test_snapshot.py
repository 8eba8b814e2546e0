"""The ring of snapshots and its cadence; the seam to the disk and to the host's memory."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from benchmarks.disk.faults import Failing, Recorder

from stepguard.state.files import DISK, free_memory, write_file
from stepguard.state.run_state import SavedState
from stepguard.state.snapshot import Cadence, Ring, Snapshot

LIVE = torch.zeros(4)
SIZE = LIVE.numel() * LIVE.element_size()


def _state(value: float = 0.0) -> SavedState:
    LIVE.fill_(value)
    return SavedState({"model/weight": LIVE}, {})


def _ring(size: int = 3, limit: int | None = None, free: int | None = 2**30) -> Ring:
    ring = Ring(size, limit, free=lambda: free)
    ring.too_small(_state())
    return ring


def _take(ring: Ring, step: int, *, must: bool = False) -> Snapshot | None:
    return ring.take(step, _state(step), must=must)


def _steps(ring: Ring) -> list[int]:
    return [s.step for s in ring.snapshots]


def test_snapshot_keeps_its_values_when_the_live_ones_move() -> None:
    first, second = _take(ring := _ring(), 1), _take(ring, 2)
    assert first is not None and second is not None
    assert [float(s.state.tensors["model/weight"][0]) for s in (first, second)] == [1.0, 2.0]


def test_dropped_snapshot_leaves_its_memory_to_the_next() -> None:
    first = _take(ring := _ring(), 1)
    assert first is not None
    ring.drop(lambda s: s is first)
    second = _take(ring, 2)
    assert second is not None
    assert second.state.tensors["model/weight"] is first.state.tensors["model/weight"]


def test_memory_that_is_being_written_to_disk_is_not_reused() -> None:
    first = _take(ring := _ring(), 1)
    assert first is not None
    first.lent = True
    ring.drop(lambda s: s is first)
    second = _take(ring, 2)
    assert second is not None
    assert second.state.tensors["model/weight"] is not first.state.tensors["model/weight"]


def test_full_ring_of_young_snapshots_waits() -> None:
    ring = _ring()
    assert [_take(ring, step) is not None for step in (1, 2, 3, 4)] == [True, True, True, False]
    assert _steps(ring) == [1, 2, 3]


def test_only_good_snapshot_is_never_given_up() -> None:
    ring = _ring()
    for step in (1, 2, 3):
        _take(ring, step)
    ring.snapshots[0].standing = "good"
    assert _take(ring, 4) is None
    assert _take(ring, 4, must=True) is not None
    assert _steps(ring) == [1, 3, 4]


def test_oldest_good_snapshot_makes_room_once_a_newer_one_is_good() -> None:
    ring = _ring()
    for step in (1, 2, 3):
        _take(ring, step)
    ring.snapshots[0].standing = ring.snapshots[1].standing = "good"
    assert _take(ring, 4) is not None
    assert _steps(ring) == [2, 3, 4] and [s.step for s in ring.good()] == [2]


def test_bad_snapshot_goes_first() -> None:
    ring = _ring()
    for step in (1, 2, 3):
        _take(ring, step)
    ring.snapshots[0].standing, ring.snapshots[1].standing = "good", "bad"
    assert _take(ring, 4) is not None
    assert _steps(ring) == [1, 3, 4]


def test_memory_limit_makes_the_ring_smaller() -> None:
    ring = _ring(size=5, limit=2 * SIZE + 1)
    assert [_take(ring, step) is not None for step in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize(
    ("limit", "free", "whose"), [(SIZE, None, "Snapshots.memory"), (None, 3 * SIZE, "half of")]
)
def test_state_that_does_not_fit_twice_is_refused_with_the_sizes_and_the_way_out(
    limit: int | None, free: int | None, whose: str
) -> None:
    why = Ring(3, limit, free=lambda: free).too_small(_state())
    assert whose in why and "checkpoints still are" in why and "memory=BYTES" in why


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _run(steps: int, *, step_time: float, copy_time: float, every: int | str = "auto") -> list[int]:
    clock, taken = Clock(), []
    cadence = Cadence(every, clock)
    for step in range(steps):
        if cadence.due(step):
            clock.now += copy_time
            cadence.took(step, copy_time)
            taken.append(step)
        clock.now += step_time
    return taken


def test_first_snapshots_come_early_whatever_they_cost() -> None:
    assert _run(60, step_time=0.001, copy_time=0.1)[:4] == [1, 8, 16, 24]


@pytest.mark.parametrize("copy_time", [1e-5, 1e-3, 0.02, 0.3])
def test_amortised_stall_stays_below_half_a_percent(copy_time: float) -> None:
    taken = _run(50_000, step_time=0.01, copy_time=copy_time)
    later = taken[4:]
    assert later and all(step % 8 == 0 for step in taken[1:])
    assert copy_time * len(later) <= 0.005 * 0.01 * (later[-1] - taken[3])


def test_grids_of_two_speeds_share_their_steps() -> None:
    slow, fast = (set(_run(5000, step_time=t, copy_time=0.004)) for t in (0.01, 0.03))
    assert slow - {1, 8, 16, 24} <= fast and len(slow) > 4


def test_a_resumed_run_has_its_first_snapshot_after_one_step() -> None:
    cadence = Cadence("auto", Clock())
    assert [step for step in range(1003, 1010) if cadence.due(step)] == [1004, 1008]


def test_fixed_cadence_is_kept() -> None:
    assert _run(50, step_time=0.001, copy_time=9.0, every=10) == [10, 20, 30, 40]


@pytest.mark.parametrize("levels", [(3.0, 2.0, 1.0, 0.5, 0.4), (0.1, 0.2, 0.3, 0.4, 0.5)])
def test_ranks_with_different_losses_keep_the_same_steps(levels: tuple[float, ...]) -> None:
    ring = Ring(3, None, among_ranks=True, free=lambda: 2**30)
    ring.too_small(_state())
    for step, level in zip((8, 16, 24, 32, 40), levels, strict=True):
        snapshot = _take(ring, step)
        assert snapshot is not None
        snapshot.memory["level"] = level
        snapshot.standing = "good"
        ring.keep_best()
    assert _steps(ring) == [24, 32, 40]


# --- available memory, within the limit of a container


def files(tmp_path: Path, **content: str) -> tuple[Path, Path]:
    for name, text in content.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 100 kB\n")
    return tmp_path, meminfo


def test_a_limit_counts_what_is_used_but_not_cached_files(tmp_path: Path) -> None:
    content = {"memory_max": "5000", "memory_current": "4000", "memory_stat": "inactive_file 300"}
    assert free_memory(*files(tmp_path, **content)) == 1300


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    assert free_memory(*files(tmp_path, memory_max="10", memory_current="50")) == 0


# --- the disk: one change at a time, in one step


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename"])
def test_failing_replacement_leaves_the_old_file_and_nothing_else(
    kind: str, tmp_path: Path
) -> None:
    write_file(tmp_path / "file", b"old")
    with pytest.raises(OSError, match="No space left on device"):
        write_file(tmp_path / "file", b"new", Failing(kind, code=errno.ENOSPC))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_new_file_never_goes_through_a_link_or_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            DISK.new_file(tmp_path / name)
    assert (tmp_path / "there").read_text() == "mine" and not (tmp_path / "elsewhere").exists()


def test_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "link").symlink_to(tmp_path / "mine")
    disk = Recorder()
    disk.rmtree(tmp_path / "tree")
    assert [op.kind for op in disk.operations] == ["unlink", "rmdir", "rmdir"]
    assert (tmp_path / "mine" / "file").exists()
