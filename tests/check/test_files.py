"""One file of any format: a healthy one is good, each bad value and each changed byte is found."""

from __future__ import annotations

import copy
import io
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from benchmarks.parts import fuzz
from benchmarks.parts.fuzz import named, text
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepguard
from check import hostile, saved
from check.saved import ONE_FILE, Saver, poison
from stepguard.check import scan, torch_file
from stepguard.check.scan import SIZES, Checksum, Damaged, FileLayout, open_file
from stepguard.records.checks import Problem

NAN = float("nan")
INF = float("inf")


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    return saved.trained()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, everything: dict[str, Any]) -> dict[str, bytes]:
    """One undamaged file of each single-file format, by name."""
    folder = tmp_path_factory.mktemp("whole")
    saved.save_zip(folder / "zip.pt", everything)
    saved.save_legacy(folder / "legacy.pt", everything)
    saved.save_safetensors(folder / "m.safetensors", everything["state_dict"])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- Every role, element type and layout.


@pytest.mark.parametrize("save", ONE_FILE.values(), ids=ONE_FILE)
def test_healthy_file_is_good_and_every_role_is_told(
    tmp_path: Path, everything: dict[str, Any], save: Saver
) -> None:
    found = stepguard.verify(save(tmp_path / "all.pt", everything))
    assert found.ok and not found.problems, found.problems
    assert {"parameter", "buffer", "optimizer", "ema", "rng"} <= found.roles.keys()
    assert found.step == 3 and found.roles["optimizer"] == 3 * 6
    assert {rate.kind for rate in found.rates} >= {"lr", "initial_lr", "max_lr"}


@pytest.mark.parametrize("save", ONE_FILE.values(), ids=ONE_FILE)
def test_nan_is_found_in_every_part(
    tmp_path: Path, everything: dict[str, Any], save: Saver
) -> None:
    bad = copy.deepcopy(everything)
    for part, name in (
        ("state_dict", "inner.weight"),
        ("state_dict", "norm.running_var"),
        ("ema", "outer.weight"),
    ):
        bad[part][name] = poison(bad[part][name])
    moment = bad["optimizer"]["state"][2]["exp_avg"]
    bad["optimizer"]["state"][2]["exp_avg"] = poison(moment, INF)
    bad["optimizer"]["param_groups"][0]["lr"] = NAN
    bad["scaler"]["scale"] = INF
    bad["lr_scheduler"]["_last_lr"] = [NAN]
    found = stepguard.verify(save(tmp_path / "bad.pt", bad))
    assert {(error.kind, error.tensor, error.role) for error in found.errors} == {
        # the same tensor as again.weight, to which it is tied
        ("nan", "state_dict/inner.weight", "parameter"),
        ("nan", "state_dict/norm.running_var", "buffer"),
        ("nan", "ema/outer.weight", "ema"),
        ("inf", "optimizer/state/2/exp_avg", "optimizer"),
        ("nan", "optimizer/param_groups/0/lr", "optimizer"),
        ("inf", "scaler/scale", "scaler"),
        ("nan", "lr_scheduler/_last_lr/0", "scheduler"),
    }
    (weight,) = [error for error in found.errors if error.tensor == "state_dict/inner.weight"]
    assert "1 NaN of 512, first at [16, 0]" in weight.detail


FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128"


