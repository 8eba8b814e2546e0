"""Files made by hand, byte by byte, that would run code, fill the memory or lead out of their
folder if believed.

Nothing here can run by itself: the bytes are only ever handed to stepguard's readers.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

from benchmarks.parts import fuzz
from benchmarks.parts.fuzz import named, raw

P2 = b"\x80\x02"
P4 = b"\x80\x04"
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def quad(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str) -> bytes:
    """SHORT_BINUNICODE, which fuzz does not use."""
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def code(*parts: str | bytes) -> bytes:
    """Opcodes as they are, `module:name` as a name, other texts as texts."""
    found = b""
    for part in parts:
        if isinstance(part, bytes):
            found += part
        elif ":" in part and "{" not in part:
            found += named(*part.split(":"))
        else:
            found += fuzz.text(part)
    return found


def runs_code(canary: Path) -> dict[str, bytes]:
    """Opcode or trick -> a pickle that would run code with `pickle.load`."""
    command = f"touch {canary}"
    run = text(command)
    reduced = P2 + b"cposix\nsystem\n(" + run + b"tR."
    popen = named("subprocess", "Popen") + run
    # a storage's bytes, which torch loads with everything allowed, and whose value nobody uses
    inner = MAGIC + b"\x80\x02M\xe9\x03.\x80\x02}." + reduced + b"\x80\x02]."
    rebuild = named("torch._tensor", "_rebuild_from_type_v2") + b"("
    setstate = b"ccollections\nOrderedDict\n)R}" + text("__setstate__") + b"cos\nsystem\nsb"
    attribute = b"cbuiltins\ngetattr\ncbuiltins\n__import__\n" + text("__call__") + b"\x86R"
    changed = b"ccollections\nOrderedDict\nN}" + text("__setitem__") + b"cbuiltins\nlist\ns\x86b."
    return {
        "REDUCE": reduced,
        "STACK_GLOBAL": P4 + text("os") + text("system") + b"\x93" + run + b"\x85R.",
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + run + b"o.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + run + b"\x85\x81.",
        "NEWOBJ_EX": P4 + popen + b"\x85}\x92.",
        # a state whose `__setstate__` would be the system call
        "BUILD": P2 + setstate + run + b"b.",
        "eval": P2 + b"cbuiltins\neval\n" + text(f"open({str(canary)!r}, 'w')") + b"\x85R.",
        "getattr": P2 + attribute + text("os") + b"\x85R.",
        "dotted name": P4 + named("collections", "OrderedDict.__init__.__globals__") + b".",
        "EXT1": P2 + b"\x82\x01" + run + b"\x85R.",
        "torch.load": P2 + b"ctorch.serialization\nload\n" + text(str(canary)) + b"\x85R.",
        "pickle in a storage": P4
        + named("torch.storage", "_load_from_bytes")
        + raw(inner)
        + b"\x85R0N.",
        # torch's own function that calls the function it is given
        "torch's rebuilding": P4
        + rebuild
        + named("some_library", "run_it")
        + text("t")
        + run
        + b"\x85NtR.",
        # BUILD on a class, not on an object of it
        "changed class": P4 + changed,
    }


_UNUSUAL = """
    os.system posix.system nt.system posix.execv builtins.exec builtins.getattr builtins.compile
    __builtin__.apply operator.attrgetter operator.methodcaller _operator.attrgetter
    functools.partial functools.reduce _codecs.lookup codecs.open importlib.import_module
    importlib._bootstrap._load runpy._run_code runpy.run_path webbrowser.open webbrowser.get
    pip.main pip._internal.cli.main.main timeit.timeit timeit.Timer pydoc.pipepager cProfile.run
    cProfile.runctx profile.Profile bdb.Bdb bdb.Bdb.run pdb.run trace.Trace doctest.debug_script
    idlelib.pyshell.ModifiedInterpreter.runcode idlelib.run.Executive.runcode
    lib2to3.pgen2.grammar.Grammar.loads logging.config.listen logging.FileHandler
    _osx_support._read_output distutils.file_util.write_file ensurepip._run_pip
    asyncio.unix_events._UnixSubprocessTransport._start code.InteractiveInterpreter.runcode
    types.CodeType zipimport.zipimporter sqlite3.connect shelve.open dbm.open ctypes.CDLL
    test.support.script_helper.assert_python_ok torch.load torch.serialization.load torch.hub.load
    torch.jit.load torch.ops.load_library torch.utils.collect_env.run
    torch._dynamo.guards.GuardBuilder.get torch._inductor.codecache.compile_file
    torch.fx.graph_module.reduce_graph_module torch.jit.unsupported_tensor_ops.execWrapper
    torch.utils._config_module.ConfigModule.load_config
    torch.utils.data.datapipes.utils.decoder.basichandlers
    torch.distributed.checkpoint.filesystem.os.system torch.nn.functional.importlib.import_module
    torch.nn.modules.module.torch.os.system torch.optim.optimizer.Optimizer.step
    torch.nn.modules.module.F.torch.load numpy.f2py.compile numpy.f2py.crackfortran.myeval
    numpy.testing._private.utils.runstring numpy.load numpy.memmap numpy.ctypeslib.load_library
    paramiko.ProxyCommand sh.Command some_library.run_it
