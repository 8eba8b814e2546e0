"""Damaged and invented checkpoints without end, given to the readers: no exception, no code, no
hang.

    python -m benchmarks.parts.fuzz --minutes 10      # what `make fuzz` does
    python -m benchmarks.parts.fuzz --cases 2000 --seed 7
    python -m benchmarks.parts.fuzz --differential --cases 20000

Prints the case (and keeps its bytes in --keep) if anything but a Verification comes out.

With --differential the structure of zips, tars and pickles is changed, hostile parts are put in,
and every file that verify calls good is loaded by `torch.load(weights_only=False)` in a process
whose audit hook notes (and forbids) every name that is not on the list, and every file, import,
process or piece of code that loading reaches for.
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from stepguard.check.verify import check_path
from stepguard.records.checks import Verification
from stepguard.records.codec import dumps, to_plain

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
OPCODES = sorted(ord(opcode.code) for opcode in pickletools.opcodes)


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


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def raw(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def named(module: str, word: str) -> bytes:
    return text(module) + text(word) + b"\x93"


def zip_entries(entries: Sequence[tuple[str, bytes]], start: int = 0) -> tuple[bytes, bytes]:
    """Write entries as they stand in a zip from `start` on, and the directory of them."""
    body, directory = b"", b""
    for word, data in entries:
        spelled, crc = word.encode(), zlib.crc32(data)
        facts = struct.pack("<5H3I2H", 20, 0, 0, 0, 0, crc, len(data), len(data), len(spelled), 0)
        entry = struct.pack("<H", 20) + facts + struct.pack("<3H2I", 0, 0, 0, 0, start + len(body))
        directory += b"PK\x01\x02" + entry + spelled
        body += b"PK\x03\x04" + facts + spelled + data
    return body, directory


def zip_end(count: int, size: int, start: int, *, comment: bytes = b"") -> bytes:
    return (
        struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, len(comment)) + comment
    )


def zip64_end(count: int, size: int, start: int) -> bytes:
    return struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)


def zip_file(entries: Sequence[tuple[str, bytes]]) -> bytes:
    body, directory = zip_entries(entries)
    return body + directory + zip_end(len(entries), len(directory), len(body))


def archive(pickled: bytes, folder: str = "archive") -> list[tuple[str, bytes]]:
    return [
        (f"{folder}/data.pkl", pickled),
        (f"{folder}/byteorder", b"little"),
        (f"{folder}/data/0", struct.pack("<f", 1.0)),
        (f"{folder}/version", b"3\n"),
        (f"{folder}/.data/serialization_id", b"1" * 400),
    ]


def two_directories(shown: bytes, run: bytes) -> bytes:
    """The end record names one directory by its offset, another one stands right before it."""
    body, directory = zip_entries(archive(run))
    start = len(body)
    # `zipfile` adds the distance between both directories to every offset
    more, other = zip_entries(archive(shown), max(0, start - len(directory)))
    return body + more + directory + other + zip_end(5, len(directory), len(body + more))


def two_zip64_records(shown: bytes, run: bytes) -> bytes:
    """The locator names another zip64 record than the one right before it."""
    body, directory = zip_entries(archive(run))
    more, other = zip_entries(archive(shown), len(body))
    start = len(body + more)
    content = body + more + directory
    named = len(content)
    content += zip64_end(5, len(directory), start)
    beside = len(content)
    content += other + zip64_end(5, len(other), beside)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, named, 1)
    return content + locator + zip_end(5, len(other), beside)


def in_legacy(pickled: bytes, magic: bytes = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.") -> bytes:
    """An old torch.save around a pickle that has one storage of one float at most."""
    keys, data = b"\x80\x02].", b""
    if b"FloatStorage" in pickled:
        keys, data = b"\x80\x02]" + text("0") + b"a.", struct.pack("<qf", 1, 1.0)
    return magic + b"\x80\x02M\xe9\x03." + b"\x80\x02}." + pickled + keys + data


def in_tar(first: bytes, **members: bytes) -> bytes:
    """A tar, which torch.load unpacks before it tries a pickle."""
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for word, data in {first.decode("utf-8", "surrogateescape"): b"", **members}.items():
            member = tarfile.TarInfo(word)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def in_safetensors(pickled: bytes) -> bytes:
    """A safetensors file that is a pickle as well, which goes on in its data."""
    tail = b'":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(pickled), len(pickled))
    # the length of the header begins with "U~", a text of 126 bytes, which the pickle skips
    size = int.from_bytes(b"U~", "little")
    header = b'{"' + b"a" * 118
    while len(header) < size:
        left = size - len(header)
        hop = min(128, left if left <= 128 else left - 100)
        filling = b"a" * (hop - 2)
        if left == hop:
            filling = filling[: -len(tail)] + tail
        header += b"U" + bytes([hop - 2]) + filling
    return struct.pack("<Q", size) + header + pickled


TENSOR = (
    named("torch._utils", "_rebuild_tensor_v2")
    + b"(("
    + text("storage")
    + named("torch", "FloatStorage")
    + text("0")
    + text("cpu")
    + b"K\x01tQK\x00))\x89"
    + named("collections", "OrderedDict")
    + b")RtR"
)
HOSTILE_LEGACY = in_legacy(b"\x80\x04" + named("os", "system") + text("true") + b"\x85R.")
NUMPY = "numpy.random._pickle"
PARTS: tuple[bytes, ...] = (
    named("os", "system") + text("true") + b"\x85R",
    b"cposix\nsystem\n(" + text("true") + b"tR",
    b"(S'true'\nios\nsystem\n",
    b"(cos\nsystem\n" + text("true") + b"o",
    named("subprocess", "Popen") + text("true") + b"\x85\x81",
    named("subprocess", "Popen") + text("true") + b"\x85}\x92",
    named("builtins", "eval") + text("1+1") + b"\x85R",
    b"c__builtin__\napply\n" + named("os", "getcwd") + b")\x86R",
    b"c__builtin__\nreduce\n" + named("os", "getcwd") + b")\x86R",
    named("builtins", "getattr") + named("os", "path") + text("join") + b"\x86R",
    named("functools", "partial") + named("os", "getcwd") + b"\x85R",
    named("operator", "attrgetter") + text("system") + b"\x85R",
    named("builtins", "map") + named("os", "system") + b"]" + text("true") + b"a\x86R",
    named("torch.storage", "_load_from_bytes") + raw(HOSTILE_LEGACY) + b"\x85R",
    named("torch.storage", "_load_from_bytes")
    + named("_codecs", "encode")
    + text(HOSTILE_LEGACY.decode("latin1"))
    + text("latin1")
    + b"\x86R\x85R",
    named("torch.storage", "_load_from_bytes")
    + named("builtins", "bytes")
    + b"]("
    + b"".join(b"K" + bytes([byte]) for byte in HOSTILE_LEGACY)
    + b"e\x85R\x85R",
    named("torch.storage", "_load_from_bytes")
    + named("builtins", "bytearray")
    + b")R("
    + b"".join(b"K" + bytes([byte]) for byte in HOSTILE_LEGACY)
    + b"e\x85R",
    named("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + named("os", "system")
    + named("torch", "Tensor")
    + text("true")
    + b"\x85}tR",
    named(NUMPY, "__generator_ctor") + text("MT19937") + named("os", "system") + b"\x86R",
    named(NUMPY, "__randomstate_ctor") + text("true") + named("os", "system") + b"\x86R",
    named(NUMPY, "__bit_generator_ctor") + named("threading", "Thread") + b"\x85R",
    named("argparse", "Namespace")
    + b")\x81}"
    + text("__setstate__")
    + named("os", "system")
    + b"sb"
    + text("true")
    + b"b",
    named("torch.utils.data.datapipes.iter.grouping", "ShardingFilterIterDataPipe") + b")\x81}b",
    named("torch.utils.data.datapipes.datapipe", "_IterDataPipeSerializationWrapper")
    + b")\x81"
    + raw(b"cos\ngetcwd\n)R.")
    + b"\x89\x86b",
    named("torch.utils.data.dataloader", "os.getcwd") + b")R",
    named("collections", "OrderedDict.__init__.__globals__"),
    named("copyreg", "_reconstructor")
    + named("threading", "Thread")
    + named("builtins", "object")
    + b"N\x87R",
    named("torch.nn.modules.linear", "Linear") + b")\x81}" + text("training") + b"\x88sb)R",
    b"\x82\x01",
    b"\x80\x02c__builtin__\neval\n" + text("1") + b"\x85R\x80\x04",
    b"\x95" + struct.pack("<Q", 3) + b"N",
    b"(" + text("module") + named("torch.nn.modules.linear", "Linear") + b"NNtQ",
    named("collections", "defaultdict") + named("os", "getcwd") + b"\x85R",
    *(
        named("numpy._core.multiarray", "scalar")
        + named("numpy", "dtype")
        + text(code)
        + b"\x89\x88\x87R(K\x03"
        + text("|")
        + b"NNN"
        + 2 * b"J\xff\xff\xff\xff"
        + b"K"
        + flags
        + b"tb"
        + raw(b"A" * 8)
        + b"\x86R"
        for code in ("O8", "f8", "U2")
        for flags in (b"\0", b"?")
    ),
)
"""Each leaves a value on the stack; most would run something."""
PLAIN: tuple[bytes, ...] = (
    b"N", b"K\x07", b")", b"]", b"}", b"\x88", b"\x8f", text("abc"), raw(b"abc"),
    b"G?\xf0\0\0\0\0\0\0",
    TENSOR,
    b"]K\x01a", b"}" + text("a") + b"K\x01s", b"(K\x01K\x02t", b"\x8f(K\x01\x90", b"(K\x01\x91",
    named("collections", "OrderedDict") + b")R",
    named("collections", "defaultdict") + named("builtins", "list") + b"\x85R",
    named("argparse", "Namespace") + b")\x81}" + text("lr") + b"K\x01sb",
    named("torch.nn.modules.linear", "Linear") + b")\x81}" + text("training") + b"\x88sb",
    named("torch", "Size") + b"K\x02\x85\x85R", named("torch", "device") + text("cpu") + b"\x85R",
    named("torch", "float32"), named("pathlib", "PosixPath") + text("a") + b"\x85R",
    named("datetime", "timedelta") + b"K\x01K\x02K\x03\x87R",
    named(NUMPY, "__generator_ctor") + text("PCG64") + b"\x85R",
    named("numpy", "dtype") + text("f4") + b"\x89\x88\x87R",
    named("builtins", "complex") + b"K\x01K\x02\x86R",
    b"c__builtin__\nset\n]\x85R", b"c__builtin__\nxrange\nK\x00K\x01\x86R",
)  # fmt: skip
"""What checkpoints are made of."""


def operations(stream: bytes) -> list[bytes]:
    """Cut a pickle into its opcodes with their arguments."""
    starts = [at or 0 for _, _, at in pickletools.genops(stream)]
    return [stream[at:end] for at, end in zip(starts, [*starts[1:], len(stream)], strict=True)]


def pickled(chance: random.Random, *, hostile: float) -> bytes:
    """A pickle of random parts, whose opcodes are then mixed up a little."""
    protocol = bytes([0x80, chance.choice((0, 1, 2, 2, 3, 4, 4, 5))])
    ops = [protocol, b"]"]
    for _ in range(chance.randrange(1, 7)):
        part = chance.choice(PARTS if chance.random() < hostile else PLAIN)
        ops += [*operations(part + b".")[:-1], chance.choice((b"a", b"a", b"a", b"0", b"\x940"))]
    ops.append(b".")
    pool = [*ops, *(bytes([code]) for code in b"0(2)]}tlduseabRo.\x81\x85\x86\x87\x90\x94")]
    for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
        at = chance.randrange(len(ops))
        kind = chance.random()
        if kind < 0.3:
            del ops[at]
        elif kind < 0.6:
            ops.insert(at, chance.choice(pool))
        elif kind < 0.8:
            ops[at] = chance.choice(pool)
        else:
            other = chance.randrange(len(ops))
            ops[at], ops[other] = ops[other], ops[at]
        if not ops:
            ops = [b"."]
    return b"".join(ops)


def mutated(chance: random.Random) -> Seed:
    """A file whose container or pickle is not what it seems."""
    good, bad = pickled(chance, hostile=0.0), pickled(chance, hostile=0.8)
    any_one = pickled(chance, hostile=0.08)
    both = [*archive(good), ("archive/" + chance.choice(("DATA.PKL", "data.pkl", "x.pkl")), bad)]
    chance.shuffle(both)
    cut = chance.randrange(1, 40)
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: zip_file(archive(any_one)),
        lambda: zip_file(archive(any_one)),
        lambda: zip_file(both),
        lambda: zip_file([*archive(good), *archive(bad, chance.choice(("b", "Archive", "")))]),
        lambda: zip_file([*archive(bad, "b"), *archive(good)]),
        lambda: two_directories(good, bad),
        lambda: two_zip64_records(good, bad),
        lambda: zip_file(archive(bad)) + zip_file(archive(good)),
        lambda: zip_file(archive(good)) + zip_file(archive(bad))[cut:],
        lambda: zip_file([("archive/constants.pkl", good), *archive(bad)]),
        lambda: any_one,
        lambda: any_one + bad,
        lambda: in_legacy(any_one),
        lambda: in_legacy(any_one),
        lambda: in_legacy(good) + bad,
        lambda: in_legacy(bad, chance.choice((b"I119547037146038801333356\n.", any_one))),
        lambda: in_tar(good[:90].replace(b"\0", b""), storages=bad, tensors=bad, pickle=bad),
        lambda: in_safetensors(chance.choice((good, bad))),
        lambda: in_legacy(
            b"\x80\x04]"
            + named("torch.storage", "_load_from_bytes")
            + raw(in_legacy(any_one))
            + b"\x85Ra."
        ),
    )
    content = chance.choice(makers)()
    if chance.random() < 0.3:
        content = damaged(content, chance)
    return chance.choice(("m.pt", "m.pt", "m.bin", "m.pkl")), content


REACHES = (
    "pickle.find_class", "open", "import", "exec", "compile", "marshal.", "os.", "subprocess.",
    "socket.", "shutil.", "tempfile.", "ctypes.", "code.__new__", "function.__new__", "sqlite3.",
    "urllib.", "webbrowser.", "pty.", "signal.", "sys.",
)  # fmt: skip
"""First words of audit events that loading a good file must not cause."""


class RefusedError(RuntimeError):
    """What the hook raises in the place of an event, so that nothing happens."""


def load_files() -> int:
    """In a process of its own: load the files named on stdin, and tell what they reached for."""
    import importlib
    import resource
    import warnings

    from stepguard.check.allowed_globals import LISTED

    warnings.simplefilter("ignore")
    for module in sorted({listed.module for listed in LISTED}):
        try:
            # heavy packages that no part above refers to
            if module.partition(".")[0] in ("torch", "numpy", *sys.stdlib_module_names):
                importlib.import_module(module)
        except ImportError:
            continue
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    listed_names = {(listed.module, listed.name) for listed in LISTED}
    reached: list[str] = []
    current = ""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if not current or not event.startswith(REACHES):
            return
        if event == "open" and arguments[0] == current and arguments[1] in ("r", "rb"):
            return
        if event == "pickle.find_class":
            module, word = arguments
            mapped = NAME_MAPPING.get((module, word), (IMPORT_MAPPING.get(module, module), word))
            if (module, word) in listed_names or mapped in listed_names:
                return
        reached.append(f"{event}{arguments!r}"[:200])
        raise RefusedError(event)

    for encoding in ("latin1", "ascii", "utf-8"):
        codecs.lookup(encoding)
    torch.load(io.BytesIO(seeds()[0][1]), weights_only=False)
    sys.addaudithook(hear)
    print("ready", flush=True)
    for line in sys.stdin:
        reached.clear()
        current = line.rstrip("\n")
        outcome = "loaded"
        try:
            torch.load(current, weights_only=False)
        except BaseException as error:
            outcome = type(error).__name__
        current = ""
        print(json.dumps({"outcome": outcome, "reached": reached}), flush=True)
    return 0


class Loader:
    """The process that loads files; a new one is started where a file kills it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def load(self, path: Path) -> dict[str, Any]:
        if self._process is None:
            command = [sys.executable, "-c", "from benchmarks.parts import fuzz; fuzz.load_files()"]
            root = Path(__file__).parents[2]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
            )
            assert self._answer() == "ready\n"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer:
            self.close()
            return {"outcome": "crashed", "reached": []}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _answer(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        if self._process is not None:
            # it holds nothing that an orderly end would save, and a file may have broken its end
            self._process.kill()
            self._process.communicate()
            self._process = None


def differ(cases: int, seed: int, keep: Path | None, loader: Loader | None = None) -> Counter[str]:
    """Verify changed files and load the good ones; AssertionError if one reaches for anything."""
    counts: Counter[str] = Counter()
    loader = loader or Loader()
    with tempfile.TemporaryDirectory(prefix="stepguard-differ-") as place:
        try:
            for case in range(cases):
                word, content = mutated(random.Random(f"differ-{seed}-{case}"))
                path = Path(place) / word
                path.write_bytes(content)
                counts["files"] += 1
                if not check_path(path).ok:
                    continue
                found = loader.load(path)
                counts["good"] += 1
                counts[found["outcome"]] += 1
                # bytes that became pointers end the process
                if found["outcome"] == "crashed":
                    found["reached"] = ["the process ended"]
                if found["reached"]:
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"differ-{seed}-{case}-{word}").write_bytes(content)
                    raise AssertionError(f"seed {seed}, case {case}: good, and {found['reached']}")
        finally:
            loader.close()
    return counts


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
    parser.add_argument(
        "--differential", action="store_true", help="load what verify calls good, with a hook"
    )
    options = parser.parse_args(arguments)
    if options.differential:
        counts = differ(options.cases or 20_000, options.seed, options.keep)
        print(", ".join(f"{word} {count:,}" for word, count in counts.most_common()))
        return 0
    print(
        f"{run(options.cases, options.minutes, options.seed, options.keep)} cases, no reader broke"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
