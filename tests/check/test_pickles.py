"""Pickles: values are those of pickle, limits hold, nothing is called, and the list of names."""

from __future__ import annotations

import argparse
import collections
import importlib
import inspect
import pathlib
import pickle
import pickletools
import struct
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.parts.fuzz import named, raw, text

import stepguard
from check import hostile, saved
from check.hostile import code
from forked import FULL
from stepguard.check import allowed_globals, inert_pickle
from stepguard.check.allowed_globals import Global, trust
from stepguard.check.inert_pickle import (
    NumpyType,
    PickledObject,
    PickleReader,
    StorageRecord,
)
from stepguard.check.scan import Damaged, FileSlice, open_file

P4 = b"\x80\x04"


REDUCED = P4 + named("collections", "OrderedDict")


def read(folder: Path, content: bytes, names: dict[Global, bool] | None = None) -> Any:
    path = folder / "stream.pkl"
    path.write_bytes(content)
    with open_file(path) as source:
        reader = PickleReader(source)
        value = reader.load()
    if names is not None:
        names.update(reader.names)
    return value


def refused(folder: Path, content: bytes) -> Damaged:
    with pytest.raises(Damaged) as caught:
        read(folder, content)
    return caught.value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_those_of_pickle(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, -(2**70), 3.5, True, None, "\u00e9\ud800"], ("b", 2): (1, 2, 3, 4), 5: {}}
    shared = [value, value, "x" * 300]
    found = read(tmp_path, pickle.dumps(shared, protocol))
    assert found == shared and found[0] is found[1]


@pytest.mark.parametrize(
    "stream",
    [
        b"I-12\n.", b"I01\n.", b"L12L\n.", b"F1.5\n.", b"S'a\\x41'\n.", b"Va\\u00e9\n.",
        b"T\x02\0\0\0ab.", b"U\x02ab.", b"J\xff\xff\xff\xff.", b"\x8a\x02\x00\xff.",
        b"\x8b\x01\0\0\0\xff.", b"(I1\nI2\nl.", b"(I1\nI2\nd.", b"(I1\np5\n0g5\n.", b"]I1\na.",
        b"(](I1\nI2\net.", b"N(0.", b"I1\n2\x86.",
    ],
)  # fmt: skip
def test_every_old_opcode_means_what_it_means_to_pickle(tmp_path: Path, stream: bytes) -> None:
    assert read(tmp_path, stream) == pickle.loads(stream)


def test_long_byte_string_stays_in_the_file(tmp_path: Path) -> None:
    size = inert_pickle.LONGEST_LINE + 1
    found = read(tmp_path, P4 + raw(b"x" * size) + b".")
    assert (found.start, found.size, found.data) == (7, size, None)


def test_call_is_recorded_and_not_made(tmp_path: Path) -> None:
    seen: dict[Global, bool] = {}
    found = read(tmp_path, b"cos\nsystem\n(S'true'\ntR.", seen)
    assert isinstance(found, PickledObject)
    assert found.what == Global("os", "system") and found.arguments == ("true",)
    assert seen == {Global("os", "system"): True}


def test_old_names_are_those_of_python_3_up_to_protocol_2(tmp_path: Path) -> None:
    for protocol, module in ((2, "builtins"), (3, "__builtin__")):
        seen: dict[Global, bool] = {}
        read(tmp_path, bytes([0x80, protocol]) + b"c__builtin__\nset\n.", seen)
        assert list(seen) == [Global(module, "set")]


def test_every_opcode_that_reaches_code_is_replaced() -> None:
    """What is left of the standard library pushes values and takes them from stack and memo."""
    kept = {
        opcode.name
        for opcode in pickletools.opcodes
        if PickleReader.dispatch[ord(opcode.code)] is pickle._Unpickler.dispatch[ord(opcode.code)]  # type: ignore[attr-defined]
    }
    # APPEND and APPENDS call methods of lists and records only: there is nothing else on the stack
    reaches_code = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD"}
    hashes = {"FROZENSET", "DICT", "SETITEM", "SETITEMS", "ADDITEMS"}
    lengths = {"FRAME", "LONG4", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "SHORT_BINBYTES"}
    assert not kept & (reaches_code | hashes | lengths)
    # these go through methods that are overridden
    methods = ("find_class", "get_extension", "_instantiate", "_decode_string", "load")
    assert all(method in vars(PickleReader) for method in methods)


