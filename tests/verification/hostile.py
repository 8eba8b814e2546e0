"""Files made by hand, byte by byte, that would run code, fill the memory or lead out of their
folder if believed.

Nothing here can run by itself: the bytes are only ever handed to stepguard's readers.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path


def text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


PROTOCOL = b"\x80\x04"


def command(canary: Path) -> str:
    return f"touch {canary}"


def by_reduce(canary: Path) -> bytes:
    return b"\x80\x02cposix\nsystem\n(" + text(command(canary)) + b"tR."


def by_stack_global(canary: Path) -> bytes:
    return b"\x80\x04" + text("os") + text("system") + b"\x93" + text(command(canary)) + b"\x85R."


def by_inst(canary: Path) -> bytes:
    return b"(S'" + command(canary).encode() + b"'\nios\nsystem\n."


def by_obj(canary: Path) -> bytes:
    return b"(cos\nsystem\n" + text(command(canary)) + b"o."


def by_newobj(canary: Path) -> bytes:
    return b"\x80\x02csubprocess\nPopen\n" + text(command(canary)) + b"\x85\x81."


def by_newobj_ex(canary: Path) -> bytes:
    return (
        b"\x80\x04"
        + text("subprocess")
        + text("Popen")
        + b"\x93"
        + text(command(canary))
        + b"\x85}\x92."
    )


def by_build(canary: Path) -> bytes:
    """A state whose `__setstate__` would be the system call."""
    made = b"\x80\x02ccollections\nOrderedDict\n)R}" + text("__setstate__") + b"cos\nsystem\nsb"
    return made + text(command(canary)) + b"b."


def by_eval(canary: Path) -> bytes:
    return b"\x80\x02cbuiltins\neval\n" + text(f"open({str(canary)!r}, 'w')") + b"\x85R."


def by_getattr(canary: Path) -> bytes:
    inner = b"cbuiltins\ngetattr\ncbuiltins\n__import__\n" + text("__call__") + b"\x86R"
    return b"\x80\x02" + inner + text("os") + b"\x85R."


def by_dotted_name(canary: Path) -> bytes:
    return b"\x80\x04" + text("collections") + text("OrderedDict.__init__.__globals__") + b"\x93."


def by_extension(canary: Path) -> bytes:
    return b"\x80\x02\x82\x01" + text(command(canary)) + b"\x85R."


def by_torch_load(canary: Path) -> bytes:
    return b"\x80\x02ctorch.serialization\nload\n" + text(str(canary)) + b"\x85R."


RUNS_CODE: dict[str, Callable[[Path], bytes]] = {
    "REDUCE": by_reduce,
    "STACK_GLOBAL": by_stack_global,
    "INST": by_inst,
    "OBJ": by_obj,
    "NEWOBJ": by_newobj,
    "NEWOBJ_EX": by_newobj_ex,
    "BUILD": by_build,
    "eval": by_eval,
    "getattr": by_getattr,
    "dotted name": by_dotted_name,
    "EXT1": by_extension,
    "torch.load": by_torch_load,
}
"""Opcode or trick -> a pickle that would run code with `pickle.load`."""

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
    return PROTOCOL + text(module) + text(name) + b"\x93" + text("x") + b"\x85R."


def by_nested_storage(canary: Path) -> bytes:
    """A pickle inside a storage's bytes, which torch loads with everything allowed, and whose value
    nobody uses.
    """
    inner = (
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
        + by_reduce(canary)
        + b"\x80\x02]."
    )
    raw = b"B" + struct.pack("<I", len(inner)) + inner
    return PROTOCOL + text("torch.storage") + text("_load_from_bytes") + b"\x93" + raw + b"\x85R0N."


def by_rebuilding(canary: Path) -> bytes:
    """torch's own function that calls the function it is given."""
    call = text("torch._tensor") + text("_rebuild_from_type_v2") + b"\x93"
    given = (
        text("some_library")
        + text("run_it")
        + b"\x93"
        + text("t")
        + text(command(canary))
        + b"\x85N"
    )
    return PROTOCOL + call + b"(" + given + b"tR."


def by_changing_a_class(canary: Path) -> bytes:
    """BUILD on a class, not on an object of it."""
    return (
        PROTOCOL
        + b"ccollections\nOrderedDict\nN}"
        + text("__setitem__")
        + b"cbuiltins\nlist\ns\x86b."
    )


