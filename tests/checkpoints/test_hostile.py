"""A checkpoint written by somebody hostile: one clear error, no memory taken, nothing followed,
nothing run.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.kit import in_child, saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Seal, SealedFile, SealedTensor, Store, read_seal
from stepguard.checkpoints.seal import digest_of, seal_bytes

TENSORS = "tensors-00000.safetensors"
HUGE = 2**42


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved(Store(tmp_path), 1)
    return tmp_path / "step-1"


def forged(checkpoint: Path, **changes: Any) -> None:
    """Seal the folder anew, with lies in it and a digest that is right."""
    seal = replace(read_seal(checkpoint), **changes)
    (checkpoint / "seal.json").write_bytes(seal_bytes(seal))


def body(checkpoint: Path, text: bytes) -> None:
    (checkpoint / "seal.json").write_bytes(
        b'{"digest":"' + digest_of(text).encode() + b'","seal":' + text + b"}\n"
    )


def with_tensor(seal: Seal, **changes: Any) -> dict[str, SealedTensor]:
    return {**seal.tensors, "model/weight": replace(seal.tensors["model/weight"], **changes)}


def huge_file(path: Path) -> None:
    """A sparse file of four terabytes, sealed as one tensor, with nothing contradicting that."""
    seal = read_seal(path)
    tensors = {"w": replace(seal.tensors["model/weight"], start=8, shape=(HUGE // 4,))}
    (path / TENSORS).write_bytes(bytes(8))
    os.truncate(path / TENSORS, 8 + HUGE)
    sealed = SealedFile(size=8 + HUGE, digest="0" * 32, header=digest_of(bytes(8)))
    forged(path, tensors=tensors, files={**seal.files, TENSORS: sealed})


def name_of_file(path: Path, name: str) -> None:
    text = (path / "seal.json").read_bytes()[52:-2].replace(TENSORS.encode(), name.encode())
    body(path, text)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    real = path.with_name("elsewhere")
    path.rename(real)
    path.symlink_to(real)


LIES: dict[str, Callable[[Path], object]] = {
    "huge shape": lambda p: forged(p, tensors=with_tensor(read_seal(p), shape=(HUGE,))),
    "overflowing shape": lambda p: forged(
        p, tensors=with_tensor(read_seal(p), shape=(2**62, 2**62, 2**62))
    ),
    "huge sparse file": huge_file,
    "unknown dtype": lambda p: forged(p, tensors=with_tensor(read_seal(p), dtype="os.system")),
    "dtype of another width": lambda p: forged(
        p, tensors=with_tensor(read_seal(p), dtype="float64")
    ),
    "tensor in no file": lambda p: forged(
        p, tensors=with_tensor(read_seal(p), file="nowhere.safetensors")
    ),
    "tensor behind the end": lambda p: forged(p, tensors=with_tensor(read_seal(p), start=HUGE)),
    "header of the whole file": lambda p: forged(p, tensors={}),
    "no facts": lambda p: forged(p, files={TENSORS: read_seal(p).files[TENSORS]}),
    "file outside": lambda p: name_of_file(p, "../../tensors.safetensors"),
    "absolute file": lambda p: name_of_file(p, "/etc/passwd"),
    "hidden file": lambda p: name_of_file(p, ".."),
    "negative size": lambda p: body(
        p, (p / "seal.json").read_bytes()[52:-2].replace(b'"size":', b'"size":-')
    ),
    "deep nesting": lambda p: body(
        p, b'{"schema":3,"config":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
    "number without end": lambda p: body(p, b'{"schema":3,"step":' + b"9" * 100_000 + b"}"),
    "list": lambda p: body(p, b"[]"),
    "newer schema": lambda p: forged(p, schema=99),
    "not text": lambda p: body(p, b"\xff\xfe\x00"),
    "facts are a list": lambda p: (
        (p / "facts.json").write_bytes(b"[1]"),
        forged(
            p,
            files={
                **read_seal(p).files,
                "facts.json": SealedFile(size=3, digest=digest_of(b"[1]")),
            },
        ),
    ),
    "fifo as tensors": lambda p: as_fifo(p / TENSORS),
    "fifo as seal": lambda p: as_fifo(p / "seal.json"),
    "fifo as facts": lambda p: as_fifo(p / "facts.json"),
    "link as tensors": lambda p: as_link(p / TENSORS),
    "link as seal": lambda p: as_link(p / "seal.json"),
    "folder as seal": lambda p: ((p / "seal.json").unlink(), (p / "seal.json").mkdir()),
    "device as tensors": lambda p: ((p / TENSORS).unlink(), (p / TENSORS).symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("lie", LIES)
def test_hostile_checkpoint_is_one_clear_error_in_little_memory(lie: str, checkpoint: Path) -> None:
    LIES[lie](checkpoint)

    def opened() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        for which in ("last-good", "step-1", checkpoint):
            try:
                Store(checkpoint.parent).open(which)
            except StoreError as fault:
                assert 20 < len(str(fault)) < 2000 and "step-1" in str(fault)
            else:
                raise AssertionError("it was opened")

    assert in_child(opened) == 0