@pytest.mark.parametrize("limit", ["MOST_OPERATIONS", "MOST_STACK", "MOST_VALUES"])
def test_limits_of_a_stream_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(inert_pickle, limit, 5)
    assert refused(tmp_path, P4 + b"N\x94" * 20 + b".").kind == "limit"


@pytest.mark.parametrize(
    "again",
    [
        # a large list, dict, tuple or text that is referred to by every one of many calls
        b"h\x01(h\x00tR0",
        b"}h\x03Ns0",
        b"h\x04)\x81h\x02b0",
        b"h\x05h\x06h\x07\x86R0",
    ],
    ids=["copies", "keys", "states", "texts"],
)
def test_work_that_is_asked_for_again_and_again_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bytes
) -> None:
    count = 2000
    monkeypatch.setattr(inert_pickle, "MOST_WORK", 200_000)
    numbers = b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(count))
    # a list, a class, a dict, a tuple, a class, a function and two texts
    head = code(
        code(P4, b"]\x94(", b"NN\x86" * count, b"e0", "collections:OrderedDict", b"\x940"),
        code(b"}\x94(", numbers, b"u0(", b"N" * count, b"t\x940"),
        code("argparse:Namespace", b"\x940", "_codecs:encode", b"\x940"),
        code("x" * 60_000, b"\x940", "latin1", b"\x940"),
    )
    assert refused(tmp_path, head + again * 400 + b"N.").kind == "limit"


def test_text_longer_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inert_pickle, "LONGEST_TEXT", 300)
    assert refused(tmp_path, P4 + text("x" * 301) + b".").kind == "limit"


def frame(count: int) -> bytes:
    return b"\x95" + struct.pack("<Q", count)


@pytest.mark.parametrize(
    "stream",
    [
        # the C unpickler forgets the "_" and imports what follows
        P4 + frame(3) + b"Nc_codecs\nencode\n.",
        P4 + frame(4) + b"X\x03\0\0\0abc.",
        P4 + frame(20) + b"N" + frame(2) + b"0" * 20 + b"N.",
        P4 + frame(9) + b"N." + b"N" * 9,
    ],
    ids=["line", "number", "frame in a frame", "end inside"],
)
def test_frame_at_whose_end_unpicklers_differ_is_refused(tmp_path: Path, stream: bytes) -> None:
    assert refused(tmp_path, stream).kind == "malformed"


def test_frames_of_a_real_pickle_are_read(tmp_path: Path) -> None:
    value = [str(number) * 50 for number in range(5000)]
    stream = pickle.dumps(value, 4)
    assert stream.count(b"\x95") > 1 and read(tmp_path, stream) == value


@pytest.mark.parametrize(
    "stream",
    [
        REDUCED + b")R(K\x01e.",
        P4 + named("argparse", "Namespace") + b")\x81K\x01a.",
        P4 + named("argparse", "Namespace") + b")\x81K\x01K\x02s.",
        P4 + named("argparse", "Namespace") + b")\x81}b}" + text("a") + b"Nsb" + b"}b.",
        P4 + raw(b"ab") + b"(K\x01e.",
        b"\x80\x05\x96" + struct.pack("<Q", 2) + b"ab(K\x01e.",
        P4 + b"](K\x01\x90.",
        P4 + named("torch", "Size") + b")R}b.",
        code(P4, "lightning.fabric.utilities.data:AttributeDict", b")\x81", "__setstate__")
        + code("torch.storage:_load_from_bytes", b"s", raw(b"N."), b"b."),
    ],
)
def test_method_of_what_was_built_is_never_reached(tmp_path: Path, stream: bytes) -> None:
    """pickle calls `extend`, `append`, `add`, `__setitem__` and `__setstate__` of any object."""
    assert refused(tmp_path, stream).kind == "malformed"


