"""A few rows of a product, in which every pair of values still meets.

A fault that needs two settings to show is found by a row that has both. The whole product runs with
STEPGUARD_FULL=1 (`make test-all`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from forked import FULL

Row = tuple[Any, ...]


def pairs(row: Row) -> frozenset[tuple[int, Any, int, Any]]:
    """Every pair of the row's values, with their places."""
    return frozenset((i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2))


def pairwise(rows: Iterable[Row], *, seed: int = 0, full: bool = FULL) -> list[Row]:
    """Enough of `rows`, in their order, for each pair of values that occurs in them.

    Greedy: the row with the most new pairs comes next, and the seed decides between equals.
    """
    product = list(rows)
    if full:
        return product
    shuffled = random.Random(seed).sample(product, len(product))
    left = frozenset().union(*map(pairs, product))
    chosen = []
    while left:
        best = max(shuffled, key=lambda row: len(pairs(row) & left))
        chosen.append(best)
        left -= pairs(best)
    return sorted(chosen, key=product.index)
