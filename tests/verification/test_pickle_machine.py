"""The pickle machine: values are those of pickle, limits hold, and nothing is called."""

from __future__ import annotations

import collections
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest
from benchmarks.parts.fuzz import named, raw, text

from stepguard.check import inert_pickle
from stepguard.check.allowed_globals import Global
from stepguard.check.inert_pickle import (
    PickledBytes,
    PickledObject,
    PickleReader,
)
from stepguard.check.scan import Damaged, open_file

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


def test_sets_and_bytes_become_records(tmp_path: Path) -> None:
    for protocol in (2, 4):
        assert read(tmp_path, pickle.dumps({7, (1, (2,))}, protocol)) == {7, (1, (2,))}
        assert read(tmp_path, pickle.dumps(frozenset({7}), protocol)) == {7}
    found = read(tmp_path, pickle.dumps(b"abc", 4))
    assert isinstance(found, PickledBytes) and (found.size, found.data) == (3, b"abc")


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
def test_work_that_is_asked_for_again_and_again_is_limited(tmp_path: Path, again: bytes) -> None:
    count = 20_000
    head = (
        P4
        + b"]\x94("
        + b"NN\x86" * count
        + b"e0"
        + named("collections", "OrderedDict")
        + b"\x940}\x94("
        + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(count))
        + b"u0("
        + b"N" * count
        + b"t\x940"
        + named("argparse", "Namespace")
        + b"\x940"
        + named("_codecs", "encode")
        + b"\x940"
        + text("x" * 60_000)
        + b"\x940"
        + text("latin1")
        + b"\x940"
    )
    assert refused(tmp_path, head + again * 4000 + b"N.").kind == "limit"


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (P4 + b"\x8d" + struct.pack("<Q", 1 << 40) + b"x", "torn"),
        (P4 + b"\x8e" + struct.pack("<Q", 1 << 40) + b"x", "torn"),
        (b"T\xff\xff\xff\xff.", "malformed"),
        (P4 + b"\x8b\xff\xff\xff\x7f.", "malformed"),
        (b"I" + b"9" * 5000 + b"\n.", "malformed"),
        (b"Sabc\n.", "malformed"),
        (P4 + b"]", "torn"),
        (P4 + b"]K", "torn"),
    ],
)
def test_declared_length_is_checked_before_it_is_read(
    tmp_path: Path, stream: bytes, kind: str
) -> None:
    assert refused(tmp_path, stream).kind == kind


def test_text_longer_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inert_pickle, "LONGEST_TEXT", 300)
    assert refused(tmp_path, P4 + text("x" * 301) + b".").kind == "limit"


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    damage = refused(tmp_path, b"\x80\x02\xff.")
    assert damage.detail == "byte 0xff at 2 is not a pickle opcode"
    assert "pickle opcode INT at byte" in refused(tmp_path, b"Inot a number\n.").detail


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
        P4
        + named("lightning.fabric.utilities.data", "AttributeDict")
        + b")\x81"
        + text("__setstate__")
        + named("torch.storage", "_load_from_bytes")
        + b"s"
        + raw(b"N.")
        + b"b.",
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


def test_ordered_dict_keeps_its_items(tmp_path: Path) -> None:
    value = collections.OrderedDict(a=1, b=collections.Counter("aab"))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert read(tmp_path, pickle.dumps(value, protocol)) == {"a": 1, "b": {"a": 2, "b": 1}}
