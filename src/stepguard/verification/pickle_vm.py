"""Run a pickle stream on a machine that can build containers and records and nothing else.

It imports nothing and calls nothing. Every length is checked against what is left of the file
before it is read; stack, memo and number of operations are limited.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from stepguard.verification import limits
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_arguments import READERS, Reader
from stepguard.verification.pickle_opcodes import ACTIONS, Action, Globals, PickleMachine, push

STOP = ord(".")


def _no_argument(source: FileSlice) -> None:
    """Read nothing, for opcodes that have no argument."""


def _table() -> dict[int, tuple[str, Reader, Action]]:
    """Build the table from pickletools, which knows every opcode and the kind of its argument."""
    table: dict[int, tuple[str, Reader, Action]] = {}
    for opcode in pickletools.opcodes:
        if opcode.name == "STOP":
            continue
        read: Reader = _no_argument
        if opcode.arg is not None:
            read = READERS[opcode.arg.name]
        table[ord(opcode.code)] = (opcode.name, read, ACTIONS.get(opcode.name, push))
    return table


TABLE = _table()
"""Byte -> name of the opcode, reader of its argument, and what it does."""


def read_pickle(
    source: FileSlice,
    persistent: Callable[[Any], Any],
    globals_seen: Globals,
    build: Callable[[Any, tuple[Any, ...]], Any],
) -> Any:
    """Return the value of the stream at the position of `source`, which is left behind its STOP.

    `persistent` gives the value of a persistent id, `build` that of a name with its arguments, and
    `globals_seen` receives every name the stream refers to, with whether the stream calls it.
    """
    machine = PickleMachine(source, persistent, globals_seen, build)
    for _ in range(limits.MOST_OPERATIONS):
        code = source.byte()
        if code == STOP:
            return machine.pop()
        if code not in TABLE:
            raise Damaged(
                "malformed", f"byte {code:#04x} at {source.tell() - 1:,} is not a pickle opcode"
            )
        name, read, act = TABLE[code]
        try:
            act(machine, read(source))
        except (
            IndexError,
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
            AttributeError,
        ) as error:
            raise Damaged(
                "malformed", f"pickle opcode {name} at byte {source.tell():,}: {error}"
            ) from None
        if len(machine.stack) > limits.MOST_STACK:
            raise Damaged("limit", f"the pickle stacks more than {limits.MOST_STACK:,} values")
    raise Damaged("limit", f"the pickle has more than {limits.MOST_OPERATIONS:,} operations")
