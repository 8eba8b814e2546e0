"""The pickle machine: the table is complete, limits hold, values are what pickle would build."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from stepguard.verification import limits, pickle_vm
from stepguard.verification.bounded_file import open_file
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_arguments import READERS
from stepguard.verification.pickle_constructors import build_value
from stepguard.verification.pickle_opcodes import ACTIONS, Globals
from stepguard.verification.pickle_values import Global, PickledObject


def read(folder: Path, content: bytes, globals_seen: Globals | None = None) -> Any:
    path = folder / "stream.pkl"
    path.write_bytes(content)
    seen: Globals = {} if globals_seen is None else globals_seen
    with open_file(path) as source:
        return pickle_vm.read_pickle(source, lambda pid: pid, seen, build_value)


def test_every_opcode_has_a_reader_and_something_to_do() -> None:
    for opcode in pickletools.opcodes:
        if opcode.name == "STOP":
            assert ord(opcode.code) == pickle_vm.STOP
            continue
        assert ord(opcode.code) in pickle_vm.TABLE
        if opcode.arg is None:
            assert opcode.name in ACTIONS, f"{opcode.name} would push None"
        else:
            assert opcode.arg.name in READERS
    assert set(ACTIONS) < {opcode.name for opcode in pickletools.opcodes}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_those_of_pickle(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, -(2**70), 3.5, True, None, "\u00e9\ud800"], ("b", 2): (1, 2, 3, 4), 5: {}}
    shared = [value, value]
    found = read(tmp_path, pickle.dumps(shared, protocol))
    assert found == shared and found[0] is found[1]


def test_call_is_recorded_and_not_made(tmp_path: Path) -> None:
    seen: Globals = {}
    found = read(tmp_path, b"cos\nsystem\n(S'true'\ntR.", seen)
    assert isinstance(found, PickledObject)
    assert found.what == Global("os", "system") and found.arguments == ("true",)
    assert seen == {Global("os", "system"): True}


def test_object_made_without_a_call_is_not_said_to_be_called(tmp_path: Path) -> None:
    seen: Globals = {}
    read(tmp_path, b"\x80\x02cmine\nThing\n)\x81.", seen)
    assert seen == {Global("mine", "Thing"): False}


@pytest.mark.parametrize("limit", ["MOST_OPERATIONS", "MOST_STACK", "MOST_MEMO"])
def test_limits_of_a_stream_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(limits, limit, 5)
    with pytest.raises(Damaged) as caught:
        read(tmp_path, b"\x80\x04" + b"N\x94" * 20 + b".")
    assert caught.value.kind == "limit"


def test_byte_that_is_not_an_opcode_is_named(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="byte 0xff at 2 is not a pickle opcode"):
        read(tmp_path, b"\x80\x02\xff.")


def test_opcode_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="pickle opcode INT at byte"):
        read(tmp_path, b"Inot a number\n.")
