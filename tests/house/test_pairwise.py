"""A shortened product has every pair of values of the whole one, and is the same each time."""

from __future__ import annotations

from itertools import product

import pytest

from pairwise import pairs, pairwise

ROWS = list(product("abcdefgh", (1, 2), (False, True), (None, 0.5, 1.0)))


@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_is_left_and_most_rows_are_not(seed: int) -> None:
    chosen = pairwise(ROWS, seed=seed, full=False)
    assert frozenset().union(*map(pairs, chosen)) == frozenset().union(*map(pairs, ROWS))
    assert set(chosen) < set(ROWS) and 8 * 3 <= len(chosen) <= len(ROWS) // 3
    assert chosen == sorted(chosen, key=ROWS.index) == pairwise(ROWS, seed=seed, full=False)


def test_rows_that_cannot_be_are_not_invented() -> None:
    possible = [row for row in ROWS if row[:2] != ("a", 2)]
    assert set(pairwise(possible, full=False)) < set(possible)


def test_product_of_two_stays_whole_and_so_does_everything_in_the_long_run() -> None:
    assert pairwise(product("ab", (1, 2)), full=False) == list(product("ab", (1, 2)))
    assert pairwise(ROWS, full=True) == ROWS
