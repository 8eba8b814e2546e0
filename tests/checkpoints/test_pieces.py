"""Tensors as pieces of bytes, and the finite test on their bits."""

from __future__ import annotations

import pytest
import torch

from stepguard.checkpoints import files

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def test_finite_test_agrees_with_torch_on_every_bit_pattern_of_two_bytes() -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        wanted = int((~torch.isfinite(patterns.view(dtype))).sum())
        found = sum(files.nonfinite(piece, dtype) for piece in files.pieces(patterns.view(dtype)))
        assert found == wanted > 0


def test_finite_test_agrees_with_torch_on_every_bit_pattern_of_one_byte() -> None:
    patterns = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for dtype in (d for d in FLOATS if d.itemsize == 1):
        wanted = int((~torch.isfinite(patterns.view(dtype).to(torch.float32))).sum())
        assert (
            sum(files.nonfinite(piece, dtype) for piece in files.pieces(patterns.view(dtype)))
            == wanted
            > 0
        )


def test_strided_tensor_comes_in_row_major_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 64)
    for shape in ((5, 7, 11), (3, 40), (200, 1), (1, 33)):
        tensor = torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))
        found = b"".join(bytes(piece) for piece in files.pieces(tensor))
        assert found == tensor.contiguous().numpy().tobytes(), shape
