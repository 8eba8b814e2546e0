"""Hostile and damaged files: no code runs, memory stays bounded, none of them is called good."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.parts import fuzz
from benchmarks.parts.fuzz import named, raw, text
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import forked
import stepguard
from check import hostile, saved
from check.hostile import code
from forked import FULL
from stepguard.check.scan import Damaged, open_file
from stepguard.checkpoints.seal import Health, Seal, SealedFile, digest_of, seal_bytes
from stepguard.records.checks import Verification

BOUND = 1 << 30
"""Bytes that a hostile file may add to a process: far below what it declares."""


def verify(path: Path, content: bytes) -> Verification:
    path.write_bytes(content)
    return stepguard.verify(path)


def kinds(found: Verification) -> set[str]:
    return {problem.kind for problem in found.errors}


@pytest.mark.parametrize("trick", hostile.runs_code(Path("canary")))
@pytest.mark.parametrize("form", ["pickle", "zip"])
def test_pickle_that_would_run_code_is_named_and_does_not_run(
    tmp_path: Path, trick: str, form: str
) -> None:
    canary = tmp_path / "canary"
    content = hostile.runs_code(canary)[trick]
    found = verify(tmp_path / "model.pt", hostile.in_zip(content) if form == "zip" else content)
    assert "hostile" in kinds(found), found.problems
    assert not canary.exists()
    assert "nothing was run" in next(p.detail for p in found.errors if p.kind == "hostile")


@pytest.mark.parametrize("trick", hostile.evasions(Path("canary")))
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
def test_file_that_shows_one_content_and_runs_another_is_not_good(
    tmp_path: Path, trick: str, name: str
) -> None:
    canary = tmp_path / "canary"
    found = verify(tmp_path / name, hostile.evasions(canary)[trick])
    assert found.corrupt and not canary.exists()


def test_archive_that_is_written_by_hand_is_good_without_the_trick(tmp_path: Path) -> None:
    shown = hostile.P4 + b"]" + fuzz.TENSOR + b"a."
    for content in (fuzz.zip_file(fuzz.archive(shown)), fuzz.in_legacy(shown)):
        found = verify(tmp_path / "model.pt", content)
        assert found.ok and found.tensors == 1, found.problems


def test_script_that_runs_when_it_is_loaded_is_not_good(tmp_path: Path) -> None:
    """TorchScript can write files, and torch.load runs the `__setstate__` of an archive."""
    code = b"class Net(Module):\n  def __setstate__(self, state: int) -> NoneType:\n    pass\n"
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    for method, data in ((0, code), (8, packer.compress(code) + packer.flush())):
        content = bytearray(
            fuzz.zip_file(
                [
                    ("net/code/__torch__.py", data),
                    ("net/data.pkl", b"\x80\x02c__torch__\nNet\n)\x81}b."),
                    ("net/constants.pkl", b"\x80\x02)."),
                ]
            )
        )
        # the method and the size of the first entry of the directory
        entry = content.find(b"PK\x01\x02")
        struct.pack_into("<H", content, entry + 10, method)
        struct.pack_into("<I", content, entry + 24, len(code))
        found = verify(tmp_path / "net.pt", bytes(content))
        assert kinds(found) == {"global"} and "__setstate__" in found.errors[0].detail


@pytest.mark.parametrize("name", hostile.UNUSUAL_NAMES)
def test_function_that_no_checkpoint_needs_is_refused_whatever_it_is_called(
    tmp_path: Path, name: str
) -> None:
    found = verify(tmp_path / "model.pt", hostile.in_zip(hostile.by_name(name)))
    (error,) = found.errors
    assert (
        error.kind in ("hostile", "global") and f"names {name}, which a checkpoint" in error.detail
    )
    assert found.corrupt


def test_everything_of_the_standard_library_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    """A list of bad names is never complete: this goes through all modules there are."""
    modules = sorted(sys.stdlib_module_names - {"builtins"})
    content = hostile.P4 + b"]" + b"".join(named(module, "anything") + b")Ra" for module in modules)
    found = verify(tmp_path / "model.pt", content + b".")
    assert kinds(found) == {"hostile"} and f"{len(modules) - 20} more" in found.errors[-1].detail


def test_value_of_an_own_class_is_told_and_not_moved_away(tmp_path: Path) -> None:
    """An Enum of a project is rebuilt by a call: nobody can see what it does, and it is no damage
    either.
    """
    from stepguard.check.quarantine import is_bad

    found = verify(
        tmp_path / "model.pt", hostile.in_zip(hostile.by_name("my_project.settings.Mode"))
    )
    assert kinds(found) == {"global"} and "save its value instead" in found.errors[0].detail
    assert not is_bad(found)


LONG = () if FULL else ("stack without end", "marks without end")
"""Seconds each; the child that is limited in its memory reads them as well."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in hostile.GREEDY if name not in LONG])
def test_declared_sizes_are_not_believed(tmp_path: Path, name: str) -> None:
    found = verify(tmp_path / "model.pt", hostile.GREEDY[name])
    assert found.ok == (name in hostile.HARMLESS_GREEDY), found.problems
    assert len(found.errors) <= 1