"""
UNUSUAL_NAMES = _UNUSUAL.split()
"""Functions that run code, open files or fetch something, under names that a list of bad names
would hardly have.
"""


def by_name(full: str) -> bytes:
    """Called with a text. The module ends where the last part that is spelled as one does."""
    module, _, name = full.rpartition(".")
    for inside in (".os.", ".importlib.", ".torch.", ".F."):
        if full.startswith("torch.") and inside in full:
            module, _, rest = full.partition(inside)
            name = inside.strip(".") + "." + rest
    return P4 + named(module, name) + text("x") + b"\x85R."


def listed(*parts: str | bytes) -> bytes:
    """A list of one value."""
    return P4 + b"]" + code(*parts) + b"a."


def evasions(canary: Path) -> dict[str, bytes]:
    """Files that looked good and from which `torch.load(weights_only=False)` ran a command."""
    run = runs_code(canary)["STACK_GLOBAL"]
    shown = listed(fuzz.TENSOR)
    old = fuzz.in_legacy(run)
    load = "torch.storage:_load_from_bytes"
    numbers = b"".join(b"K" + bytes([byte]) for byte in old)
    told = text(f"touch {canary}")
    data = "torch.utils.data"
    numpy = "numpy.random._pickle"
    bare = fuzz.zip_file(fuzz.archive(shown))
    both = fuzz.archive(shown)
    deep = listed(load, raw(old), b"\x85R")
    wrapper = f"{data}.datapipes.datapipe:_IterDataPipeSerializationWrapper"
    again = f"{data}.dataloader:multiprocessing.popen_fork.os.system"
    attributes = code(
        "lightning.fabric.utilities.data:AttributeDict", b")\x81", text("__setstate__")
    )
    pickles = {
        "c: datapipe that unpickles its state": listed(wrapper, b")\x81", raw(run), b"\x89\x86b"),
        "c: name that another module exports again": listed(again, told, b"\x85R"),
        "c: class of a trusted package": listed(f"{data}.dataloader:Generic", b")R"),
        "d: bytes of numbers": listed(load, "builtins:bytes", b"](", numbers, b"e\x85R\x85R"),
        "d: bytearray that grows": listed(load, "builtins:bytearray", b")R(", numbers, b"e\x85R"),
        "d: bytearray of numbers": listed(
            load, "builtins:bytearray", b"](", numbers, b"e\x85R\x85R"
        ),
        "d: pickle in a pickle in a pickle": listed(load, raw(fuzz.in_legacy(deep)), b"\x85R"),
        "d: encoded text": listed(
            load, "_codecs:encode", fuzz.text(old.decode("latin1")), "latin1", b"\x86R\x85R"
        ),
        "f: __generator_ctor": listed(f"{numpy}:__generator_ctor", told, "os:system", b"\x86R"),
        "f: __randomstate_ctor": listed(f"{numpy}:__randomstate_ctor", told, "os:system", b"\x86R"),
        "f: __bit_generator_ctor": listed(
            f"{numpy}:__bit_generator_ctor", "mine:Trainer", b"\x85R"
        ),
        "object of a class of one's own": listed("mine:Trainer", b")\x81}b"),
        "items that answer as attributes": listed(attributes, load, b"s", raw(old), b"b"),
        "argument across the end of a frame": P4 + b"\x95" + quad(4) + b"]c_codecs\nencode\na.",
    }
    return {
        "a: two directories": fuzz.two_directories(shown, run),
        "b: two zip64 records": fuzz.two_zip64_records(shown, run),
        "e: tar whose first name is a pickle": fuzz.in_tar(
            b"\x80\x02N.", storages=run, tensors=run, pickle=run
        ),
        **{key: fuzz.zip_file(fuzz.archive(pickle)) for key, pickle in pickles.items()},
        **{f"{key}, old": fuzz.in_legacy(pickle) for key, pickle in pickles.items()},
        "magic number spelled otherwise": fuzz.in_legacy(run, b"I119547037146038801333356\n."),
        "second pickle behind a number": b"\x80\x02N." + run,
        "name in capital letters": fuzz.zip_file([("archive/DATA.PKL", run), *both]),
        "only a name in capital letters": fuzz.zip_file([("archive/Data.pkl", run), *both[1:]]),
        "second folder": fuzz.zip_file([*fuzz.archive(run, "a"), *fuzz.archive(shown, "b")]),
        "archive in front": fuzz.zip_file(fuzz.archive(run)) + bare,
        "archive behind": bare + fuzz.zip_file(fuzz.archive(run)),
        "end record with a comment": bare[:-2] + struct.pack("<H", 4) + b"text",
        "bytes between entries": _with_gap(fuzz.archive(shown)),
        "safetensors that is a pickle": fuzz.in_safetensors(run),
    }


def _with_gap(entries: list[tuple[str, bytes]]) -> bytes:
    body, directory = fuzz.zip_entries(entries[:1])
    more, other = fuzz.zip_entries(entries[1:], len(body) + 100)
    start = len(body) + 100 + len(more)
    end = fuzz.zip_end(len(entries), len(directory + other), start)
    return body + b"\0" * 100 + more + directory + other + end


GREEDY: dict[str, bytes] = {
    "bytes of 8 GB": P4 + b"\x8e" + quad(8 << 30) + b".",
    "text of 4 GB": P4 + b"X" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "text of 2**63": P4 + b"\x8d" + quad(1 << 63) + b".",
    "bytearray of 2**62": b"\x80\x05\x96" + quad(1 << 62) + b".",
    "integer of 2 GB": P4 + b"\x8b" + struct.pack("<i", 0x7FFFFFFF) + b".",
    "negative integer size": P4 + b"\x8b" + struct.pack("<i", -5) + b".",
    "frame of 2**60": P4 + b"\x95" + quad(1 << 60) + b"\x8e" + quad(1 << 60),
    "frame of 300 bytes in 30": P4 + b"\x95" + quad(300) + b"]" + b"N0" * 10 + b".",
    "no end of a line": b"V" + b"a" * 200_000,
    "a million digits": b"I" + b"9" * 60_000 + b"\n.",
    "stack without end": P4 + b"]" * 1_500_000 + b".",
    "marks without end": P4 + b"(" * 1_500_000 + b".",
    "doubling lists": P4
    + b"]\x94"
    + b"".join(b"]\x94(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(60))
    + b".",
}
"""Declared or implied sizes that must not be allocated."""
HARMLESS_GREEDY = frozenset({"doubling lists"})
"""Small in the file and, read without copying, small in memory: nothing is wrong with it."""

BROKEN: dict[str, bytes] = {
    "no opcode": P4 + b"\xff.",
    "empty stack": P4 + b"R.",
    "no mark": P4 + b"t.",
    "value never kept": P4 + b"h\x07.",
    "kept far away": P4 + b"]r\xff\xff\xff\x7fj\xfe\xff\xff\x7f.",
    "no end": P4 + b"]",
    "list as key": P4 + b"}]Ns.",
    "call of a text": P4 + text("x") + b")R.",
    "arguments in a list": P4 + b"ccollections\nOrderedDict\n]R.",
    "append to a text": P4 + text("x") + b"Na.",
    "odd dict": P4 + b"(Nd.",
    "text that is no UTF-8": P4 + b"\x8c\x02\xff\xfe.",
    "global named by numbers": P4 + b"K\x01K\x02\x93.",
    "tensor of nothing": P4 + text("torch._utils") + text("_rebuild_tensor_v2") + b"\x93)R.",
    "storage id of nothing": P4 + b"NQ.",
    "protocol 99": b"\x80\x63.",
    "out of band": b"\x80\x05\x97.",
}
"""Streams that no pickler writes."""


def deep(depth: int = 100_000) -> bytes:
    """Lists in lists, all opened before one is closed."""
    return P4 + b"]" * depth + b"a" * (depth - 1) + b"."


def deep_key(depth: int = 100_000) -> bytes:
    """A tuple of tuples as a key: hashing it goes down all the way in C."""
    return P4 + b"})" + b"\x85" * depth + b"Ns."


def tensors_without_end(count: int) -> bytes:
    """`count` tensors of one element each that share one storage."""
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    )
    head = P4 + b"ctorch._utils\n_rebuild_tensor_v2\nq\x000" + storage + b"q\x010}("
    one = b"h\x00(h\x01K\x00))\x89}tR"
    return head + b"".join(fuzz.text(str(n)) + one for n in range(count)) + b"u."


def in_zip(pickle: bytes, folder: str = "archive", **records: bytes) -> bytes:
    """A zip as torch.save writes it, around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{folder}/data.pkl", pickle)
        archive.writestr(f"{folder}/version", b"3\n")
        for name, data in records.items():
            archive.writestr(f"{folder}/{name.replace('__', '/')}", data)
    return out.getvalue()


