"""How much a file may ask for before reading stops; real checkpoints stay far below."""

from __future__ import annotations

MOST_OPERATIONS = 10_000_000
"""Opcodes of one pickle stream; 100 000 tensors need about 4 million."""
MOST_STACK = 1_000_000
MOST_MEMO = 4_000_000
MOST_NAMES = 10_000
"""Importable names that one file refers to."""
MOST_WORK = 20_000_000
"""Items that are compared or copied because an opcode refers to a value of any size."""
MOST_DEPTH = 100
"""Containers inside containers."""
MOST_NODES = 5_000_000
"""Values visited when a pickle's contents are walked."""
MOST_TENSORS = 1_000_000
LONGEST_TEXT = 16 << 20
LONGEST_LINE = 1 << 16
"""Of a text opcode: GLOBAL, INST, INT, FLOAT, ..."""
LONGEST_INTEGER = 1 << 10
"""Bytes of one integer."""
SMALL_BYTES = 1 << 16
"""Byte strings up to this length are kept in memory; of longer ones only the offset is kept."""
LONGEST_ENTRY = 250
"""Bytes of the name of an entry in a zip."""
LARGEST_DIRECTORY = 24 << 20
"""Bytes of a zip's central directory: about 300 000 records."""
LARGEST_HEADER = 32 << 20
"""Bytes of a safetensors header: about 300 000 tensors."""
LARGEST_JSON = 32 << 20
MOST_DIMENSIONS = 64
LARGEST_DIMENSION = 1 << 63
"""Python integers have no end, and one of more than 4300 digits cannot even be printed."""
MOST_PER_KIND = 20
"""Problems of one kind that are listed for one file; the others are counted in one line."""


def is_shape(value: object) -> bool:
    """Could these be the sizes or strides of a tensor? Only then may they be multiplied."""
    if not isinstance(value, tuple | list) or len(value) > MOST_DIMENSIONS:
        return False
    return all(type(n) is int and abs(n) <= LARGEST_DIMENSION for n in value)
