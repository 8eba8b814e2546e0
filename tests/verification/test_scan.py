"""One pass over a file: statistics and checksums, with threads or without."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stepguard.check import scan
from stepguard.check.scan import SIZES, Checksum, FileLayout, open_file

VALUES = torch.linspace(-3.0, 5.0, 700_000)


@pytest.fixture
def layout(tmp_path: Path) -> FileLayout:
    content = VALUES.numpy().tobytes()
    path = tmp_path / "values"
    path.write_bytes(content)
    found = FileLayout(path)
    found.size = len(content)
    for start in range(0, len(content), len(content) // 4):
        found.add_tensor(str(start), "parameter", "float32", (175_000,), start, len(content) // 4)
    found.checksums = [
        Checksum(8, 100, "part", xxhash.xxh3_128(content[8:108]).hexdigest()),
        Checksum(0, len(content) // 2, "half", zlib.crc32(content[: len(content) // 2])),
    ]
    return found


def scanned(layout: FileLayout) -> list[int]:
    read: list[int] = []
    with open_file(layout.path) as source:
        scan.scan(source, layout, read.append)
    return read


@pytest.mark.parametrize("run", [1, 1 << 30])
def test_values_and_checksums_are_the_same_with_one_thread_and_with_several(
    layout: FileLayout, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    monkeypatch.setattr(scan, "RUN", run)
    threads = torch.get_num_threads()
    assert sum(scanned(layout)) == layout.size
    seen = [tensor.values for tensor in layout.tensors if tensor.values is not None]
    assert [values.count for values in seen] == [175_000] * 4
    assert (seen[0].low, seen[-1].high, sum(values.bad for values in seen)) == (-3.0, 5.0, 0)
    assert not layout.problems() and torch.get_num_threads() == threads


def test_changed_byte_is_named_by_both_checksums(layout: FileLayout) -> None:
    content = bytearray(layout.path.read_bytes())
    content[50] ^= 1
    layout.path.write_bytes(content)
    scanned(layout)
    labels = [problem.detail.partition(":")[0] for problem in layout.problems()]
    assert labels == ["part", "half"]


Span = tuple[str, int, int, int]
"""Element type, offset of the storage, first element and number of elements of one tensor."""


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[Span], list[tuple[int, int]], int]:
    """Tensors that share storages or not, ranges with a CRC, and the size of the file."""
    tensors, sums, position = [], [], draw(st.integers(0, 50))
    for _ in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(["float32", "float16", "float64", "complex128"]))
        width, elements = SIZES[dtype], draw(st.integers(1, 200))
        for _ in range(draw(st.integers(0, 3))):
            first = draw(st.integers(0, elements - 1))
            tensors.append((dtype, position, first, draw(st.integers(1, elements - first))))
        if draw(st.booleans()):
            sums.append((position, elements * width))
        position += elements * width + draw(st.integers(0, 7000))
    return tensors, sums, position


@given(spans(), st.integers(16, 5000), st.integers(1, 20_000))
def test_every_wanted_byte_is_read_once_and_no_element_is_split(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[list[Span], list[tuple[int, int]], int],
    piece: int,
    run: int,
) -> None:
    tensors, sums, size = drawn
    # all bytes are 0x3c or 0x3d, so that every element of any type is finite
    content = bytes(0x3C + (7 * at // 3) % 2 for at in range(size))
    path = tmp_path_factory.mktemp("spans") / "file"
    path.write_bytes(content)
    layout = FileLayout(path)
    for number, (dtype, base, first, count) in enumerate(tensors):
        width = SIZES[dtype]
        layout.add_tensor(
            str(number), "other", dtype, (count,), base + first * width, count * width, base
        )
    for start, length in sums:
        expected = zlib.crc32(content[start : start + length])
        layout.checksums.append(Checksum(start, length, "sum", expected))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scan, "PIECE", piece)
        patched.setattr(scan, "RUN", run)
        patched.setattr(scan, "OVERLAP", 1000)
        scanned(layout)
    assert not layout.problems()
    for tensor in layout.tensors:
        values = tensor.values
        assert values is not None and (values.count, values.bad) == (tensor.shape[0], 0)
        part = torch.frombuffer(
            bytearray(content[tensor.start : tensor.start + tensor.size]),
            dtype=scan.PARTS.get(tensor.dtype) or getattr(torch, tensor.dtype),
        )
        assert (values.low, values.high) == (float(part.min()), float(part.max()))


def raw_layout(*tensors: tuple[int, int]) -> FileLayout:
    layout = FileLayout(Path("m.pt"))
    for start, size in tensors:
        layout.add_tensor("w", "parameter", "float32", (size // 4,), start, size, 0)
    return layout


def test_tensors_over_the_same_bytes_are_measured_once() -> None:
    layout = raw_layout((64, 16), (64, 16), (64, 16))
    assert len(scan._shared(layout.tensors)) == 1
    assert len({id(tensor.values) for tensor in layout.tensors}) == 1


def test_views_that_overlap_without_end_are_measured_together() -> None:
    layout = raw_layout(*((n * 4, 4 * (1000 - n)) for n in range(900)))
    (values,) = scan._shared(layout.tensors)
    assert (values.start, values.size) == (0, 4000)
    assert all(tensor.values is values for tensor in layout.tensors)


def test_only_tensors_that_can_be_nonfinite_have_values() -> None:
    layout = raw_layout((64, 8), (80, 0))
    layout.add_tensor("n", "buffer", "int64", (1,), 72, 8)
    assert [tensor.values is not None for tensor in layout.tensors] == [True, False, False]
