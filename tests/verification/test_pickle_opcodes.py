"""What single opcodes do to the stack, where pickle's own rules are subtle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_constructors import build_value
from stepguard.verification.pickle_opcodes import ACTIONS, REBUILT_BY, PickleMachine
from stepguard.verification.pickle_values import Global, PickledObject


@pytest.fixture
def machine() -> PickleMachine:
    return PickleMachine(FileSlice(-1, 0, 0, Path("none")), lambda pid: pid, {}, build_value)


def run(machine: PickleMachine, name: str, argument: Any = None) -> None:
    ACTIONS[name](machine, argument)


def test_pop_after_mark_removes_the_mark(machine: PickleMachine) -> None:
    machine.stack = [1]
    run(machine, "MARK")
    run(machine, "POP")
    assert machine.stack == [1] and machine.marks == []


def test_nothing_below_a_mark_is_taken(machine: PickleMachine) -> None:
    machine.stack = [1]
    run(machine, "MARK")
    with pytest.raises(Damaged, match="empty stack"):
        run(machine, "TUPLE1")


def test_deep_tuple_as_a_key_becomes_a_record(machine: PickleMachine) -> None:
    machine.stack = [{}, ((1, 2), 3), "value"]
    run(machine, "SETITEM")
    ((key, value),) = machine.stack[-1].items()
    assert isinstance(key, PickledObject) and value == "value"


@pytest.mark.parametrize("key", [[], {}])
def test_key_that_cannot_be_hashed_is_malformed(machine: PickleMachine, key: Any) -> None:
    machine.stack = [{}, key, "value"]
    with pytest.raises(Damaged, match="key of a dict"):
        run(machine, "SETITEM")


def test_function_inside_a_rebuilding_call_counts_as_called(machine: PickleMachine) -> None:
    inner = machine.name("os", "system")
    machine.call(REBUILT_BY, (inner, Global("mine", "Thing"), ("true",), {}))
    assert machine.globals[inner] and machine.globals[REBUILT_BY]


def test_state_of_an_imported_thing_is_hostile(machine: PickleMachine) -> None:
    machine.stack = [Global("torch", "Tensor"), {"__add__": 1}]
    with pytest.raises(Damaged) as caught:
        run(machine, "BUILD")
    assert caught.value.kind == "hostile"


def test_extension_code_is_a_name_that_is_never_trusted(machine: PickleMachine) -> None:
    run(machine, "EXT1", 7)
    assert machine.stack == [Global("copyreg", "extension 7")]
