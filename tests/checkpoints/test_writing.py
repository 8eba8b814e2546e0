"""Every tensor comes back bit for bit, and the files are real safetensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.disk.states import GOOD
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoints.kit import saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Store, files, read_seal, seal
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


# --- tensors as pieces of bytes, and the finite test on their bits


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


# --- how tensors lie in safetensors files, and which cannot


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            torch.eye(3).to_sparse(),
            r"m cannot be kept in a checkpoint: it has the layout torch.sparse_coo; pass",
        ),
        (torch.empty(3, device="meta"), "m cannot be kept in a checkpoint: it has no plain memory"),
        (3.0, "m is a float, not a tensor; put plain values into the facts"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_way_out(
    tensor: Tensor, words: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=words):
        Store(tmp_path).save(1, {"m": tensor}, {}, GOOD)


def test_name_reserved_by_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"__metadata__ .* a name that safetensors reserves"):
        Store(tmp_path).save(1, {"__metadata__": torch.ones(1)}, {}, GOOD)


def test_header_is_aligned_and_wide_elements_come_first(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.float16),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(5, dtype=torch.complex64),
    }
    path = Store(tmp_path).save(1, tensors, {}, GOOD)
    sealed = read_seal(path).tensors
    start = sealed["b"].start
    assert start % 8 == 0
    assert (sealed["c"].start, sealed["a"].start) == (start + 16, start + 56)
    assert (path / sealed["a"].file).stat().st_size == start + 62


def test_files_are_split_by_size_and_none_is_empty_but_the_only_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 100)
    store = Store(tmp_path)
    path = store.save(1, {name: torch.ones(20) for name in "abc"}, {}, GOOD)
    assert len({sealed.file for sealed in read_seal(path).tensors.values()}) == 3
    assert len(list(path.glob("*.safetensors"))) == 3
    path = store.save(2, {}, {}, GOOD)
    assert len(list(path.glob("*.safetensors"))) == 1
    assert store.open(path).tensors == {}


# --- the seal: every byte of it is proven, and its size is bounded


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved(Store(tmp_path), 1)
    return tmp_path / "step-1"


def test_seal_larger_than_any_is_not_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "LARGEST", 100)
    with pytest.raises(StoreError, match="at most 100 are read"):
        read_seal(checkpoint)


@pytest.mark.slow
def test_seal_of_many_tensors_is_written_and_read(tmp_path: Path) -> None:
    tensors = {f"model/{i}": torch.tensor([float(i)]) for i in range(4000)}
    store = Store(tmp_path)
    store.save(1, tensors, {}, GOOD)
    assert store.open().tensors["model/3999"].item() == 3999.0


def test_every_flipped_byte_of_a_seal_is_noticed(checkpoint: Path) -> None:
    content = (checkpoint / "seal.json").read_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with pytest.raises(StoreError, match="seal"):
            seal.parse_seal(bytes(damaged), checkpoint)


def test_seal_of_a_later_version_asks_for_an_upgrade(checkpoint: Path) -> None:
    later = replace(read_seal(checkpoint), schema=seal.SCHEMA + 1)
    with pytest.raises(StoreError, match="upgrade"):
        seal.parse_seal(seal.seal_bytes(later), checkpoint)