@pytest.mark.parametrize("name", hostile.BROKEN)
def test_broken_stream_is_one_clear_error(tmp_path: Path, name: str) -> None:
    found = verify(tmp_path / "model.pkl", hostile.BROKEN[name])
    assert [problem.kind for problem in found.errors] in (["malformed"], ["torn"]), found.problems
    assert len(found.errors[0].detail) > 10


@pytest.mark.slow
def test_deep_nesting_is_cut_off(tmp_path: Path) -> None:
    found = verify(tmp_path / "model.pt", hostile.deep())
    assert kinds(found) == {"limit"} and "deep" in found.errors[0].detail


def test_deep_key_is_not_hashed(tmp_path: Path) -> None:
    assert not kinds(verify(tmp_path / "model.pt", hostile.deep_key())) - {"limit"}


@pytest.mark.slow
def test_hundred_thousand_tensors_are_read(tmp_path: Path) -> None:
    count = 100_000 if FULL else 10_000
    content = hostile.in_zip(hostile.tensors_without_end(count), data__0=b"\0\0\x80?")
    found = verify(tmp_path / "model.pt", content)
    assert found.ok and found.tensors == count


def test_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    found = verify(tmp_path / "model.pt", hostile.bomb())
    assert kinds(found) == {"limit"} and "compressed" in found.errors[0].detail


def test_zip_in_a_zip_is_not_followed(tmp_path: Path) -> None:
    inner = hostile.in_zip(hostile.runs_code(tmp_path / "canary")["REDUCE"])
    found = verify(tmp_path / "model.pt", hostile.zip_with({"archive/inner.zip": inner}))
    assert kinds(found) == {"format"} and not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "C:/x"])
def test_entry_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    assert kinds(
        verify(tmp_path / "model.pt", hostile.zip_with({name: b"x", "a/data.pkl": b"N."}))
    ) == {"hostile"}


def test_entries_on_the_same_bytes_are_refused(tmp_path: Path) -> None:
    assert kinds(verify(tmp_path / "model.pt", hostile.overlapping())) == {"hostile"}
    assert kinds(verify(tmp_path / "model.pt", hostile.misnamed())) == {"malformed"}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entry_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    import io
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"N.")
        archive.writestr("archive/data.pkl", b"N.")
    assert kinds(verify(tmp_path / "model.pt", out.getvalue())) == {"duplicate"}


def test_zip_directory_of_four_gigabytes_is_not_believed(tmp_path: Path) -> None:
    assert not verify(tmp_path / "model.pt", hostile.huge_directory()).ok


@pytest.mark.parametrize("name", hostile.MALFORMED_SAFETENSORS)
def test_malformed_safetensors_is_one_clear_error(tmp_path: Path, name: str) -> None:
    found = verify(tmp_path / "model.safetensors", hostile.MALFORMED_SAFETENSORS[name])
    assert len(found.errors) == 1, found.problems
    assert kinds(found) <= {"torn", "malformed", "limit", "format", "duplicate"}


