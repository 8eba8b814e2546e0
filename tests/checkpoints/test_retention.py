"""Rotation: the newest good ones and the milestones stay, and the last good one always."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.disk.states import GOOD, facts_at, state_at
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.kit import SIZE, held, names, saved
from stepguard.checkpoints import Entry, Store
from stepguard.checkpoints.seal import removable

DOUBTFUL = replace(GOOD, good=False)


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


def test_any_number_of_doubtful_checkpoints_leaves_the_last_good_one(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    saved(store, 1)
    for step in range(2, 9):
        store.save(step, state_at(step, SIZE), facts_at(step), DOUBTFUL)
    assert _steps(store) == [8, 1]
    assert held(store.open()) == 1


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