RUNS_CODE |= {
    "pickle in a storage": by_nested_storage,
    "torch's rebuilding": by_rebuilding,
    "changed class": by_changing_a_class,
}
GREEDY: dict[str, bytes] = {
    "bytes of 8 GB": PROTOCOL + b"\x8e" + struct.pack("<Q", 8 << 30) + b".",
    "text of 4 GB": PROTOCOL + b"X" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "text of 2**63": PROTOCOL + b"\x8d" + struct.pack("<Q", 1 << 63) + b".",
    "bytearray of 2**62": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
    "integer of 2 GB": PROTOCOL + b"\x8b" + struct.pack("<i", 0x7FFFFFFF) + b".",
    "negative integer size": PROTOCOL + b"\x8b" + struct.pack("<i", -5) + b".",
    "frame of 2**60": PROTOCOL
    + b"\x95"
    + struct.pack("<Q", 1 << 60)
    + b"\x8e"
    + struct.pack("<Q", 1 << 60),
    "frame of 300 bytes in 30": PROTOCOL
    + b"\x95"
    + struct.pack("<Q", 300)
    + b"]"
    + b"N0" * 10
    + b".",
    "no end of a line": b"V" + b"a" * 200_000,
    "a million digits": b"I" + b"9" * 60_000 + b"\n.",
    "stack without end": PROTOCOL + b"]" * 1_500_000 + b".",
    "marks without end": PROTOCOL + b"(" * 1_500_000 + b".",
    "doubling lists": PROTOCOL
    + b"]\x94"
    + b"".join(b"]\x94(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(60))
    + b".",
}
"""Declared or implied sizes that must not be allocated."""
HARMLESS_GREEDY = frozenset({"doubling lists"})
"""Small in the file and, read without copying, small in memory: nothing is wrong with it."""

BROKEN: dict[str, bytes] = {
    "no opcode": PROTOCOL + b"\xff.",
    "empty stack": PROTOCOL + b"R.",
    "no mark": PROTOCOL + b"t.",
    "value never kept": PROTOCOL + b"h\x07.",
    "kept far away": PROTOCOL + b"]r\xff\xff\xff\x7fj\xfe\xff\xff\x7f.",
    "no end": PROTOCOL + b"]",
    "list as key": PROTOCOL + b"}]Ns.",
    "call of a text": PROTOCOL + text("x") + b")R.",
    "arguments in a list": PROTOCOL + b"ccollections\nOrderedDict\n]R.",
    "append to a text": PROTOCOL + text("x") + b"Na.",
    "odd dict": PROTOCOL + b"(Nd.",
    "text that is no UTF-8": PROTOCOL + b"\x8c\x02\xff\xfe.",
    "global named by numbers": PROTOCOL + b"K\x01K\x02\x93.",
    "tensor of nothing": PROTOCOL + text("torch._utils") + text("_rebuild_tensor_v2") + b"\x93)R.",
    "storage id of nothing": PROTOCOL + b"NQ.",
    "protocol 99": b"\x80\x63.",
    "out of band": b"\x80\x05\x97.",
}
"""Streams that no pickler writes."""


def deep(depth: int = 100_000) -> bytes:
    """Lists in lists, all opened before one is closed."""
    return PROTOCOL + b"]" * depth + b"a" * (depth - 1) + b"."


def deep_key(depth: int = 100_000) -> bytes:
    """A tuple of tuples as a key: hashing it goes down all the way in C."""
    return PROTOCOL + b"})" + b"\x85" * depth + b"Ns."


def tensors_without_end(count: int) -> bytes:
    """`count` tensors of one element each that share one storage."""
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    )
    head = PROTOCOL + b"ctorch._utils\n_rebuild_tensor_v2\nq\x000" + storage + b"q\x010}("
    one = b"h\x00(h\x01K\x00))\x89}tR"
    return (
        head
        + b"".join(
            b"X" + struct.pack("<I", len(str(n))) + str(n).encode() + one for n in range(count)
        )
        + b"u."
    )


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
    return struct.pack("<Q", len(written) if length is None else length) + written + data


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
    "doubled name": safetensors(
        b'{"a":%b,"a":%b}' % (_json(entry()), _json(entry(4, 8))), b"\0" * 8
    ),
}  # fmt: skip
