"""One function a pickle opcode. Each takes the state of the machine and changes its stack or memo."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from stepguard.verification import limits
from stepguard.verification.bounded_file import Window
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_values import Global, Made, Raw

PLAIN_KEYS = (str, int, float, bool, type(None), bytes, Global, Made)
HIGHEST_PROTOCOL = 5
REBUILT_BY = Global("torch._tensor", "_rebuild_from_type_v2")
"""Its arguments are a function, a class, and the arguments of that function."""


class State:
    """Stack, marks and memo of one pickle stream."""

    __slots__ = ("marks", "memo", "names", "persistent", "reference", "source", "stack")

    def __init__(
        self,
        source: Window,
        persistent: Callable[[Any], Any],
        names: dict[Global, bool],
        reference: Callable[[Any, tuple[Any, ...]], Any],
    ) -> None:
        self.source, self.persistent, self.names, self.reference = (
            source,
            persistent,
            names,
            reference,
        )
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            raise Damaged(
                "malformed", f"the pickle takes from an empty stack at byte {self.source.tell():,}"
            )
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise Damaged("malformed", f"the pickle has no mark at byte {self.source.tell():,}")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def keep(self, index: int) -> None:
        if len(self.memo) >= limits.MOST_MEMO:
            raise Damaged("limit", f"the pickle remembers more than {limits.MOST_MEMO:,} values")
        self.memo[index] = self.stack[-1]

    def name(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Damaged(
                "malformed",
                f"a global is named by {type(module).__name__} and {type(name).__name__}",
            )
        found = Global(module, name)
        self.names.setdefault(found, False)
        return found

    def make(self, what: Any, arguments: Any, *, calls: bool = True) -> None:
        """Where pickle would call something; with `calls=False` it would only make an empty object
        of a class.
        """
        if calls:
            self._called(what, arguments)
        if not isinstance(arguments, tuple) or not isinstance(what, Global | Made):
            raise Damaged(
                "malformed",
                f"the pickle calls {type(what).__name__} with {type(arguments).__name__}",
            )
        self.stack.append(self.reference(what, arguments))

    def _called(self, what: Any, arguments: Any) -> None:
        """Remember what is called, also by way of the one rebuilding function that calls another."""
        while isinstance(what, Global):
            self.names[what] = True
            if what != REBUILT_BY or not isinstance(arguments, tuple) or len(arguments) < 3:
                return
            what, arguments = arguments[0], arguments[2]


def _number(layout: str) -> Callable[[State], int]:
    reader = struct.Struct(layout)
    size = reader.size

    def read(state: State) -> int:
        value: int = reader.unpack(state.source.read(size))[0]
        return value

    return read


def _U1(state: State) -> int:  # noqa: N802 (named as the others are)
    return state.source.byte()


_U2, _U4, _U8, _I4 = (_number(f"<{code}") for code in "HIQi")


def _text_line(state: State) -> str:
    return state.source.line(limits.LONGEST_LINE).decode("utf-8")


def _escaped_line(state: State) -> str:
    return state.source.line(limits.LONGEST_LINE).decode("raw-unicode-escape")


def _push(read: Callable[[State], Any]) -> Callable[[State], None]:
    return lambda state: state.stack.append(read(state))


def _constant(value: Any) -> Callable[[State], None]:
    return lambda state: state.stack.append(value)


def _integer_line(state: State) -> int | bool:
    text = _text_line(state)
    if text in ("00", "01"):
        return text == "01"
    if len(text) > 2 * limits.LONGEST_INTEGER:
        raise Damaged("limit", f"an integer of {len(text):,} digits")
    return int(text.removesuffix("L"))


def _long(size: Callable[[State], int]) -> Callable[[State], int]:
    def read(state: State) -> int:
        count = size(state)
        if not 0 <= count <= limits.LONGEST_INTEGER:
            raise Damaged("limit", f"an integer of {count:,} bytes at byte {state.source.tell():,}")
        return int.from_bytes(state.source.read(count), "little", signed=True)

    return read


def _text(size: Callable[[State], int]) -> Callable[[State], str]:
    def read(state: State) -> str:
        count = size(state)
        if count > state.source.left:
            state.source.skip(count)
        if count > limits.LONGEST_TEXT:
            raise Damaged("limit", f"a text of {count:,} bytes at byte {state.source.tell():,}")
        return state.source.read(count).decode("utf-8", "surrogatepass")

    return read


def _bytes(size: Callable[[State], int]) -> Callable[[State], Raw]:
    """Long byte strings stay in the file: they may be an array of gigabytes."""

    def read(state: State) -> Raw:
        count = size(state)
        if count < 0:
            raise Damaged("malformed", f"a byte string of {count} bytes")
        start = state.source.start + state.source.tell()
        if count <= limits.SMALL_BYTES:
            return Raw(start, count, state.source.read(count))
        state.source.skip(count)
        return Raw(start, count)

    return read


def _old_text(size: Callable[[State], int]) -> Callable[[State], Any]:
    """Python 2 had one type for texts and bytes."""
    read = _bytes(size)

    def text(state: State) -> Any:
        raw = read(state)
        return raw.data.decode() if raw.data is not None and raw.data.isascii() else raw

    return text


def _quoted(state: State) -> str:
    text = _text_line(state)
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        raise Damaged("malformed", f"a text without quotes at byte {state.source.tell():,}")
    return text[1:-1]


def _frame(state: State) -> None:
    """Frames only say how much is read at once, but one that claims more than there is was cut off
    or made up.
    """
    count = _U8(state)
    if count > state.source.left:
        raise Damaged(
            "torn",
            f"a frame at byte {state.source.tell():,} claims {count:,} bytes, "
            f"{state.source.left:,} are left",
        )


def _protocol(state: State) -> None:
    version = state.source.byte()
    if version > HIGHEST_PROTOCOL:
        raise Damaged("malformed", f"pickle protocol {version}; the highest is {HIGHEST_PROTOCOL}")


def _mark(state: State) -> None:
    state.marks.append(len(state.stack))
    if len(state.marks) > limits.MOST_STACK:
        raise Damaged("limit", f"the pickle sets more than {limits.MOST_STACK:,} marks")


def _pop(state: State) -> None:
    if state.marks and len(state.stack) == state.marks[-1]:
        state.marks.pop()
    else:
        state.pop()


def _duplicate(state: State) -> None:
    value = state.pop()
    state.stack += (value, value)


def _fresh(kind: type) -> Callable[[State], None]:
    return lambda state: state.stack.append(kind())


def _tuple_of(count: int) -> Callable[[State], None]:
    def act(state: State) -> None:
        items = [state.pop() for _ in range(count)]
        state.stack.append(tuple(reversed(items)))

    return act


def _gathered(kind: Callable[[list[Any]], Any]) -> Callable[[State], None]:
    return lambda state: state.stack.append(kind(state.since_mark()))


def _as_dict(items: list[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    _fill(found, items)
    return found


def _fill(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise Damaged("malformed", "a dict with a key that has no value")
    entries = target.entries if isinstance(target, Made) else target
    if not isinstance(entries, dict):
        raise Damaged("malformed", f"items are set in a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        entries[_key(key)] = value


def _key(key: Any) -> Any:
    """Hashing goes into tuples, however deep, so only flat ones are keys; others become records."""
    if isinstance(key, PLAIN_KEYS):
        return key
    if isinstance(key, tuple) and all(isinstance(part, PLAIN_KEYS) for part in key):
        return key
    if isinstance(key, list | dict):
        raise Damaged("malformed", f"a {type(key).__name__} is the key of a dict")
    return key if not isinstance(key, tuple) else Made("key", key)


def _extend(target: Any, items: list[Any]) -> None:
    found = target.items if isinstance(target, Made) else target
    if not isinstance(found, list):
        raise Damaged("malformed", f"items are appended to a {type(target).__name__}")
    found.extend(items)


def _append(state: State) -> None:
    value = state.pop()
    _extend(state.stack[-1], [value])


def _appends(state: State) -> None:
    items = state.since_mark()
    _extend(state.stack[-1], items)


def _set_item(state: State) -> None:
    value, key = state.pop(), state.pop()
    _fill(state.stack[-1], [key, value])


def _set_items(state: State) -> None:
    items = state.since_mark()
    _fill(state.stack[-1], items)


def _get(index: Callable[[State], int]) -> Callable[[State], None]:
    def act(state: State) -> None:
        place = index(state)
        if place not in state.memo:
            raise Damaged("malformed", f"the pickle asks for value {place}, which it never kept")
        state.stack.append(state.memo[place])

    return act


def _put(index: Callable[[State], int]) -> Callable[[State], None]:
    return lambda state: state.keep(index(state))


def _global(state: State) -> None:
    module, name = _text_line(state), _text_line(state)
    state.stack.append(state.name(module, name))


def _stack_global(state: State) -> None:
    name, module = state.pop(), state.pop()
    state.stack.append(state.name(module, name))


def _reduce(state: State) -> None:
    arguments, what = state.pop(), state.pop()
    state.make(what, arguments)


def _new_object(state: State) -> None:
    """`cls.__new__(cls, *arguments)`: no constructor runs, and a function is no class."""
    arguments, what = state.pop(), state.pop()
    state.make(what, arguments, calls=False)


def _new_object_with_keywords(state: State) -> None:
    keywords, arguments, what = state.pop(), state.pop(), state.pop()
    if not isinstance(arguments, tuple):
        raise Damaged(
            "malformed", f"an object is made with a {type(arguments).__name__} of arguments"
        )
    state.make(what, (*arguments, keywords), calls=False)


def _instance(state: State) -> None:
    module, name = _text_line(state), _text_line(state)
    arguments = tuple(state.since_mark())
    state.make(state.name(module, name), arguments)


def _object(state: State) -> None:
    items = state.since_mark()
    if not items:
        raise Damaged("malformed", "an object is made of nothing")
    state.make(items[0], tuple(items[1:]))


def _build(state: State) -> None:
    given = state.pop()
    target = state.stack[-1]
    if isinstance(target, Global):
        raise Damaged(
            "hostile",
            f"the pickle would change {target} itself, for the whole program; nothing was run",
        )
    if isinstance(target, Made):
        target.state = given
    elif hasattr(target, "take_state"):
        target.take_state(given)


def _extension(index: Callable[[State], int]) -> Callable[[State], None]:
    """What it stands for is known to the registry of the program that reads it, so to nobody."""

    def act(state: State) -> None:
        state.stack.append(state.name("copyreg", f"extension {index(state)}"))

    return act


def _persistent_line(state: State) -> None:
    state.stack.append(state.persistent(_text_line(state)))


def _persistent(state: State) -> None:
    state.stack.append(state.persistent(state.pop()))


def _out_of_band(state: State) -> None:
    raise Damaged("malformed", "the pickle refers to buffers outside the file")


_BY_CODE: dict[str | int, Callable[[State], None]] = {
    "(": _mark, "0": _pop, "1": lambda state: void(state.since_mark()), "2": _duplicate,
    "F": _push(lambda state: float(_text_line(state))), "I": _push(_integer_line), "L": _push(_integer_line),
    "J": _push(_I4), "K": _push(_U1), "M": _push(_U2), 0x8A: _push(_long(_U1)), 0x8B: _push(_long(_I4)),
    "G": _push(lambda state: struct.unpack(">d", state.source.read(8))[0]),
    "N": _constant(None), 0x88: _constant(True), 0x89: _constant(False),
    "S": _push(_quoted), "T": _push(_old_text(_I4)), "U": _push(_old_text(_U1)),
    "V": _push(_escaped_line), "X": _push(_text(_U4)), 0x8C: _push(_text(_U1)), 0x8D: _push(_text(_U8)),
    "B": _push(_bytes(_U4)), "C": _push(_bytes(_U1)), 0x8E: _push(_bytes(_U8)), 0x96: _push(_bytes(_U8)),
    ")": _constant(()), "]": _fresh(list), "}": _fresh(dict), 0x8F: _fresh(list),
    0x85: _tuple_of(1), 0x86: _tuple_of(2), 0x87: _tuple_of(3),
    "t": _gathered(tuple), "l": _gathered(list), "d": _gathered(_as_dict), 0x91: _gathered(tuple),
    "a": _append, "e": _appends, 0x90: _appends, "s": _set_item, "u": _set_items,
    "g": _get(lambda state: int(_text_line(state))), "h": _get(_U1), "j": _get(_U4),
    "p": _put(lambda state: int(_text_line(state))), "q": _put(_U1), "r": _put(_U4),
    0x94: lambda state: state.keep(len(state.memo)),
    "c": _global, 0x93: _stack_global, "R": _reduce, 0x81: _new_object, 0x92: _new_object_with_keywords,
    "i": _instance, "o": _object, "b": _build,
    0x82: _extension(_U1), 0x83: _extension(_U2), 0x84: _extension(_I4),
    "P": _persistent_line, "Q": _persistent,
    0x80: _protocol, 0x95: _frame, 0x97: _out_of_band, 0x98: lambda state: None,
}  # fmt: skip
TABLE = {ord(code) if isinstance(code, str) else code: act for code, act in _BY_CODE.items()}
"""Byte -> what it does."""


def void(value: object) -> None:
    """For calls whose value is of no use."""
