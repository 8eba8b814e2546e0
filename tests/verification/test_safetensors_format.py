"""Safetensors files: the rules of the header, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepguard.check.scan import Damaged, FileLayout, open_file, parse_json
from stepguard.check.torch_file import read_content, read_safetensors
from verification import hostile


def layout_of(path: Path, header: dict[str, Any], data: bytes) -> FileLayout:
    path.write_bytes(hostile.safetensors(header) + data)
    layout = FileLayout(path)
    with open_file(path) as source:
        read_safetensors(source, layout, None)
    return layout


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_tensors_get_their_bytes_and_roles(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "optimizer/w/exp_avg": entry(0, 8, [2]),
        "w": entry(8, 20, [3]),
    }
    found = layout_of(tmp_path / "m.safetensors", header, bytes(20)).tensors
    assert [(tensor.name, tensor.role) for tensor in found] == [
        ("optimizer/w/exp_avg", "optimizer"),
        ("w", "parameter"),
    ]
    assert found[1].start + 12 == (tmp_path / "m.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, "malformed"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, "malformed"),
        ({"a": entry(0, 8, [2])}, "malformed"),
        ({"a": entry(0, 16, [4])}, "torn"),
        ({"a": entry(8, 0, [2])}, "malformed"),
        ({"a": {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]}}, "malformed"),
        ({"a": {"dtype": 1, "shape": [3], "data_offsets": [0, 12]}}, "malformed"),
        ({"a": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 12]}}, "malformed"),
        ({"a": {"dtype": "F32", "shape": [10**4000] * 2, "data_offsets": [0, 12]}}, "malformed"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 10**4000]}}, "malformed"),
        ({"a": {"shape": [3]}}, "malformed"),
    ],
)
def test_header_that_breaks_a_rule_is_refused(
    tmp_path: Path, header: dict[str, Any], kind: str
) -> None:
    with pytest.raises(Damaged) as caught:
        layout_of(tmp_path / "m.safetensors", header, bytes(12))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("tensor", "kind"), [(entry(0, 12, [4]), "malformed"), (entry(0, 12, [3], "F99"), "format")]
)
def test_tensor_that_does_not_fit_is_a_problem_of_its_own(
    tmp_path: Path, tensor: dict[str, Any], kind: str
) -> None:
    layout = layout_of(tmp_path / "m.safetensors", {"a": tensor}, bytes(12))
    assert not layout.tensors and [problem.kind for problem in layout.problems()] == [kind]


def test_types_below_a_byte_are_measured_in_bits(tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "m.safetensors", {"a": entry(0, 3, [5], "F4")}, bytes(3))
    assert [tensor.size for tensor in layout.tensors] == [3] and not layout.problems()


def test_key_that_occurs_twice_is_refused() -> None:
    with pytest.raises(Damaged, match="more than once"):
        parse_json(b'{"a": 1, "a": 2}', "the header")


def test_content_is_the_shapes_of_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(hostile.safetensors({"a": entry(0, 24, [2, 3])}) + bytes(24))
    assert {name: tensor.shape for name, tensor in read_content(path).items()} == {"a": (2, 3)}
