"""Damaged and invented checkpoints without end, given to the readers: no exception, no code, no
hang.

    python -m benchmarks.parts.fuzz --minutes 10      # what `make fuzz` does
    python -m benchmarks.parts.fuzz --cases 2000 --seed 7

Prints the case (and keeps its bytes in --keep) if anything but a Verification comes out.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from stepguard.records.codec import dumps, to_plain
from stepguard.records.verification import Verification
from stepguard.verification import check_path, pickle_vm

FORBIDDEN = frozenset(
    {
        "pickle.find_class",
        "os.system",
        "subprocess.Popen",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "socket.connect",
    }
)
"""Audit events that no reader may cause."""
NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
Seed = tuple[str, bytes]


class Watch:
    """Notes forbidden audit events while it is on. A hook cannot be removed, so there is one a
    process.
    """

    seen: list[str] = []  # noqa: RUF012 (one list a process is the point)
    on = False
    installed = False

    @classmethod
    def install(cls) -> None:
        if not cls.installed:
            sys.addaudithook(cls._hear)
            cls.installed = True

    @classmethod
    def _hear(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls.on and event in FORBIDDEN:
            cls.seen.append(event)


def seeds() -> list[Seed]:
    """One small file of each format."""
    torch.manual_seed(0)
    line = torch.nn.Linear(5, 7)
    optimizer = torch.optim.Adam(line.parameters())
    line(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    value = {
        "state_dict": line.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state()[:64].clone(),
    }
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save(value, zipped)
    torch.save(value, legacy, _use_new_zipfile_serialization=False)
    plain = {"a": [1.5, {"b": (None, True, 2**70)}], "t": line.weight.detach()}
    index = {
        "metadata": {"total_size": 20},
        "weight_map": {"w": "model-00001-of-00001.safetensors"},
    }
    return [
        ("m.pt", zipped.getvalue()),
        ("m.pt", legacy.getvalue()),
        *(("m.pkl", pickle.dumps(plain, protocol=protocol)) for protocol in (0, 2, 4, 5)),
        ("m.safetensors", save(dict(line.state_dict()))),
        ("model.safetensors.index.json", json.dumps(index).encode()),
        ("trainer_state.json", b'{"global_step": 3, "log_history": [{"loss": NaN, "step": 1}]}'),
        (".metadata", _metadata()),
    ]


def _metadata() -> bytes:
    import warnings

    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A few small accidents."""
    content = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        chance.choice(ACCIDENTS)(content, chance)
    return bytes(content)


def _flip(content: bytearray, chance: random.Random) -> None:
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def _replace(content: bytearray, chance: random.Random) -> None:
    if content:
        content[chance.randrange(len(content))] = chance.randrange(256)


def _cut(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content) + 1) :]


def _take_out(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content) + 1)
    del content[at : at + chance.randrange(1, 64)]


def _repeat(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content) + 1)
    content[at:at] = content[at : at + chance.randrange(1, 64)] * chance.choice((1, 2, 100))


def _number(content: bytearray, chance: random.Random) -> None:
    at, number = chance.randrange(len(content) + 1), chance.choice(NUMBERS)
    content[at : at + 8] = struct.pack("<Q", number)[: chance.choice((1, 2, 4, 8))]


def _opcode(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content) + 1)
    content[at:at] = bytes([chance.choice(OPCODES)])


ACCIDENTS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip, _flip, _replace, _cut, _take_out, _repeat, _number, _opcode,
)  # fmt: skip
OPCODES = sorted(pickle_vm.TABLE)


def invented(chance: random.Random) -> bytes:
    """A stream of opcodes in no sensible order, with arguments that are sometimes right."""
    names = (
        b"cos\nsystem\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
        b"cbuiltins\neval\n",
    )
    parts = [b"\x80\x04"]
    for _ in range(chance.randrange(1, 120)):
        kind = chance.random()
        if kind < 0.2:
            parts.append(chance.choice(names))
        elif kind < 0.4:
            parts.append(b"\x8c\x03abc")
        elif kind < 0.5:
            parts.append(b"K" + bytes([chance.randrange(256)]))
        else:
            parts.append(
                bytes([chance.choice(OPCODES)])
                + chance.randbytes(chance.choice((0, 0, 0, 1, 4, 8)))
            )
    return b"".join(parts) + b"."


def one_case(folder: Path, known: Sequence[Seed], chance: random.Random) -> tuple[str, bytes]:
    """Make a file and verify it; raises whatever should not have been raised."""
    name, data = chance.choice(known) if chance.random() < 0.85 else ("m.pkl", b"")
    content = damaged(data, chance) if data else invented(chance)
    for path in folder.iterdir():
        path.unlink()
    (folder / name).write_bytes(content)
    Watch.on, Watch.seen[:] = True, []
    try:
        found = check_path(folder)
    finally:
        Watch.on = False
    if Watch.seen:
        raise AssertionError(f"the reader caused {Watch.seen}")
    assert isinstance(found, Verification)
    json.loads(dumps(to_plain(found)))
    return name, content


def run(cases: int | None, minutes: float | None, seed: int, keep: Path | None) -> int:
    """How many cases were tried; stops at the first that breaks a reader."""
    Watch.install()
    known, end = seeds(), time.monotonic() + 60 * (minutes or 0)
    tried = 0
    with tempfile.TemporaryDirectory(prefix="stepguard-fuzz-") as place:
        folder = Path(place)
        while (cases is not None and tried < cases) or (cases is None and time.monotonic() < end):
            chance = random.Random(f"{seed}-{tried}")
            try:
                one_case(folder, known, chance)
            except BaseException:
                print(f"seed {seed}, case {tried}: broke a reader", file=sys.stderr)
                for path in folder.iterdir() if keep is not None else ():
                    assert keep is not None
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{seed}-{tried}-{path.name}").write_bytes(path.read_bytes())
                raise
            tried += 1
    return tried


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parts.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, help="a fixed number instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, help="folder for the bytes of a case that breaks something"
    )
    options = parser.parse_args(arguments)
    print(
        f"{run(options.cases, options.minutes, options.seed, options.keep)} cases, no reader broke"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