@pytest.mark.parametrize(
    "stream",
    [
        P4 + named("torch.nn.modules.linear", "Linear") + b")\x81)R.",
        P4 + named("argparse", "Namespace") + b")\x81}" + text("__setstate__") + b"Nsb.",
        P4 + named("argparse", "Namespace") + b")\x81N}" + text("__class__") + b"Ns\x86b.",
        REDUCED + b")R}" + text("__reduce_ex__") + b"Nsb.",
        P4 + named("torch", "Tensor") + b"}b.",
    ],
    ids=["call of an object", "__setstate__", "__class__", "of a dict", "of a class"],
)
def test_what_would_replace_or_run_a_method_is_hostile(tmp_path: Path, stream: bytes) -> None:
    damage = refused(tmp_path, stream)
    assert damage.kind == "hostile" and "nothing was run" in damage.detail


FLOATS = Global("torch", "FloatStorage")
STORAGE = StorageRecord("0", "float32", 12)


FLOAT64 = NumpyType(np.dtype("f8"))


TRUST = """
    collections:OrderedDict | needed | hostile
    torch:bfloat16 | needed | hostile
    torch.cuda:HalfStorage | needed | hostile
    torch.nn.modules.linear:Linear | needed | hostile
    torch.nn.modules.linear:Other | unknown | hostile
    torch.nn.functional:gelu | needed | hostile
    torch.nn.functional:boolean_dispatch | hostile | hostile
    torch.utils.data.dataloader:ThreadPool | unknown | hostile
    torch.optim.adam:Adam | unknown | hostile
    __torch__.model:Net | unknown | calls
    builtins:set | needed | hostile
    builtins:eval | hostile | hostile
    os:system | hostile | hostile
    torch.hub:load | hostile | hostile
    torch.nn.modules.linear:torch.os.system | hostile | hostile
    transformers.training_args:TrainingArguments | needed | calls
    transformers.training_args:os.system | unknown | hostile
    mine.model:Settings | unknown | calls
    mine.model:run | unknown | hostile
    collections:OrderedDict.__init__.__globals__ | hostile | hostile
    copyreg:extension 7 | hostile | hostile
"""
"""A name, what it is when it is referred to, and when it is called in a way that is not listed."""


@pytest.mark.parametrize("row", TRUST.strip().splitlines())
def test_name_is_judged_by_what_loading_it_would_do(row: str) -> None:
    name, referred, called = (word.strip() for word in row.split(" | "))
    found = Global(*name.split(":"))
    assert (trust(found), trust(found, called=True)) == (referred, called)


def test_classes_of_a_script_are_known_in_its_archive_only() -> None:
    net = Global("__torch__.model", "Net")
    assert trust(net, called=True, scripted=True) == "needed"
    assert trust(Global("os", "system"), scripted=True) == "hostile"


REVIEWED = {
    # each updates a dict, sets attributes of plain values, or is compiled code that takes numbers
    "torch.nn.modules.module.Module", "torch.nn.modules.activation.MultiheadAttention",
    "torch.nn.modules.activation.Softmin", "torch.nn.modules.activation.Softmax",
    "torch.nn.modules.activation.LogSoftmax", "torch.nn.modules.conv._ConvNd",
    "torch.nn.modules.pooling.AvgPool3d", "torch.nn.modules.rnn.RNNBase",
    "torch.nn.modules.transformer.TransformerEncoderLayer",
    "torch.nn.modules.transformer.TransformerDecoderLayer", "torch.nn.modules.upsampling.Upsample",
    "torch.distributed.device_mesh.DeviceMesh", "torch._C._distributed.Shard",
    "torch._C._distributed.Replicate", "torch._C._distributed.Partial",
    "torch._C._distributed.StridedShard", "torch.distributed.tensor.placement_types.Shard",
    "torch.distributed.checkpoint.metadata.TensorProperties", "uuid.UUID",
    "omegaconf.base.Node", "omegaconf.basecontainer.BaseContainer",
}  # fmt: skip
"""Classes on the list, or above one, with a `__setstate__` that was read and found harmless."""


READ = {
    "torch.nn.modules.module.Module", "accelerate.state.PartialState",
    "omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig",
}  # fmt: skip
"""Those with a `__getattr__`, which pickle asks for `__setstate__`: each raises AttributeError."""


FRAMEWORKS = {"transformers", "trl", "accelerate", "peft", "omegaconf", "lightning"}


