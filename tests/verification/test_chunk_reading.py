"""Tensors of many pieces: the same findings as when they are looked at element by element."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stepguard
from stepguard.check.scan import PIECE, RUN

TYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.float8_e5m2,
]


def _long(dtype: torch.dtype) -> torch.Tensor:
    """More than a run, and no whole number of pieces."""
    generator = torch.Generator().manual_seed(0)
    elements = (RUN + 5 * PIECE) // dtype.itemsize + 37
    real = torch.randn(elements, generator=generator)
    return torch.complex(real, real) if dtype.is_complex else real.to(dtype)


def _saved(tensor: torch.Tensor, path: Path) -> Path:
    if path.suffix == ".pt":
        torch.save({"w": tensor}, path)
    else:
        save_file({"w": tensor}, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_in_any_piece_are_counted_and_the_first_is_named(
    tmp_path: Path, dtype: torch.dtype, suffix: str
) -> None:
    tensor = _long(dtype)
    places = [3 * PIECE // dtype.itemsize + 11, RUN // dtype.itemsize - 1, len(tensor) - 1]
    for place in places:
        tensor[place] = float("nan")
    (problem,) = [
        p
        for p in stepguard.verify(_saved(tensor, tmp_path / f"long{suffix}")).problems
        if p.kind == "nan"
    ]
    assert "3 NaN of" in problem.detail and f"first at [{places[0]}]" in problem.detail


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_long_tensor_without_trouble_has_no_finding(tmp_path: Path, dtype: torch.dtype) -> None:
    assert stepguard.verify(_saved(_long(dtype), tmp_path / "long.pt")).ok


def test_a_changed_byte_of_any_piece_changes_the_checksum(tmp_path: Path) -> None:
    path = _saved(_long(torch.float32), tmp_path / "long.pt")
    whole = bytearray(path.read_bytes())
    for piece in (0, 7, 30, 35):
        damaged = bytearray(whole)
        damaged[piece * PIECE + 4096] ^= 1
        path.write_bytes(damaged)
        assert "checksum" in {problem.kind for problem in stepguard.verify(path).problems}
