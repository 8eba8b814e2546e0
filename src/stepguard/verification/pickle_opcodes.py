"""The pickle machine, and what each opcode does to its stack, marks and memo.

Opcodes are found by their names in `pickletools.opcodes`; one that only pushes what it read needs
no entry here. Nothing is imported and nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepguard.verification import limits
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_values import Global, PickledObject

PLAIN_KEYS = (str, int, float, bool, type(None), bytes, Global, PickledObject)
HIGHEST_PROTOCOL = 5
REBUILT_BY = Global("torch._tensor", "_rebuild_from_type_v2")
"""Its arguments are a function, a class, and the arguments of that function."""
Globals = dict[Global, bool]
"""Every name that a stream refers to, and whether the stream calls it."""


class PickleMachine:
    """Stack, marks and memo of one pickle stream."""

    __slots__ = ("build", "globals", "marks", "memo", "persistent", "source", "stack")

    def __init__(
        self,
        source: FileSlice,
        persistent: Callable[[Any], Any],
        globals_seen: Globals,
        build: Callable[[Any, tuple[Any, ...]], Any],
    ) -> None:
        self.source = source
        self.persistent = persistent
        self.globals = globals_seen
        self.build = build
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            raise Damaged(
                "malformed", f"the pickle takes from an empty stack at byte {self.source.tell():,}"
            )
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise Damaged("malformed", f"the pickle has no mark at byte {self.source.tell():,}")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def memoize(self, index: int) -> None:
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
        self.globals.setdefault(found, False)
        return found

    def call(self, what: Any, arguments: Any) -> None:
        """Push a record where pickle would call `what`."""
        self._remember_called(what, arguments)
        self.make(what, arguments)

    def make(self, what: Any, arguments: Any) -> None:
        """Push a record where pickle would only make an empty object of a class."""
        if not isinstance(arguments, tuple) or not isinstance(what, Global | PickledObject):
            raise Damaged(
                "malformed",
                f"the pickle calls {type(what).__name__} with {type(arguments).__name__}",
            )
        self.stack.append(self.build(what, arguments))

    def _remember_called(self, what: Any, arguments: Any) -> None:
        """Remember what is called, also through the one rebuilding function that calls another."""
        while isinstance(what, Global):
            self.globals[what] = True
            if what != REBUILT_BY or not isinstance(arguments, tuple) or len(arguments) < 3:
                return
            what = arguments[0]
            arguments = arguments[2]


Action = Callable[[PickleMachine, Any], None]
"""Takes the machine and the argument of the opcode; None where it has none."""


def push(machine: PickleMachine, argument: Any) -> None:
    """Push what was read: what every opcode does that is not in the table."""
    machine.stack.append(argument)


def _constant(value: Any) -> Action:
    return lambda machine, _: machine.stack.append(value)


def _new(kind: type) -> Action:
    return lambda machine, _: machine.stack.append(kind())


def _protocol(machine: PickleMachine, version: int) -> None:
    if version > HIGHEST_PROTOCOL:
        raise Damaged("malformed", f"pickle protocol {version}; the highest is {HIGHEST_PROTOCOL}")


def _frame(machine: PickleMachine, count: int) -> None:
    # a frame only says how much to read at once; one longer than the file was cut off or forged
    left = machine.source.left
    if count > left:
        raise Damaged(
            "torn",
            f"a frame at byte {machine.source.tell():,} claims {count:,} bytes, {left:,} are left",
        )


def _mark(machine: PickleMachine, _: None) -> None:
    machine.marks.append(len(machine.stack))
    if len(machine.marks) > limits.MOST_STACK:
        raise Damaged("limit", f"the pickle sets more than {limits.MOST_STACK:,} marks")


def _pop(machine: PickleMachine, _: None) -> None:
    # pickle keeps marks on the stack itself, so POP right after MARK removes the mark
    if machine.marks and len(machine.stack) == machine.marks[-1]:
        machine.marks.pop()
    else:
        machine.pop()


def _pop_mark(machine: PickleMachine, _: None) -> None:
    machine.pop_to_mark()


def _duplicate(machine: PickleMachine, _: None) -> None:
    value = machine.pop()
    machine.stack += (value, value)


def _tuple_of(count: int) -> Action:
    def act(machine: PickleMachine, _: None) -> None:
        items = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(items)))

    return act


def _gather(kind: Callable[[list[Any]], Any]) -> Action:
    return lambda machine, _: machine.stack.append(kind(machine.pop_to_mark()))


def _as_dict(items: list[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    _set_entries(found, items)
    return found


def _set_entries(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise Damaged("malformed", "a dict with a key that has no value")
    entries = target.entries if isinstance(target, PickledObject) else target
    if not isinstance(entries, dict):
        raise Damaged("malformed", f"items are set in a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        entries[_key(key)] = value


def _key(key: Any) -> Any:
    if isinstance(key, list | dict):
        raise Damaged("malformed", f"a {type(key).__name__} is the key of a dict")
    if not isinstance(key, tuple) or all(isinstance(part, PLAIN_KEYS) for part in key):
        return key
    # hash() descends into tuples however deep they are; a record is hashed by its identity
    return PickledObject("key", key)


def _extend(target: Any, items: list[Any]) -> None:
    found = target.items if isinstance(target, PickledObject) else target
    if not isinstance(found, list):
        raise Damaged("malformed", f"items are appended to a {type(target).__name__}")
    found.extend(items)


def _append(machine: PickleMachine, _: None) -> None:
    value = machine.pop()
    _extend(machine.stack[-1], [value])


def _appends(machine: PickleMachine, _: None) -> None:
    items = machine.pop_to_mark()
    _extend(machine.stack[-1], items)


def _set_item(machine: PickleMachine, _: None) -> None:
    value = machine.pop()
    key = machine.pop()
    _set_entries(machine.stack[-1], [key, value])


def _set_items(machine: PickleMachine, _: None) -> None:
    items = machine.pop_to_mark()
    _set_entries(machine.stack[-1], items)


def _get(machine: PickleMachine, index: int) -> None:
    if index not in machine.memo:
        raise Damaged("malformed", f"the pickle asks for value {index}, which it never kept")
    machine.stack.append(machine.memo[index])


def _memoize(machine: PickleMachine, _: None) -> None:
    machine.memoize(len(machine.memo))


def _global(machine: PickleMachine, names: tuple[str, str]) -> None:
    machine.stack.append(machine.name(*names))


def _stack_global(machine: PickleMachine, _: None) -> None:
    name = machine.pop()
    module = machine.pop()
    machine.stack.append(machine.name(module, name))


def _extension(machine: PickleMachine, code: int) -> None:
    # what the code stands for is in the copyreg registry of the program that loads the file
    machine.stack.append(machine.name("copyreg", f"extension {code}"))


def _reduce(machine: PickleMachine, _: None) -> None:
    arguments = machine.pop()
    machine.call(machine.pop(), arguments)


def _new_object(machine: PickleMachine, _: None) -> None:
    # pickle does cls.__new__(cls, *arguments): no constructor runs, and a function is not a class
    arguments = machine.pop()
    machine.make(machine.pop(), arguments)


def _new_object_with_keywords(machine: PickleMachine, _: None) -> None:
    keywords = machine.pop()
    arguments = machine.pop()
    what = machine.pop()
    if not isinstance(arguments, tuple):
        raise Damaged(
            "malformed", f"an object is made with a {type(arguments).__name__} of arguments"
        )
    machine.make(what, (*arguments, keywords))


def _instance(machine: PickleMachine, names: tuple[str, str]) -> None:
    arguments = tuple(machine.pop_to_mark())
    machine.call(machine.name(*names), arguments)


def _object(machine: PickleMachine, _: None) -> None:
    items = machine.pop_to_mark()
    if not items:
        raise Damaged("malformed", "an object is made of nothing")
    machine.call(items[0], tuple(items[1:]))


def _build(machine: PickleMachine, _: None) -> None:
    state = machine.pop()
    target = machine.stack[-1]
    # pickle would write into the attributes of the imported thing, shared by the whole process
    if isinstance(target, Global):
        raise Damaged(
            "hostile",
            f"the pickle would change {target} itself, for the whole program; nothing was run",
        )
    if isinstance(target, PickledObject):
        target.state = state
    elif hasattr(target, "set_state"):
        target.set_state(state)


def _persistent_line(machine: PickleMachine, text: str) -> None:
    machine.stack.append(machine.persistent(text))


def _persistent(machine: PickleMachine, _: None) -> None:
    machine.stack.append(machine.persistent(machine.pop()))


def _next_buffer(machine: PickleMachine, _: None) -> None:
    raise Damaged("malformed", "the pickle refers to buffers outside the file")


def _nothing(machine: PickleMachine, _: None) -> None:
    """Do nothing: whether a buffer is read-only does not matter to a reader."""


ACTIONS: dict[str, Action] = {
    "PROTO": _protocol,
    "FRAME": _frame,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": _new(list),
    "EMPTY_DICT": _new(dict),
    # sets become lists and frozensets tuples: their members may be values that cannot be hashed
    "EMPTY_SET": _new(list),
    "FROZENSET": _gather(tuple),
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": _duplicate,
    "TUPLE": _gather(tuple),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "LIST": _gather(list),
    "DICT": _gather(_as_dict),
    "APPEND": _append,
    "APPENDS": _appends,
    "ADDITEMS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "PUT": PickleMachine.memoize,
    "BINPUT": PickleMachine.memoize,
    "LONG_BINPUT": PickleMachine.memoize,
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "EXT1": _extension,
    "EXT2": _extension,
    "EXT4": _extension,
    "REDUCE": _reduce,
    "NEWOBJ": _new_object,
    "NEWOBJ_EX": _new_object_with_keywords,
    "INST": _instance,
    "OBJ": _object,
    "BUILD": _build,
    "PERSID": _persistent_line,
    "BINPERSID": _persistent,
    "NEXT_BUFFER": _next_buffer,
    "READONLY_BUFFER": _nothing,
}
"""Name of an opcode -> what it does, for all but STOP and those that push what they read."""