@pytest.mark.slow
def test_no_listed_class_acts_when_it_is_made_or_given_its_state() -> None:
    """What gets a `__setstate__`, `__new__` or `__del__` in a new version has to be read."""
    found = 0
    for listed in sorted(allowed_globals.RECORDS, key=str):
        # importing every framework takes half a minute
        if not FULL and listed.package in FRAMEWORKS:
            continue
        try:
            kind = getattr(importlib.import_module(listed.module), listed.name)
        except (ImportError, AttributeError):
            continue
        assert inspect.isclass(kind), listed
        assert (kind.__module__, kind.__qualname__) == (listed.module, listed.name) or (
            listed.module.startswith("torch.distributed")
        ), f"{listed} is a name that another module exports again"
        found += 1
        for above in kind.__mro__:
            if above in (object, types.SimpleNamespace) or "pybind11" in above.__module__:
                continue
            spelled = f"{above.__module__}.{above.__qualname__}"
            assert "__del__" not in vars(above), spelled
            assert "__setstate__" not in vars(above) or spelled in REVIEWED, spelled
            assert "__getattr__" not in vars(above) or spelled in READ, spelled
            assert "__getattribute__" not in vars(above), spelled
            assert above.__module__ == "typing" or "__new__" not in vars(above), spelled
    assert found > 110


def storage_of(pid: Any) -> StorageRecord:
    found = PickleReader(FileSlice(-1, 0, 0)).persistent_load(pid)
    assert isinstance(found, StorageRecord)
    return found


SYSTEM = Global("os", "system")
BIT_GENERATOR = "numpy.random._pickle.__bit_generator_ctor"


MALFORMED: list[tuple[str, tuple[Any, ...]]] = [
    ("torch._utils._rebuild_tensor_v2", ()),
    ("torch._utils._rebuild_tensor_v2", ("text", 0, (1,), (1,))),
    ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, "ab", (1,))),
    ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, (1 << 8000,), (1,))),
    ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, (1,) * 65, (1,) * 65)),
    ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, (1,), (1,), False, {"hook": SYSTEM})),
    ("torch._utils._rebuild_parameter", (PickledObject(SYSTEM), True, {})),
    ("torch._utils._rebuild_sparse_tensor", ("layout", ())),
    ("torch._utils._rebuild_wrapper_subclass", (SYSTEM, 0, (), (), 0, 0, "cpu", False)),
    ("torch.device", ("cuda", 0, 1)),
    ("torch.device", (SYSTEM,)),
    ("torch.Size", (SYSTEM,)),
    ("collections.OrderedDict", (SYSTEM,)),
    ("collections.defaultdict", (SYSTEM,)),
    ("collections.Counter", ("text",)),
    ("collections.deque", (PickledObject(SYSTEM),)),
    ("builtins.bytes", ([1, 2],)),
    ("builtins.bytearray", ([1, 2],)),
    ("builtins.type", ("name", (), {})),
    ("builtins.list", (PickledObject(SYSTEM),)),
    ("builtins.complex", ("1", "2")),
    ("pathlib.PosixPath", ("a", SYSTEM)),
    ("datetime.timezone", (PickledObject(SYSTEM),)),
    ("numpy.dtype", (SYSTEM,)),
    ("numpy._core.multiarray._reconstruct", (SYSTEM, (0,), "b")),
    ("numpy._core.multiarray.scalar", (NumpyType(np.dtype("O")), PickledObject(SYSTEM))),
    ("numpy._core.numeric._frombuffer", (PickledObject(SYSTEM), FLOAT64, (1,))),
    ("numpy.random.bit_generator.__pyx_unpickle_SeedSequence", (SYSTEM, 1, None)),
    ("copyreg._reconstructor", (Global("argparse", "Namespace"), SYSTEM, "true")),
    ("copyreg._reconstructor", (Global("uuid", "UUID"), Global("builtins", "str"), "")),
    ("_codecs.encode", ("text", "rot13")),
    ("transformers.trainer_utils.IntervalStrategy", (SYSTEM,)),
]  # fmt: skip
"""Calls on the list, with arguments that are not."""
HOSTILE: list[tuple[str, tuple[Any, ...]]] = [
    (BIT_GENERATOR, (SYSTEM,)),
    (BIT_GENERATOR, (Global("mine", "Thing"),)),
    (BIT_GENERATOR, (Global("numpy", "ndarray"),)),
    (BIT_GENERATOR, ("Unheard",)),
    ("numpy.random._pickle.__generator_ctor", ("PCG64", SYSTEM)),
    ("numpy.random._pickle.__randomstate_ctor", ("MT19937", PickledObject(SYSTEM))),
    ("numpy.random._pickle.__generator_ctor", (PickledObject(SYSTEM),)),
    ("torch.storage._load_from_bytes", (PickledObject(Global("builtins", "bytes")),)),
    ("torch.storage._load_from_bytes", ([1, 2, 3],)),
    ("torch._tensor._rebuild_from_type_v2", (SYSTEM, Global("torch", "Tensor"), ("x",), {})),
    ("torch._tensor._rebuild_from_type_v2",
     (Global("torch.storage", "_load_from_bytes"), Global("torch", "Tensor"), (), {})),
]  # fmt: skip
"""Functions that would call or load what they are given."""


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        *(("malformed", name, arguments) for name, arguments in MALFORMED),
        *(("hostile", name, arguments) for name, arguments in HOSTILE),
    ],
)
def test_arguments_that_are_not_on_the_list_are_refused(
    kind: str, name: str, arguments: tuple[Any, ...]
) -> None:
    module, _, word = name.rpartition(".")
    with pytest.raises(Damaged) as caught:
        PickleReader(FileSlice(-1, 0, 0)).call(Global(module, word), arguments)
    assert caught.value.kind == kind
    said = "nothing was run" if kind == "hostile" else "arguments it does not accept"
    assert said in caught.value.detail