@pytest.mark.parametrize(
    "shard", ["../../secret.safetensors", "/etc/passwd", "..", "sub/x.safetensors"]
)
def test_index_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "secret.safetensors").write_bytes(b"not for you")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    found = stepguard.verify(folder)
    assert "hostile" in kinds(found) and "not for you" not in str(found)


def test_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    outside = tmp_path / "outside.pt"
    outside.write_bytes(hostile.runs_code(tmp_path / "canary")["REDUCE"])
    (folder / "model.pt").symlink_to(outside)
    (folder / "more").symlink_to(tmp_path)
    found = stepguard.verify(folder)
    assert not found.ok and [problem.kind for problem in found.errors] == ["link", "link"]
    assert not found.leaves


def test_fifo_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    found = stepguard.verify(tmp_path)
    assert kinds(found) == {"unreadable"} and "FIFO" in found.errors[0].detail


def test_names_from_the_file_cannot_move_the_cursor(tmp_path: Path) -> None:
    name = text("\x1b[2J" + "n" * 200)
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    )
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00))\x89}tR"
    found = verify(
        tmp_path / "model.pt",
        hostile.in_zip(b"\x80\x02}" + name + tensor + b"s.", data__0=b"\0\0\xc0\x7f"),
    )
    (problem,) = found.errors
    assert problem.kind == "nan" and problem.tensor is not None
    assert "\x1b" not in problem.tensor and len(problem.tensor) <= 200


CHILD = """
import resource, sys, stepguard, torch, stepguard.check.verify
def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
before = status("VmHWM")
found = stepguard.verify(sys.argv[1])
print(found.ok, found.bytes, status("VmHWM") - before)
bound = status("VmSize") + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
found = stepguard.verify(sys.argv[2])
print(len(found.parts), len(found.errors))
"""


