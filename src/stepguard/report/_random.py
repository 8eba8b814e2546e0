"""rich draws from Python's `random` when it is imported and where a style carries a link. The run
must not notice.
"""

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


with same_random_numbers():
    import rich.style  # noqa: F401  # the module that draws
