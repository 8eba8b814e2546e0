"""One pass over a file: statistics and checksums, with threads or without."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
import xxhash

from stepguard.verification import scan
from stepguard.verification.bounded_file import ProblemList, open_file
from stepguard.verification.reading import ChecksumRange, FileLayout

VALUES = torch.linspace(-3.0, 5.0, 700_000)


@pytest.fixture
def layout(tmp_path: Path) -> FileLayout:
    content = VALUES.numpy().tobytes()
    path = tmp_path / "values"
    path.write_bytes(content)
    found = FileLayout(path, "raw", len(content), ProblemList(str(path)))
    found.add_tensor("w", "parameter", "float32", (700_000,), 0, 0, len(content))
    found.checksums = [
        ChecksumRange(0, len(content), "all", "crc32", zlib.crc32(content)),
        ChecksumRange(8, 100, "part", "xxh3_128", xxhash.xxh3_128(content[8:108]).hexdigest()),
    ]
    return found


def scanned(layout: FileLayout) -> list[int]:
    read: list[int] = []
    with open_file(layout.path) as source:
        scan.scan(source, layout, read.append)
    return read


@pytest.mark.parametrize("small", [0, 1 << 30])
def test_values_and_checksums_are_the_same_with_threads_and_without(
    layout: FileLayout, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(scan, "SMALL", small)
    threads = torch.get_num_threads()
    assert sum(scanned(layout)) == layout.size
    seen = layout.tensors[0].seen
    assert seen is not None
    assert (seen.count, seen.low, seen.high, seen.bad) == (700_000, -3.0, 5.0, 0)
    assert not layout.problems.all() and torch.get_num_threads() == threads


def test_changed_byte_is_named_by_both_checksums(layout: FileLayout) -> None:
    content = bytearray(layout.path.read_bytes())
    content[50] ^= 1
    layout.path.write_bytes(content)
    scanned(layout)
    labels = [problem.detail.partition(":")[0] for problem in layout.problems.all()]
    assert labels == ["all", "part"]