def test_memory_is_bounded_for_large_files_and_for_the_worst_ones(tmp_path: Path) -> None:
    """In a child: a large file that is mostly a hole, then hostile files under a system limit."""
    size = 2_000_000_000 if FULL else 800_000_000
    large, folder = tmp_path / "large.safetensors", tmp_path / "worst"
    large.write_bytes(hostile.safetensors({"a": hostile.entry(0, size, shape=(size // 4,))}))
    os.truncate(large, large.stat().st_size + size)
    folder.mkdir()
    chosen = {**hostile.GREEDY, "bomb": hostile.bomb(), "directory": hostile.huge_directory()}
    for number, content in enumerate(chosen.values()):
        (folder / f"{number}.pt").write_bytes(content)
    (folder / "header.safetensors").write_bytes(hostile.MALFORMED_SAFETENSORS["header of 2 GB"])
    command = ["-c", CHILD, str(large), str(folder), str(BOUND)]
    done = forked.python(command, variables={**os.environ, "OMP_NUM_THREADS": "1"}, seconds=200)
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[:2] == ["True", str(large.stat().st_size)] and int(first[2]) < 300_000_000
    count = len(chosen) + 1
    assert second == [str(count), str(count - len(hostile.HARMLESS_GREEDY))]


RUN = b"\x80\x04" + code("os:system", "false", b"\x85R.")
HOSTILE = fuzz.zip_file(fuzz.archive(RUN))
PICKLER: Any = pickle._Pickler
"""Typeshed does not know its parts."""
OBJECT = code("numpy:dtype", "O8", b"\x89\x88\x87R")
VOID = code("numpy:dtype", "V8", b"\x89\x88\x87R")
EIGHT = raw(b"A" * 8)
RECONSTRUCT = code("numpy._core.multiarray:_reconstruct", "numpy:ndarray")


def state(
    *, names: bytes = b"N", fields: bytes = b"N", size: bytes = b"J\xff\xff\xff\xff"
) -> bytes:
    """A state of a numpy type whose flags deny that it holds objects."""
    return b"(K\x03" + text("|") + b"N" + names + fields + size + size + b"K\x00tb"


def scalar(kind: bytes) -> bytes:
    return code("numpy._core.multiarray:scalar", kind, EIGHT, b"\x86R")


def field(offset: bytes) -> bytes:
    fields = code(b"}", "a", OBJECT, offset, b"\x86s")
    return VOID + state(names=code("a", b"\x85"), fields=fields, size=b"K\x08")


# a DictConfig of omegaconf with one value, as far as verify looks at it
LAZY = code(
    "omegaconf.dictconfig:DictConfig",
    b")\x81}",
    "_content",
    b"}",
    "activation",
    "${eval:1}",
    b"ssb",
)
STORAGE = code(b"(", "storage", "torch:FloatStorage", "0", "cpu")
TENSOR_ARGUMENTS = code(b"(", STORAGE, b"K\x01tQK\x00))\x89", "collections:OrderedDict", b")Rt")
PICKLES = {
    "bytes as an object, in a scalar": scalar(OBJECT + state()),
    "bytes as an object, in an array": code(
        RECONSTRUCT,
        b"K\x00\x85",
        raw(b"b"),
        b"\x87R(K\x01K\x01\x85",
        OBJECT,
        state(),
        b"\x89",
        EIGHT,
        b"tb",
    ),
    "bytes as an object, from a buffer": code(
        "numpy._core.numeric:_frombuffer", b"(", EIGHT, OBJECT, state(), b"K\x01\x85", "C", b"tR"
    ),
    "field outside of its element": scalar(field(b"J\x00\x00\x10\x00")),
    "field of objects": scalar(field(b"K\x00")),
    "byte order of everybody's float64": code("numpy:dtype", "f8", b"\x89\x89\x87R", state()),
    "array of a terabyte": code(
        RECONSTRUCT, b"\x8a\x06", (1 << 40).to_bytes(6, "little"), b"\x85", raw(b"b"), b"\x87R"
    ),
    "attributes of a tensor by a mapping": code(
        "torch._tensor:_rebuild_from_type_v2",
        b"(",
        "torch._utils:_rebuild_tensor_v2",
        "torch:Tensor",
        TENSOR_ARGUMENTS,
        "lightning.fabric.utilities.data:AttributeDict",
        b")\x81",
        "__reduce_ex__",
        "torch.nn.functional:relu",
        b"stR",
    ),
    "resolver, by a search": code(
        "torch.nn.modules.transformer:TransformerEncoderLayer",
        b")\x81}",
        "_parameters",
        LAZY,
        b"sb",
    ),
    "resolver, by a loop": code(
        "torch.distributed.device_mesh:DeviceMesh", b")\x81}", "_dim_group_names", LAZY, b"sb"
    ),
    "resolver, by a key": b"}(" + LAZY + b"N" + LAZY + b"Nu",
    "resolver, by a key in a key": b"}(" + LAZY + b"\x85\x85NK\x01Nu",
    "resolver, in a set": b"\x8f(" + LAZY + LAZY + b"\x90",
    "resolver, in a frozenset": b"(" + LAZY + LAZY + b"\x91",
    "resolver, in a set of a list": code("builtins:set", b"](", LAZY, LAZY, b"e\x85R"),
    "resolver, counted": code("collections:Counter", b"](", LAZY, LAZY, b"e\x85R"),
    "resolver, in a sparse tensor": code(
        "torch._utils:_rebuild_sparse_tensor",
        "torch.serialization:_get_layout",
        "torch.sparse_coo",
        b"\x85R(",
        3 * LAZY,
        b"t\x86R",
    ),
    "number of a billion digits": code("fractions:Fraction", "1e999999999", b"\x85R"),
    "storage that is longer than its record": STORAGE + b"J\x00\x00\x00\x01tQ0N",
}


@pytest.mark.parametrize("trick", PICKLES)
@pytest.mark.parametrize("form", [lambda p: fuzz.zip_file(fuzz.archive(p)), fuzz.in_legacy])
def test_listed_names_cannot_be_combined_into_more(
    tmp_path: Path, trick: str, form: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(form(b"\x80\x04]" + PICKLES[trick] + b"a."))
    assert not stepguard.verify(path).ok


GOES_ON = {
    "octal number": b"I0777\n0",
    "zero byte in a number": b"I1\x00;\n0",
    "item of a list": b"]NaK\x00Ns0",
    "bytearray that grows": b"\x96" + struct.pack("<Q", 1) + b"a(K\x01e0",
    "item of a bytearray": b"\x96" + struct.pack("<Q", 1) + b"aK\x00K\x01s0",
    "buffer": raw(b"a") + b"\x980",
    "state of None": b"]Nb0",
    "long integer": b"\x8b" + struct.pack("<i", 2000) + b"\0" * 2000 + b"0",
    "long line": b"V" + b"a" * 70_000 + b"\n0",
}
"""What the C unpickler takes and the one here does not."""


@pytest.mark.parametrize("trick", GOES_ON)
def test_safetensors_that_is_a_pickle_as_well_is_refused(tmp_path: Path, trick: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(fuzz.in_safetensors(b"\x80\x04" + GOES_ON[trick] + RUN[2:]))
    found = stepguard.verify(path)
    assert [problem.kind for problem in found.errors] == ["hostile"]


def test_safetensors_under_another_name_stays_good(tmp_path: Path) -> None:
    """Their first byte is an opcode in one of three files."""
    for count in range(64):
        tensors = {f"layers.{number}.weight": torch.ones(2) for number in range(count)}
        save_file({**tensors, "last": torch.ones(1)}, tmp_path / f"{count}.pt")
    found = stepguard.verify(tmp_path)
    assert found.ok and len(found.parts) == 64, found.problems


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    return folder


@pytest.mark.parametrize("where", ["../outside.pt", ".cache/x", "blob", "quarantine/x.pt"])
def test_link_to_a_file_that_the_search_passes_over_is_not_good(trainer: Path, where: str) -> None:
    assert stepguard.verify(trainer).ok
    target = trainer / where
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(HOSTILE)
    (trainer / "optimizer.pt").symlink_to(where)
    assert not stepguard.verify(trainer).ok


def test_link_to_a_hidden_folder_is_not_good(trainer: Path) -> None:
    hidden = trainer / ".hidden"
    hidden.mkdir()
    (hidden / "optimizer.pt").write_bytes(HOSTILE)
    (trainer / "latest").symlink_to(".hidden")
    assert not stepguard.verify(trainer).ok


def test_link_to_a_checkpoint_beside_it_stays_good(trainer: Path) -> None:
    (trainer / "last.safetensors").symlink_to("model.safetensors")
    found = stepguard.verify(trainer)
    assert found.ok and not found.problems and found.files == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("custom_checkpoint_0.pkl", b"cos\nsystem\n(S'false'\ntR."),
        ("custom_checkpoint_0.pkl", b"I1\x00;\n0cos\nsystem\n(S'false'\ntR."),
        ("sampler.bin", b"K\x010cos\nsystem\n(S'false'\ntR."),
        ("old.bin", fuzz.in_tar(b"storages", storages=RUN, tensors=RUN, pickle=RUN)),
        ("weights.th", HOSTILE),
        ("weights.pyth", HOSTILE),
    ],
)
def test_folder_passes_over_no_pickle(tmp_path: Path, name: str, content: bytes) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / name).write_bytes(content)
    assert not stepguard.verify(tmp_path).ok


def test_data_beside_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    chance = np.random.default_rng(0)
    chance.integers(0, 50257, 5000).astype(np.uint16).tofile(tmp_path / "train.bin")
    for first in range(256):
        (tmp_path / f"{first}.bin").write_bytes(bytes([first]) + chance.bytes(600))
    (tmp_path / "words.bin").write_bytes(b"can I go\nI can\n")
    found = stepguard.verify(tmp_path)
    assert found.ok and found.files == 1, found.problems


def write_seal(folder: Path, *names: str) -> None:
    files = {}
    for name in names:
        content = (folder / name).read_bytes()
        files[name] = SealedFile(size=len(content), digest=digest_of(content))
    health = Health(loss=1.0, level=1.0, steps_watched=1, incidents=0, good=True)
    seal = Seal(step=1, health=health, files=files, tensors={}, serial=0)
    (folder / "seal.json").write_bytes(seal_bytes(seal))


@pytest.mark.parametrize("name", ["optimizer.pt", "more/optimizer.pt"])
@pytest.mark.parametrize("is_named", [True, False])
def test_seal_vouches_for_no_pickle(tmp_path: Path, name: str, is_named: bool) -> None:
    """Anybody can write a seal."""
    (tmp_path / "facts.json").write_text("{}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(HOSTILE)
    write_seal(tmp_path, "facts.json", *([name] if is_named and "/" not in name else []))
    assert "hostile" in {problem.kind for problem in stepguard.verify(tmp_path).errors}


@pytest.mark.parametrize("name", ["common.pt", "more/common.pt", "__0.metadata"])
def test_everything_in_a_dcp_folder_is_read(tmp_path: Path, name: str) -> None:
    saved.save_dcp(tmp_path, {"w": torch.ones(4), "o": {"a": 1}})
    assert stepguard.verify(tmp_path).ok
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(RUN if name.endswith("metadata") else HOSTILE)
    assert "hostile" in {problem.kind for problem in stepguard.verify(tmp_path).errors}


@pytest.mark.parametrize("way", ["state", "dict"])
def test_piece_whose_place_is_changed_afterwards_is_read_where_torch_reads_it(
    tmp_path: Path, way: str
) -> None:
    """Pickle copies a state and `dict(d)`; what is put into `d` later is a decoy."""
    values = torch.frombuffer(bytearray(HOSTILE), dtype=torch.uint8).clone()
    saved.save_dcp(tmp_path, {"w": values, "o": {"a": 1}})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    stored = metadata.storage_data
    (index,) = (index for index in stored if index.fqn == "o.a")
    decoy = type(stored[index])(
        stored[index].relative_path, stored[index].offset, stored[index].length
    )
    stored[index].offset = (tmp_path / "__0_0.distcp").read_bytes().find(HOSTILE)
    stored[index].length = len(HOSTILE)
    kept: list[Any] = []

    class Changing(PICKLER):
        def again(self, value: Any, *entries: Any) -> None:
            """Put entries into a dict that was written before."""
            kept.append(value)
            self.write(self.get(self.memo[id(value)][0]))
            for key, entry in entries:
                self.save(key)
                self.save(entry)
                self.write(pickle.SETITEM)
            self.write(pickle.POP)

        def save_reduce(
            self, func: Any, args: Any, state: Any = None, *more: Any, obj: Any = None
        ) -> None:
            if way != "state" or obj is not stored[index]:
                super().save_reduce(func, args, state, *more, obj=obj)
                return
            changed = dict(state)
            super().save_reduce(func, args, obj=obj)
            self.save(changed)
            self.write(pickle.BUILD)
            self.again(changed, ("offset", decoy.offset), ("length", decoy.length))

        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            if way != "dict" or obj is not stored:
                super().save(obj, save_persistent_id)
                return
            changed = dict(stored)
            super().save(dict)
            super().save(changed)
            self.write(pickle.TUPLE1 + pickle.REDUCE)
            self.again(changed, (index, decoy))

    out = io.BytesIO()
    Changing(out, 4).dump(metadata)
    read = pickle.loads(out.getvalue()).storage_data
    assert read[index].length == len(HOSTILE)
    (tmp_path / ".metadata").write_bytes(out.getvalue())
    assert "hostile" in {problem.kind for problem in stepguard.verify(tmp_path).errors}


@pytest.mark.parametrize(
    "entries",
    [
        [("net/data.pkl", b"\x80\x02c__torch__.torch.classes.mine\nRunner\n)\x81N\x85b.")],
        [
            ("net/data.pkl", b"\x80\x02)."),
            ("net/model.json", json.dumps({"mainModule": {}}).encode()),
            ("net/hidden.py", b"def __setstate__(self, state: int) -> None:\n  return None\n"),
        ],
    ],
)
def test_script_that_runs_code_from_elsewhere_is_not_good(
    tmp_path: Path, entries: list[tuple[str, bytes]]
) -> None:
    path = tmp_path / "net.pt"
    path.write_bytes(fuzz.zip_file([*entries, ("net/constants.pkl", b"\x80\x02).")]))
    assert [problem.kind for problem in stepguard.verify(path).errors] == ["global"]


def test_entry_whose_name_torch_would_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    plain = fuzz.archive(b"\x80\x04N.")
    path.write_bytes(fuzz.zip_file([*plain, ("archive/" + "x" * 600, b"")]))
    assert not stepguard.verify(path).ok


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpy_values_of_every_kind_stay_good(tmp_path: Path, protocol: int) -> None:
    values = {
        "empty": np.zeros(0), "one": np.array(1.0), "big": np.ones(3, ">f4"),
        "texts": np.array(["a", "bb"]), "bytes": np.array([b"x"]),
        "dates": np.array(["2020"], "M8[D]"), "objects": np.array([{"a": 1}, None], dtype=object),
        "fortran": np.asfortranarray(np.ones((2, 3))),
        "scalars": [np.float64(1), np.bool_(True), np.datetime64("2020-01-01"), np.str_("x")],
        "types": [np.dtype("f4"), np.dtype(">i2"), np.float32], "random": np.random.default_rng(0),
        ("key", 1): {frozenset({1, (2, "a")})},
    }  # fmt: skip
    torch.save(values, tmp_path / "model.pt", pickle_protocol=protocol)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(values, protocol=protocol))
    found = stepguard.verify(tmp_path)
    assert found.ok and found.files == 2, found.problems


CASES = 1500 if FULL else 400


@pytest.mark.slow
def test_readers_survive_damage_of_every_format() -> None:
    assert fuzz.run(CASES, None, seed=1, keep=None) == CASES


def test_exception_in_a_reader_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RecursionError("as a careless reader would")

    monkeypatch.setattr("stepguard.check.torch_file.parse", broken)
    with pytest.raises(RecursionError):
        fuzz.run(50, None, seed=1, keep=None)


def test_code_that_runs_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.setattr(
        "stepguard.check.torch_file.parse",
        lambda *arguments: pickle.loads(b"ccollections\nOrderedDict\n)R."),
    )
    with pytest.raises(AssertionError, match=r"pickle\.find_class"):
        fuzz.run(50, None, seed=1, keep=None)


@pytest.mark.slow
def test_nothing_that_is_good_reaches_for_anything_when_torch_loads_it(tmp_path: Path) -> None:
    loader = fuzz.Loader()
    canary = tmp_path / "canary"
    # the same process sees what the files do that verify refuses
    reached = {}
    for trick, content in hostile.evasions(canary).items():
        (tmp_path / "m.pt").write_bytes(content)
        reached[trick] = loader.load(tmp_path / "m.pt")["reached"]
    files = 600 if FULL else 200
    counts = fuzz.differ(files, seed=2, keep=tmp_path, loader=loader)
    assert counts["files"] == files and counts["loaded"] > files // 30
    assert not canary.exists()
    harmless = {trick for trick in reached if not reached[trick]}
    assert harmless <= {
        "archive in front",
        "archive behind",
        "second folder",
        "second pickle behind a number",
        "end record with a comment",
        "bytes between entries",
        "argument across the end of a frame, old",
    }


@settings(max_examples=300 if FULL else 100)
@given(st.binary(max_size=400), st.sampled_from(["m.pt", "m.pkl", "m.safetensors", "m.ckpt"]))
def test_any_bytes_give_a_result(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path: Path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(content)
    assert stepguard.verify(path).bytes == len(content)


def test_file_that_shrinks_while_it_is_read_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    with open_file(path) as window:
        with pytest.raises(Damaged, match="ends at byte"):
            window.exactly(0, 1 << 50)
        os.truncate(path, 100)
        with pytest.raises(Damaged, match="shorter"):
            window.exactly(0, 1000)