def zip_with(names: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in names.items():
            archive.writestr(name, data)
    return out.getvalue()


def bomb(size: int = 64 << 20) -> bytes:
    """Zeros, packed a thousand to one."""
    return zip_with({"archive/data.pkl": b"\0" * size}, zipfile.ZIP_DEFLATED)


def overlapping() -> bytes:
    """The first entry claims the bytes of the second too, as bombs of overlapping entries do."""
    data = bytearray(zip_with({"archive/data.pkl": b"N." * 50, "archive/data/0": b"N." * 50}))
    first = data.find(b"PK\x01\x02")
    struct.pack_into("<II", data, first + 20, 200, 200)
    return bytes(data)


def misnamed() -> bytes:
    """Two names for the same bytes."""
    data = bytearray(zip_with({"archive/data.pkl": b"N." * 50, "archive/data/0": b"N." * 50}))
    struct.pack_into("<I", data, data.rfind(b"PK\x01\x02") + 42, 0)
    return bytes(data)


def huge_directory() -> bytes:
    """An end record that declares a directory of 4 GB."""
    data = bytearray(zip_with({"archive/data.pkl": b"N."}))
    end = data.rfind(b"PK\x05\x06")
    struct.pack_into("<II", data, end + 12, 0xFFFFFFF0, 0)
    return bytes(data)


def safetensors(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    return quad(len(written) if length is None else length) + written + data


def entry(
    start: int = 0, stop: int = 4, dtype: str = "F32", shape: object = (1,)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


MALFORMED_SAFETENSORS: dict[str, bytes] = {
    "empty": b"",
    "five bytes": b"\x01\0\0\0\0",
    "header of 2**63": safetensors(b"{}", length=1 << 63),
    "header of 2 GB": safetensors(b"{}", length=2 << 30),
    "no JSON": safetensors(b"{nothing"),
    "a list": safetensors([]),
    "deep JSON": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [1]}}, b"\0" * 4),
    "offsets backwards": safetensors({"a": entry(4, 0)}, b"\0" * 4),
    "offsets beyond": safetensors({"a": entry(0, 1 << 40, shape=(1 << 38,))}, b"\0" * 4),
    "negative shape": safetensors({"a": entry(shape=(-1,))}, b"\0" * 4),
    "shape of texts": safetensors({"a": entry(shape=("1",))}, b"\0" * 4),
    "shape too large": safetensors({"a": entry(shape=(1 << 60, 1 << 60))}, b"\0" * 4),
    "overlap": safetensors({"a": entry(0, 4), "b": entry(0, 4)}, b"\0" * 4),
    "hole": safetensors({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12),
    "trailing bytes": safetensors({"a": entry()}, b"\0" * 9),
    "unknown type": safetensors({"a": entry(dtype="F1")}, b"\0" * 4),
    "dtype that is a number": safetensors({"a": {**entry(), "dtype": 1}}, b"\0" * 4),
    "65 dimensions": safetensors({"a": entry(shape=[1] * 65)}, b"\0" * 4),
    "endless shape": safetensors({"a": entry(shape=[10**4000] * 2)}, b"\0" * 4),
    "endless offset": safetensors({"a": entry(0, 10**4000)}, b"\0" * 4),
    "shape that needs more": safetensors({"a": entry(shape=(2,))}, b"\0" * 4),
    "doubled name": safetensors(
        b'{"a":%b,"a":%b}' % (_json(entry()), _json(entry(4, 8))), b"\0" * 8
    ),
}  # fmt: skip
