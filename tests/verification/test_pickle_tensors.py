"""Tensors of a pickle get their bytes in the file, or a problem that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard.check.allowed_globals import Global
from stepguard.check.bounded_file import Damaged, FileSlice, ProblemList
from stepguard.check.inert_pickle import PickleReader, StorageRecord, TensorRecord
from stepguard.check.scan import FileLayout
from stepguard.check.torch_file import add_tensor, read_value

STORAGE = StorageRecord("0", "float32", 12, start=128, held=48)


def layout() -> FileLayout:
    return FileLayout(Path("m.pt"), ProblemList(Path("m.pt")))


def added(record: TensorRecord) -> FileLayout:
    found = layout()
    add_tensor(found, "w", "parameter", record)
    return found


def test_view_lies_where_its_offset_and_strides_say() -> None:
    view = TensorRecord(STORAGE, "", 2, (2, 3), (4, 1))
    (found,) = added(view).tensors
    assert (found.name, found.start, found.size) == ("w", 128 + 8, 7 * 4)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (TensorRecord(STORAGE, "", 7, (2, 3), (3, 1)), "malformed"),
        (TensorRecord(STORAGE, "", -1, (2,), (1,)), "malformed"),
        (TensorRecord(STORAGE, "", 0, (2,), (-1,)), "malformed"),
        (TensorRecord(STORAGE, "", 0, (2, 2), (1,)), "malformed"),
        (TensorRecord(StorageRecord("0", "float32", 13, 128, 48), "", 0, (1,), (1,)), "torn"),
        (TensorRecord(StorageRecord("9", "float32", 1), "", 0, (1,), (1,)), "missing"),
    ],
)
def test_tensor_that_does_not_fit_is_a_problem(record: TensorRecord, kind: str) -> None:
    found = added(record)
    assert not found.tensors and [problem.kind for problem in found.problems.all()] == [kind]


def test_storage_without_bytes_needs_no_record() -> None:
    empty = TensorRecord(StorageRecord("9", "float32", 0), "", 0, (0,), (1,))
    assert not added(empty).problems.all()


def test_names_are_reported_by_what_loading_would_do() -> None:
    found = layout()
    names = {
        Global("collections", "OrderedDict"): False,
        Global("os", "system"): True,
        Global("mine", "Mode"): True,
        Global("mine", "Settings"): False,
    }
    reader = PickleReader(FileSlice(-1, 0, 0))
    reader.names = names
    # also where reading stops before the end
    with pytest.raises(Damaged, match="without its end"):
        read_value(reader, found)
    problems = found.problems.all()
    kinds = [(problem.kind, problem.severity) for problem in problems]
    assert kinds == [("hostile", "error"), ("global", "error"), ("global", "error")]
    assert "mine.Settings" in problems[-1].detail and "state_dict" in problems[-1].detail
