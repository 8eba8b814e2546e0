"""Accidents that happen to bytes at rest: a flipped bit, a zeroed page, a cut end, two pages that
changed places.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

PAGE = 4096

Damage = Callable[[bytearray, random.Random], bytearray]


def flipped_bit(content: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(8 * len(content))
    content[at // 8] ^= 1 << at % 8
    return content


def zeroed_page(content: bytearray, rng: random.Random) -> bytearray:
    """A page that is not zero already."""
    pages = [at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])]
    at = rng.choice(pages)
    content[at : at + PAGE] = bytes(len(content[at : at + PAGE]))
    return content


def truncated(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.randrange(len(content))]


def swapped_pages(content: bytearray, rng: random.Random) -> bytearray:
    """Two different pages; in a file of one page, its halves."""
    size = PAGE if len(content) >= 2 * PAGE else len(content) // 2
    while True:
        one, other = (size * rng.randrange(len(content) // size) for _ in range(2))
        a, b = bytes(content[one : one + size]), bytes(content[other : other + size])
        if a != b:
            content[one : one + size], content[other : other + size] = b, a
            return content


DAMAGES: dict[str, tuple[Damage, int]] = {
    "bit flips": (flipped_bit, 1000),
    "zeroed pages": (zeroed_page, 500),
    "truncations": (truncated, 250),
    "swapped pages": (swapped_pages, 250),
}
"""And how many of each the campaign does."""


def victim(files: list[Path], rng: random.Random) -> Path:
    """A file, as likely as it is large: damage does not choose by name."""
    return rng.choices(files, weights=[path.stat().st_size for path in files])[0]
