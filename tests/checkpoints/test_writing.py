"""Every tensor comes back bit for bit, and the files are real safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.disk.states import GOOD
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from stepguard._errors import StoreError
from stepguard.checkpoints import Store, read_seal
from stepguard.checkpoints import files as file_plan
from stepguard.checkpoints import files as pieces

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
INTEGERS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
READER_KNOWS = [d for d in FLOATS + INTEGERS if "fnuz" not in str(d) and "e8m0" not in str(d)]


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def some(dtype: torch.dtype, count: int = 24) -> Tensor:
    """Finite numbers of a dtype, with every byte in use."""
    noise = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        return noise > 127
    if dtype.is_complex:
        return torch.randn(count, dtype=torch.complex128).to(dtype)
    if dtype.is_floating_point:
        return torch.rand(count, dtype=torch.float64).to(dtype)
    return noise.view(dtype)


def through_disk(folder: Path, tensors: dict[str, Tensor], **facts: object) -> dict[str, Tensor]:
    store = Store(folder)
    store.save(1, tensors, facts, GOOD)
    return store.open().tensors


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    flat = some(dtype)
    tensors = {
        "flat": flat,
        "cube": flat.reshape(2, 3, 4),
        "scalar": flat[:1].reshape(()),
        "none": flat[:0],
        "none 2d": flat[:0].reshape(0, 5),
        "transposed": flat.reshape(4, 6).t(),
        "strided": flat[::3],
        "expanded": flat[:1].expand(7),
    }
    assert_same(through_disk(tmp_path, tensors), tensors)


def test_conjugated_and_negated_views_come_back_as_their_values(tmp_path: Path) -> None:
    number = torch.randn(5, dtype=torch.complex64)
    tensors = {"conjugate": number.conj(), "negated": number.conj().imag, "real": number.real}
    assert tensors["conjugate"].is_conj() and tensors["negated"].is_neg()
    assert_same(through_disk(tmp_path, tensors), tensors)


def test_parameters_and_tensors_with_odd_names_come_back(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "модель/вес": nn.Linear(3, 2).weight,
        'a "b"\n/..': torch.ones(1),
        "": torch.zeros(2),
    }
    found = through_disk(tmp_path, tensors)
    assert_same(found, tensors)
    assert not any(tensor.requires_grad for tensor in found.values())


def test_tied_tensors_lie_on_disk_once_and_come_back_tied(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    tensors = {"model/head": shared, "model/embedding": shared, "model/part": shared[:10]}
    found = through_disk(tmp_path, tensors)
    assert_same(found, tensors)
    assert (
        found["model/head"].data_ptr()
        == found["model/embedding"].data_ptr()
        != found["model/part"].data_ptr()
    )
    assert (
        tmp_path / "step-1" / "tensors-00000.safetensors"
    ).stat().st_size < 2 * shared.numel() * 4


def test_official_reader_loads_the_files(tmp_path: Path) -> None:
    tensors = {str(dtype): some(dtype).reshape(4, 6) for dtype in READER_KNOWS}
    tensors |= {
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 3),
        "strided": torch.randn(6, 4)[:, ::2],
    }
    path = Store(tmp_path).save(1, tensors, {}, GOOD)
    assert_same(load_file(path / "tensors-00000.safetensors"), tensors)
    with safe_open(path / "tensors-00000.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_complex_numbers_are_pairs_in_the_file_and_complex_in_the_seal(tmp_path: Path) -> None:
    number = torch.randn(3, dtype=torch.complex64)
    path = Store(tmp_path).save(1, {"c": number}, {}, GOOD)
    assert torch.equal(
        load_file(path / "tensors-00000.safetensors")["c"], torch.view_as_real(number)
    )
    assert (read_seal(path).tensors["c"].dtype, read_seal(path).tensors["c"].shape) == (
        "complex64",
        (3,),
    )


def test_large_states_are_split_into_files_and_long_tensors_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_plan, "FILE_BYTES", 4000)
    monkeypatch.setattr(pieces, "PIECE", 64)
    tensors = {f"t{i}": torch.randn(300) for i in range(9)}
    tensors |= {
        "wide": torch.randn(50, 60).t(),
        "deep": torch.randn(3, 40, 50).permute(2, 0, 1),
        "large": torch.randn(5000),
    }
    assert_same(through_disk(tmp_path, tensors), tensors)
    files = sorted((tmp_path / "step-1").glob("*.safetensors"))
    assert len(files) > 5
    merged: dict[str, Tensor] = {}
    for file in files:
        merged |= load_file(file)
    assert_same(merged, tensors)


def test_facts_come_back_with_floats_that_are_not_numbers(tmp_path: Path) -> None:
    facts = {
        "groups": [{"lr": 1e-4, "betas": [0.9, 0.999]}],
        "best": float("inf"),
        "deep": {"a": {"b": [1, None, "x"]}},
    }
    store = Store(tmp_path)
    store.save(1, {}, facts, GOOD)
    assert store.open().facts == facts


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
def test_a_single_nan_or_inf_anywhere_is_not_sealed(dtype: torch.dtype, tmp_path: Path) -> None:
    if dtype is torch.float8_e8m0fnu:
        bad = [torch.tensor([0xFF], dtype=torch.uint8).view(dtype)]
    else:
        values = [float("nan"), float("inf"), float("-inf")]
        bad = [
            t
            for v in values
            if not bool(
                torch.isfinite((t := torch.tensor([v]).to(dtype)).to(torch.complex64)).all()
            )
        ]
    assert bad
    for value in bad:
        tensors = {"model/a": torch.cat([some(dtype, 7), value, some(dtype, 5)])}
        with pytest.raises(StoreError, match="not sealed: model/a holds NaN or Inf"):
            Store(tmp_path).save(1, tensors, {}, GOOD)
    assert not [path for path in tmp_path.iterdir() if "step" in path.name]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_and_smallest_finite_numbers_are_sealed(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    info = torch.finfo(dtype)
    edge = torch.tensor([info.max, info.min, info.tiny], dtype=torch.float64).to(dtype)
    tensors = {"edge": edge, "many": torch.full((100,), info.max, dtype=torch.float64).to(dtype)}
    assert_same(through_disk(tmp_path, tensors), tensors)


def test_what_may_be_nonfinite_is_sealed_and_said(tmp_path: Path) -> None:
    tensors = {
        "model/sentinel": torch.tensor([float("inf"), float("nan")]),
        "model/fine": torch.ones(2),
    }
    facts = {"nonfinite_ok": ["model/sentinel", "model/fine"]}
    assert_same(through_disk(tmp_path, tensors, **facts), tensors)
    assert read_seal(tmp_path / "step-1").nonfinite == ("model/sentinel",)
