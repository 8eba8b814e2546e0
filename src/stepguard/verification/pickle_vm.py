"""A pickle stream, read by a machine that can build containers and records and nothing else.

It imports nothing and calls nothing. Every length is checked against what is left of the file
before it is read, and stack, memo and number of operations have an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepguard.verification import limits, pickle_opcodes
from stepguard.verification.bounded_file import Window
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_opcodes import State
from stepguard.verification.pickle_values import Global

STOP = ord(".")


def read_pickle(
    source: Window,
    persistent: Callable[[Any], Any],
    names: dict[Global, bool],
    reference: Callable[..., Any],
) -> Any:
    """The value of the stream that begins where `source` stands; leaves it right behind the STOP.

    `persistent` gives the value of a persistent id, `reference` that of a name with its arguments,
    and `names` takes every name the stream refers to, with whether the stream calls it.
    """
    state = State(source, persistent, names, reference)
    table, stack, byte = pickle_opcodes.TABLE, state.stack, source.byte
    for _ in range(limits.MOST_OPERATIONS):
        code = byte()
        if code == STOP:
            return state.pop()
        act = table.get(code)
        if act is None:
            raise Damaged(
                "malformed", f"byte {code:#04x} at {source.tell() - 1:,} is no pickle opcode"
            )
        try:
            act(state)
        except (
            IndexError,
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
            AttributeError,
        ) as error:
            raise Damaged(
                "malformed", f"pickle opcode {chr(code)!r} at byte {source.tell():,}: {error}"
            ) from None
        if len(stack) > limits.MOST_STACK:
            raise Damaged("limit", f"the pickle stacks more than {limits.MOST_STACK:,} values")
    raise Damaged("limit", f"the pickle has more than {limits.MOST_OPERATIONS:,} operations")
