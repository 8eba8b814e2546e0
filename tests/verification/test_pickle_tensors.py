"""Tensors of a pickle get their bytes in the file, or a problem that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard.verification.bounded_file import Damaged, ProblemList
from stepguard.verification.pickle_format import add_tensor, hostile_refused, names_reported
from stepguard.verification.pickle_globals import (
    ArrayRecord,
    Global,
    PickledBytes,
    StorageRecord,
    TensorRecord,
)
from stepguard.verification.pickle_machine import ByteRange, PickledTensor, PickleReferences
from stepguard.verification.reading import FileLayout

STORAGES = {"0": ByteRange(128, 48)}
STORAGE = StorageRecord("0", "float32", 12)


def layout() -> FileLayout:
    return FileLayout(Path("m.pt"), "torch zip", 1000, ProblemList("m.pt"))


def added(record: TensorRecord | ArrayRecord, prefix: str = "") -> FileLayout:
    found = layout()
    add_tensor(found, PickledTensor("w", "parameter", record), STORAGES, prefix)
    return found


def test_view_lies_where_its_offset_and_strides_say() -> None:
    view = TensorRecord(STORAGE, "float32", 2, (2, 3), (4, 1))
    (found,) = added(view, "model/").tensors
    assert (found.name, found.start, found.size) == ("model/w", 128 + 8, 7 * 4)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (TensorRecord(STORAGE, "float32", 7, (2, 3), (3, 1)), "malformed"),
        (TensorRecord(STORAGE, "float32", -1, (2,), (1,)), "malformed"),
        (TensorRecord(STORAGE, "float32", 0, (2,), (-1,)), "malformed"),
        (TensorRecord(STORAGE, "float32", 0, (2, 2), (1,)), "malformed"),
        (TensorRecord(StorageRecord("0", "float32", 13), "float32", 0, (1,), (1,)), "torn"),
        (TensorRecord(StorageRecord("9", "float32", 1), "float32", 0, (1,), (1,)), "missing"),
        (ArrayRecord(PickledBytes(10, 7), "float32", (2,)), "malformed"),
    ],
)
def test_tensor_that_does_not_fit_is_a_problem(
    record: TensorRecord | ArrayRecord, kind: str
) -> None:
    found = added(record)
    assert not found.tensors and [problem.kind for problem in found.problems.all()] == [kind]


def test_storage_without_bytes_needs_no_record() -> None:
    empty = TensorRecord(StorageRecord("9", "float32", 0), "float32", 0, (0,), (1,))
    assert not added(empty).problems.all()


def test_names_are_reported_by_what_loading_would_do() -> None:
    found = layout()
    names = {
        Global("collections", "OrderedDict"): False,
        Global("os", "system"): True,
        Global("mine", "Mode"): True,
        Global("mine", "Settings"): False,
    }
    # also where reading stops before the end
    with pytest.raises(KeyError), names_reported(found, PickleReferences(names)):
        raise KeyError
    problems = found.problems.all()
    kinds = [(problem.kind, problem.severity) for problem in problems]
    assert kinds == [("hostile", "error"), ("global", "error"), ("global", "error")]
    assert "mine.Settings" in problems[-1].detail and "state_dict" in problems[-1].detail
    with pytest.raises(Damaged, match=r"os\.system"), hostile_refused(PickleReferences(names)):
        pass