@pytest.mark.parametrize(
    ("pid", "kind"),
    [
        ("text", "malformed"),
        (("storage", FLOATS, "0", "cpu", -1), "malformed"),
        (("storage", Global("torch", "Unknown"), "0", "cpu", 1), "malformed"),
        (("storage", FLOATS, "0", PickledObject("x"), 1), "malformed"),
        (("storage", FLOATS, "0", "cpu", 4, ("1", 0, 4)), "format"),
    ],
)
def test_persistent_id_that_torch_does_not_write_is_refused(pid: Any, kind: str) -> None:
    with pytest.raises(Damaged) as caught:
        storage_of(pid)
    assert caught.value.kind == kind
    assert storage_of(("storage", FLOATS, "0", "cpu", 4, None)).elements == 4


def test_names_of_a_pickle_in_a_pickle_are_those_of_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "m.pkl"
    path.write_bytes(hostile.runs_code(tmp_path / "canary")["pickle in a storage"])
    with open_file(path) as source:
        reader = PickleReader(source)
        reader.value()
    outside = Global("torch.storage", "_load_from_bytes")
    assert reader.names == {outside: False, Global("posix", "system"): True}
    assert not (tmp_path / "canary").exists()


def test_bytes_that_many_tensors_share_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(4)
    path = saved.save_pickle(tmp_path / "m.pkl", [tensor, tensor[:2], tensor[1:]])
    read: list[int] = []
    value = PickleReader.value
    monkeypatch.setattr(PickleReader, "value", lambda self: read.append(1) or value(self))
    with open_file(path) as source:
        reader = PickleReader(source)
        reader.value()
    assert len(read) == 1 + len(reader.nested)


@pytest.mark.parametrize("form", ["pickle", "legacy"])
def test_bytes_behind_the_end_are_an_error(tmp_path: Path, form: str) -> None:
    path = saved.ONE_FILE[form](tmp_path / "m.pt", {"w": torch.ones(2)})
    path.write_bytes(path.read_bytes() + hostile.runs_code(tmp_path / "canary")["REDUCE"])
    with open_file(path) as source, pytest.raises(Damaged, match="bytes follow") as caught:
        PickleReader(source).value()
    assert caught.value.kind == "format"


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    value = {
        "args": argparse.Namespace(lr=1e-3, path=pathlib.PurePosixPath("a/b")),
        "ordered": collections.OrderedDict(a=1, b=(2, [3, {4}, frozenset({5})])),
        "default": collections.defaultdict(list, {"x": [1.5]}),
        "numbers": [2**100, -(2**70), 1 + 2j, 1e300],
        "texts": ["ü" * 300, b"\xff" * 300, None, True, False, Ellipsis],
    }
    path = tmp_path / "m.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    found = stepguard.verify(path)
    assert found.ok and not found.problems, found.problems
