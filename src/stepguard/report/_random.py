"""Keep Python's `random` untouched: rich draws from it when imported and for styles with links."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Whatever is drawn inside, the program's next random number is what it would have been."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


# Importing rich.style draws from Python's `random`: done here once, under protection.
with same_random_numbers():
    import rich.style  # noqa: F401  # the module that draws