@pytest.mark.parametrize("dtype", FLOATS.split())
def test_every_element_type_is_scanned_in_every_format(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = torch.linspace(0.5, 1.5, 1000).to(kind)
    wide = values.to(torch.complex64 if kind.is_complex else torch.float32).clone()
    wide[777] = NAN
    for form, save in ONE_FILE.items():
        good = save(tmp_path / f"{form}.pt", {"w.weight": values, "n": torch.ones(3)})
        assert stepguard.verify(good).ok
        bad = save(tmp_path / f"{form}.pt", {"w.weight": wide.to(kind), "n": torch.ones(3)})
        (error,) = stepguard.verify(bad).errors
        assert (error.kind, error.tensor) == ("nan", "w.weight")
        assert "first at [777]" in error.detail


@pytest.mark.parametrize("number", [INF, -INF, NAN])
def test_one_bad_value_is_found_wherever_it_is(tmp_path: Path, number: float) -> None:
    for place in (0, 1, 299_999, 524_288, 1_000_002):
        values = torch.zeros(1_000_003) + 0.5
        values[place] = number
        path = tmp_path / "m.safetensors"
        found = stepguard.verify(saved.save_safetensors(path, {"a": torch.ones(3), "w": values}))
        (error,) = found.errors
        assert f"first at [{place}]" in error.detail and " of 1,000,003" in error.detail


def test_views_of_one_storage_are_scanned_once_and_named_each(tmp_path: Path) -> None:
    flat = torch.ones(1000)
    flat[700] = NAN
    upper = flat[500:].view(20, 25)
    state = {"a": flat[:500], "b": upper, "tied": upper, "t": flat[:100].view(10, 10).T}
    found = stepguard.verify(saved.save_zip(tmp_path / "m.pt", state))
    assert sorted(error.tensor or "" for error in found.errors) == ["b", "tied"]
    assert "first at [8, 0]" in found.errors[0].detail


def test_whole_module_tells_parameters_from_buffers(tmp_path: Path) -> None:
    found = stepguard.verify(saved.save_zip(tmp_path / "module.pt", saved.Small()))
    assert found.roles == {"buffer": 4, "parameter": 8}
    # loading it runs the code of its class, whatever that is
    (error,) = found.errors
    assert error.kind == "global" and "Small" in error.detail and "torch.nn" not in error.detail
    layers = nn.Sequential(nn.Linear(3, 4), nn.LSTM(3, 4), nn.TransformerEncoderLayer(8, 2))
    assert not stepguard.verify(saved.save_zip(tmp_path / "layers.pt", layers)).problems


def test_lightning_checkpoint_and_tensors_with_attributes_are_read(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    path = saved.save_zip(tmp_path / "epoch=1-step=3.ckpt", saved.lightning(everything))
    found = stepguard.verify(path)
    assert found.ok and not found.problems, found.problems
    assert found.step == 3 and found.roles["optimizer"] == 18 and found.roles["other"] == 1
    state = {"p": nn.Parameter(torch.ones(4, 4)), "with": torch.ones(3)}
    state["with"].tag = "attribute"  # type: ignore[attr-defined]
    found = stepguard.verify(saved.save_zip(tmp_path / "m.pt", state))
    assert found.ok and found.roles == {"parameter": 2}


def test_torchscript_archive_is_read(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    with torch.no_grad():
        net[0].weight[1, 1] = NAN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(net, torch.ones(1, 3), check_trace=False)
        torch.jit.save(traced, tmp_path / "net.pt")
    (error,) = stepguard.verify(tmp_path / "net.pt").errors
    assert error.kind == "nan" and "weight" in (error.tensor or "")


def test_parts_steps_and_odd_numbers_of_a_checkpoint_are_told_apart(tmp_path: Path) -> None:
    endless: list[Any] = [torch.ones(2)]
    endless.append(endless)
    root = {
        "model": {"w": torch.ones(2), "bn.running_mean": torch.ones(2), "on": torch.tensor([True])},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "ema": {"w": torch.ones(2)},
        "loose": torch.ones(2),
        "list": endless,
        "steps": 2,
        "lr_scheduler": {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.5], "factor": NAN},
    }
    found = stepguard.verify(saved.save_zip(tmp_path / "m.pt", root))
    assert found.roles == {"buffer": 2, "ema": 1, "optimizer": 1, "other": 1, "parameter": 2}
    assert found.step == 2
    assert {(rate.name, rate.kind) for rate in found.rates} == {
        ("optimizer/param_groups/0/lr", "lr"),
        ("lr_scheduler/base_lrs/0", "base_lr"),
    }
    assert [(error.kind, error.tensor) for error in found.errors] == [
        ("nan", "lr_scheduler/factor")
    ]


def test_parts_and_files_are_told_by_their_names() -> None:
    parts = {
        "optimizer_state_dict": "optimizer",
        "lr_schedulers": "scheduler",
        "grad_scaler": "scaler",
        "model_ema.block.weight": "ema",
        "torch_rng_state": "rng",
        "hyper_parameters": "other",
        "model": None,
        "system.weight": None,
        3: None,
    }
    assert {key: scan.role_of_part(key) for key in parts} == parts
    files = {
        "optimizer.pt": "optimizer",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": "optimizer",
        "rng_state_0.pth": "rng",
        "scheduler.bin": "scheduler",
        "training_args.bin": "other",
        "model.safetensors": None,
    }
    assert {name: scan.role_of_file(name) for name in files} == files


def test_empty_and_foreign_files_say_what_they_are(tmp_path: Path) -> None:
    cases = {
        "empty.pt": (b"", "empty"),
        "zeros.pt": (bytes(4096), "never reached the disk"),
        "note.pt": (b"hello, this is a note", "no known checkpoint format"),
        "model.gguf": (b"GGUF" + bytes(100), "GGUF"),
        "page.pt": (b"<!DOCTYPE html><html>", "no known checkpoint format"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        (error,) = stepguard.verify(tmp_path / name).errors
        assert words in error.detail


@pytest.mark.parametrize(
    ("name", "content", "is_checkpoint"),
    [
        ("x.pt", b"", True),
        ("pytorch_model.bin", b"", True),
        ("x.bin", b"PK\x03\x04", True),
        ("x.bin", b"image", False),
        ("x.pkl", b"\x80\x04N.", True),
        ("epoch.tar", b"PK\x03\x04", True),
        ("model.tar", b"data/", False),
        ("x.json", b"\x80\x04N.", False),
    ],
)
def test_checkpoint_is_told_by_its_name_or_by_its_first_bytes(
    tmp_path: Path, name: str, content: bytes, is_checkpoint: bool
) -> None:
    (tmp_path / name).write_bytes(content)
    assert torch_file.is_checkpoint_file(tmp_path / name) == is_checkpoint


def test_content_of_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(hostile.runs_code(tmp_path / "canary")["REDUCE"])
    with pytest.raises(Damaged, match="could run code"):
        torch_file.read_content(tmp_path / "m.pt")
    assert not (tmp_path / "canary").exists()


# --- What is judged a problem, what a warning, and what is normal in healthy checkpoints.


def problems(path: Path, state: object) -> list[Problem]:
    return list(stepguard.verify(saved.save_zip(path / "m.pt", state)).problems)


def judged(path: Path, state: object) -> list[tuple[str, str]]:
    return [(problem.kind, problem.severity) for problem in problems(path, state)]


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("w.weight", torch.full((40, 40), 1e30).fill_diagonal_(1), [("magnitude", "error")]),
        ("w.weight", torch.rand(40, 40) * 1e10, [("magnitude", "warning")]),
        ("w.weight", torch.rand(40, 40).half() * 60000, [("magnitude", "warning")]),
        ("w.weight", torch.rand(40, 40) * 1e5, []),
        ("w.weight", torch.zeros(40, 40), [("zero", "warning")]),
        ("w.weight", torch.full((40, 40), 0.25), [("constant", "warning")]),
        ("norm.weight", torch.ones(512), []),
        ("norm.bias", torch.zeros(512), []),
        ("q.lora_B.weight", torch.zeros(40, 40), []),
        ("block.proj_out.weight", torch.zeros(40, 40), []),
        ("bn.running_mean", torch.zeros(512), []),
        ("bn.running_var", torch.rand(512) - 0.5, [("negative", "error")]),
        ("bn.running_mean", torch.tensor([1.0, NAN]), [("nan", "error")]),
        ("bn.num_batches_tracked", torch.tensor(0), []),
        ("steps", torch.tensor([2**60]), []),
        ("attn.causal_mask", torch.full((9, 9), -INF).triu(1), []),
        ("attn.causal_mask", torch.full((9, 9), NAN).triu(1), [("nan", "warning")]),
        ("attn.strange_name", torch.full((9, 9), -INF).triu(1), [("inf", "warning")]),
        ("attn.mask", torch.full((9, 9), LOWEST), []),
        ("attn.bias_table", torch.full((9, 9), LOWEST).triu(1), []),
        ("w.weight", torch.full((9, 9), -INF), [("inf", "error")]),
        ("observer.min_val", torch.tensor(INF), [("inf", "warning")]),
        ("w.weight", torch.full((9, 9), INF), [("inf", "error")]),
        ("w.weight", torch.full((9, 9), -INF).fill_diagonal_(0.5), [("inf", "error")]),
        ("empty", torch.zeros(0, 7), []),
        ("scalar", torch.tensor(3.0), []),
    ],
)
def test_judgement_of_one_tensor(
    tmp_path: Path, name: str, value: torch.Tensor, expected: list[tuple[str, str]]
) -> None:
    assert judged(tmp_path, {name: value, "other.weight": torch.rand(4, 4)}) == expected


def test_numbers_of_callbacks_optimizers_and_schedulers_may_be_infinite(tmp_path: Path) -> None:
    def callback(score: float) -> Any:
        best = {"stop": {"best_score": torch.tensor(score)}}
        return {"state_dict": {"w": torch.rand(4, 4)}, "callbacks": best}

    assert judged(tmp_path, callback(INF)) == []
    assert judged(tmp_path, callback(NAN)) == [("nan", "warning")]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert judged(tmp_path, {"scheduler": plateau.state_dict()}) == []
    moments = {"step": torch.tensor(0.0), "exp_avg_sq": torch.zeros(64, 64)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "params": [0], "growth_rate": INF}
    fresh = {"optimizer": {"state": {0: moments}, "param_groups": [group]}}
    assert judged(tmp_path, fresh) == []
    moments["exp_avg_sq"][1, 1] = -0.3
    (problem,) = problems(tmp_path, fresh)
    assert (problem.kind, problem.role) == ("negative", "optimizer")
    assert problem.tensor == "optimizer/state/0/exp_avg_sq"


def test_many_bad_tensors_are_listed_in_part_and_counted(tmp_path: Path) -> None:
    found = problems(tmp_path, {f"w{n}": torch.tensor([NAN]) for n in range(100)})
    assert len(found) == 21 and "80 more" in found[-1].detail


# --- Damage: what is cut off, a flipped bit, views that do not fit.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "m.safetensors"])
def test_truncation_anywhere_is_an_error(
    tmp_path: Path, whole: dict[str, bytes], name: str
) -> None:
    content = whole[name]
    for length in range(0, len(content), max(1, len(content) // 97)):
        (tmp_path / name).write_bytes(content[:length])
        assert stepguard.verify(tmp_path / name).corrupt, f"cut at {length} of {len(content)}"


def covered(content: bytes) -> list[int]:
    """Every byte that a CRC covers; the padding between records is nobody's."""
    offsets: list[int] = []
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            at = entry.header_offset
            lengths = content[at + 26 : at + 30]
            start = at + 30 + int.from_bytes(lengths[:2], "little")
            start += int.from_bytes(lengths[2:], "little")
            offsets.extend(range(start, start + entry.file_size))
    return offsets


@pytest.mark.slow
@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_in_the_data_of_a_zip_is_found(
    tmp_path_factory: pytest.TempPathFactory, whole: dict[str, bytes], place: float, bit: int
) -> None:
    content = bytearray(whole["zip.pt"])
    offsets = covered(bytes(content))
    at = offsets[int(place * len(offsets))]
    content[at] ^= 1 << bit
    path = tmp_path_factory.mktemp("flip") / "zip.pt"
    path.write_bytes(content)
    assert stepguard.verify(path).corrupt, f"bit {bit} of byte {at}"


def test_checksum_names_the_record_and_both_sums(
    tmp_path: Path, whole: dict[str, bytes], everything: dict[str, Any]
) -> None:
    content = bytearray(whole["zip.pt"])
    weight = everything["state_dict"]["outer.weight"].numpy().tobytes()
    content[content.find(weight) + 10] ^= 1
    (tmp_path / "m.pt").write_bytes(content)
    (error,) = stepguard.verify(tmp_path / "m.pt").errors
    assert error.kind == "checksum"
    assert "/data/" in error.detail and "bytes have changed" in error.detail


def test_file_without_checksums_says_that_flips_cannot_be_found(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.randn(200, 200)}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = stepguard.verify(tmp_path / "m.pt")
    assert found.ok and [warning.kind for warning in found.warnings] == ["checksum"]


@pytest.mark.parametrize(
    ("elements", "view", "kind"),
    [
        (b"K\x01", b"K\x01K\x01\x85K\x01\x85", "malformed"),
        (b"K\x01", b"J\xff\xff\xff\xffK\x01\x85K\x01\x85", "malformed"),
        (b"K\x01", b"K\x00K\x01\x85J\xff\xff\xff\xff\x85", "malformed"),
        (b"K\x01", b"K\x00K\x01K\x01\x86K\x01\x85", "malformed"),
        (b"K\x01", b"K\x00K\x02\x85K\x01\x85", "malformed"),
        (b"K\x02", b"K\x00K\x01\x85K\x01\x85", "torn"),
        (b"K\x01", b"K\x00K\x05\x85K\x00\x85", ""),
        (b"K\x01", b"K\x00K\x00\x85K\x01\x85", ""),
    ],
)
def test_tensor_that_does_not_fit_into_its_storage_is_a_problem(
    tmp_path: Path, elements: bytes, view: bytes, kind: str
) -> None:
    """The archive holds one storage of one float; the view is offset, shape and strides."""
    storage = text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + elements
    hooks = b"\x89" + named("collections", "OrderedDict") + b")R"
    call = named("torch._utils", "_rebuild_tensor_v2") + b"((" + storage + b"tQ" + view + hooks
    (tmp_path / "m.pt").write_bytes(fuzz.zip_file(fuzz.archive(b"\x80\x04" + call + b"tR.")))
    found = stepguard.verify(tmp_path / "m.pt")
    assert [problem.kind for problem in found.errors] == [kind] * bool(kind), found.problems
    assert found.tensors == (not kind)


def test_limits_of_walks_and_directories_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.save_pickle(tmp_path / "m.pkl", [1.5] * 20)
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        for number in range(100):
            archive.writestr(f"a/{number}", b"")
    monkeypatch.setattr(torch_file, "MOST_VALUES", 10)
    monkeypatch.setattr(torch_file, "LARGEST_INDEX", 2000)
    for name in ("m.pkl", "m.pt"):
        assert [error.kind for error in stepguard.verify(tmp_path / name).errors] == ["limit"]


def test_types_below_a_byte_are_measured_in_bits(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = {"a": {"dtype": "F4", "shape": [5], "data_offsets": [0, 3]}}
    path.write_bytes(hostile.safetensors(header, bytes(3)))
    found = stepguard.verify(path)
    assert found.tensors == 1 and not found.problems


def test_sizes_of_element_types_are_those_of_torch() -> None:
    known = {name: size for name, size in SIZES.items() if hasattr(torch, name)}
    assert {name: getattr(torch, name).itemsize for name in known} == known
    for table in (scan.ALIASES, scan.STORAGES, scan.SAFETENSORS, scan.NUMPY):
        assert set(table.values()) <= set(SIZES)


# --- One pass over a file: statistics and checksums of any pieces, with threads or without.


def scanned(layout: FileLayout) -> list[int]:
    read: list[int] = []
    with open_file(layout.path) as source:
        scan.scan(source, layout, read.append)
    return read


@pytest.mark.parametrize("run", [1, 1 << 30])
def test_values_and_checksums_are_the_same_with_one_thread_and_with_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    content = torch.linspace(-3.0, 5.0, 700_000).numpy().tobytes()
    layout = FileLayout(tmp_path / "values")
    layout.path.write_bytes(content)
    layout.size = len(content)
    quarter = len(content) // 4
    for start in range(0, len(content), quarter):
        layout.add_tensor(str(start), "parameter", "float32", (175_000,), start, quarter)
    layout.checksums = [
        Checksum(8, 100, "part", xxhash.xxh3_128(content[8:108]).hexdigest()),
        Checksum(0, 2 * quarter, "half", zlib.crc32(content[: 2 * quarter])),
    ]
    monkeypatch.setattr(scan, "RUN", run)
    threads = torch.get_num_threads()
    assert sum(scanned(layout)) == layout.size
    seen = [tensor.values for tensor in layout.tensors if tensor.values is not None]
    assert [values.count for values in seen] == [175_000] * 4
    assert (seen[0].low, seen[-1].high, sum(values.bad for values in seen)) == (-3.0, 5.0, 0)
    assert not layout.problems() and torch.get_num_threads() == threads
    layout.path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    scanned(layout)
    assert [found.detail.partition(":")[0] for found in layout.problems()] == ["part", "half"]


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
    layout = FileLayout(tmp_path_factory.mktemp("spans") / "file")
    layout.path.write_bytes(content)
    for number, (dtype, base, first, count) in enumerate(tensors):
        start, length = base + first * SIZES[dtype], count * SIZES[dtype]
        layout.add_tensor(str(number), "other", dtype, (count,), start, length, base)
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


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64", "float8_e5m2"])
def test_values_in_any_piece_are_counted_and_the_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, suffix: str
) -> None:
    monkeypatch.setattr(scan, "PIECE", 4096)
    monkeypatch.setattr(scan, "RUN", 64 << 10)
    kind = getattr(torch, dtype)
    real = torch.randn(
        (scan.RUN + 5 * scan.PIECE) // kind.itemsize + 37,
        generator=torch.Generator().manual_seed(0),
    )
    tensor = torch.complex(real, real) if kind.is_complex else real.to(kind)
    places = [3 * scan.PIECE // kind.itemsize + 11, scan.RUN // kind.itemsize - 1, len(tensor) - 1]
    save = saved.save_zip if suffix == ".pt" else saved.save_safetensors
    path = save(tmp_path / f"long{suffix}", {"w": tensor})
    assert stepguard.verify(path).ok
    for place in places:
        tensor[place] = NAN
    save(path, {"w": tensor})
    (problem,) = [found for found in stepguard.verify(path).problems if found.kind == "nan"]
    assert "3 NaN of" in problem.detail and f"first at [{places[0]}]" in problem.detail
    whole = path.read_bytes()
    for at in (4096, len(whole) // 2, len(whole) - scan.PIECE) if suffix == ".pt" else ():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert "checksum" in {found.kind for found in stepguard.verify(path).problems}


def test_views_that_overlap_without_end_are_measured_together() -> None:
    layout = FileLayout(Path("m.pt"))
    for n in range(900):
        size = 4 * (1000 - n)
        layout.add_tensor("w", "parameter", "float32", (size // 4,), n * 4, size, 0)
    (values,) = scan._shared(layout.tensors)
    assert (values.start, values.size) == (0, 4000)
    assert all(tensor.values is values for tensor in layout.tensors)


# --- The learning rate that a configuration means.


def rated(folder: Path, kind: str) -> Path:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    state: dict[str, Any] = {"w": torch.ones(3)}
    if kind == "one cycle":
        state = saved.trained()
    elif kind == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        optimizer.step()
        scheduler.step()
        state = {"optimizer": optimizer.state_dict(), "sched": scheduler.state_dict()}
    elif kind == "plain":
        state = {"optimizer": optimizer.state_dict()}
    return saved.save_zip(folder / "m.pt", state)


@pytest.mark.parametrize(
    ("kind", "rate", "words"),
    [
        ("one cycle", 5e-4, ["OneCycleLR", "0.0005"]),
        ("cosine", 0.1, ["initial_lr", "running at"]),
        ("plain", 0.1, ["0.1"]),
        ("none", 0.1, []),
    ],
)
def test_rate_is_compared_with_the_one_that_the_checkpoint_brings_back(
    tmp_path: Path, kind: str, rate: float, words: list[str]
) -> None:
    path = rated(tmp_path, kind)
    assert stepguard.verify(path, lr=rate).ok
    found = stepguard.verify(path, lr=3 * rate)
    assert [error.kind for error in found.errors] == ["lr"] * bool(words)
    assert not found.corrupt
    for word in words:
        assert word in found.errors[0].detail


@pytest.mark.parametrize("lr", [0.0, -1.0, NAN, INF])
def test_rate_that_is_none_is_refused(tmp_path: Path, lr: float) -> None:
    with pytest.raises(stepguard.ConfigError, match="learning rate"):
        stepguard.verify(tmp_path, lr=lr)


def test_numpy_arrays_and_scalars_in_a_pickle_are_read(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    array = np.ones((300, 300))
    array[7, 9] = np.nan
    weights = {"w": array, "ok": np.zeros(5, dtype=np.float32)}
    value = {"state_dict": weights, "scaler": {"scale": np.float64("nan")}}
    found = stepguard.verify(saved.save_pickle(tmp_path / "m.pkl", value))
    details = {(error.tensor, error.kind): error.detail for error in found.errors}
    assert details.keys() == {("scaler/scale", "nan"), ("state_dict/w", "nan")}
    assert "first at [7, 9]" in details["state_dict/w", "nan"]
