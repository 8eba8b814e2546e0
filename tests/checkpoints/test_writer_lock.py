"""One writer per folder: processes get an error, threads wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.disk.faults import Recorder

from checkpoints.kit import held, in_child, names, saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Store


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
