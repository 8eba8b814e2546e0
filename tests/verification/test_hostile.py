"""Hostile files: no code runs, memory stays bounded, and each gets one clear error."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from benchmarks.parts import fuzz

import stepguard
from stepguard.records.checks import Verification
from verification import hostile

BOUND = 1 << 30
"""Bytes that a hostile file may add to a process: far below what it declares."""


def verify(path: Path, content: bytes) -> Verification:
    path.write_bytes(content)
    return stepguard.verify(path)


def kinds(found: Verification) -> set[str]:
    return {problem.kind for problem in found.errors}


@pytest.mark.parametrize("trick", hostile.RUNS_CODE)
@pytest.mark.parametrize("form", ["pickle", "zip"])
def test_pickle_that_would_run_code_is_named_and_does_not_run(
    tmp_path: Path, trick: str, form: str
) -> None:
    canary = tmp_path / "canary"
    content = hostile.RUNS_CODE[trick](canary)
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
    shown = hostile.PROTOCOL + b"]" + fuzz.TENSOR + b"a."
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
    content = (
        hostile.PROTOCOL
        + b"]"
        + b"".join(
            hostile.text(module) + hostile.text("anything") + b"\x93)Ra" for module in modules
        )
    )
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


def test_hostile_pickles_would_really_import_what_is_reported(tmp_path: Path) -> None:
    """The bytes are well formed: the standard library finds the same names in them."""
    import pickletools

    for trick, make in hostile.RUNS_CODE.items():
        words = {str(argument) for _, argument, _ in pickletools.genops(make(tmp_path / "canary"))}
        if trick not in ("EXT1", "pickle in a storage", "changed class"):
            found = verify(tmp_path / "x.pt", make(tmp_path / "canary"))
            detail = next(p.detail for p in found.errors if p.kind == "hostile")
            assert any(
                all(part in detail for part in word.split()) for word in words if word != "None"
            ), trick


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile.GREEDY)
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
    content = hostile.in_zip(hostile.tensors_without_end(100_000), data__0=b"\0\0\x80?")
    found = verify(tmp_path / "model.pt", content)
    assert found.ok and found.tensors == 100_000


def test_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    found = verify(tmp_path / "model.pt", hostile.bomb())
    assert kinds(found) == {"limit"} and "compressed" in found.errors[0].detail


def test_zip_in_a_zip_is_not_followed(tmp_path: Path) -> None:
    inner = hostile.in_zip(hostile.by_reduce(tmp_path / "canary"))
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
    outside.write_bytes(hostile.by_reduce(tmp_path / "canary"))
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
    name = hostile.text("\x1b[2J" + "n" * 200)
    storage = (
        b"("
        + hostile.text("storage")
        + b"ctorch\nFloatStorage\n"
        + hostile.text("0")
        + hostile.text("cpu")
        + b"K\x01tQ"
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
    """In a child: 2 GB that are mostly a hole in the disk, then hostile files under a limit of the
    system.
    """
    large, folder = tmp_path / "large.safetensors", tmp_path / "worst"
    large.write_bytes(
        hostile.safetensors({"a": hostile.entry(0, 2_000_000_000, shape=(500_000_000,))})
    )
    os.truncate(large, large.stat().st_size + 2_000_000_000)
    folder.mkdir()
    chosen = {**hostile.GREEDY, "bomb": hostile.bomb(), "directory": hostile.huge_directory()}
    for number, content in enumerate(chosen.values()):
        (folder / f"{number}.pt").write_bytes(content)
    (folder / "header.safetensors").write_bytes(hostile.MALFORMED_SAFETENSORS["header of 2 GB"])
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(stepguard.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", CHILD, str(large), str(folder), str(BOUND)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[:2] == ["True", str(large.stat().st_size)] and int(first[2]) < 300_000_000
    count = len(chosen) + 1
    assert second == [str(count), str(count - len(hostile.HARMLESS_GREEDY))]
