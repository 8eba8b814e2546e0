"""Which ranks hold copies, who has drifted, and what is different on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from stepguard.ranks.copies import (
    RankDigest,
    odd_facts,
    odd_weights,
    same_batches,
    shards_that_differ,
    together,
)


def rank(number: int, weights: int = 5, gradients: int = 7, **more: Any) -> RankDigest:
    digests = (str(weights), str(gradients or ""))
    return RankDigest(rank=number, parts={"model": digests}, **more)


def parts(*of_ranks: dict[str, tuple[int, int]]) -> dict[int, dict[str, Any]]:
    return {number: {"model": part} for number, part in enumerate(of_ranks)}


def test_equal_gradients_make_copies_of_one_model() -> None:
    assert together([rank(0), rank(1), rank(2, gradients=8)]) == [(0, 1)]


def test_no_gradient_proves_nothing() -> None:
    assert together([rank(0, gradients=0), rank(1, gradients=0)]) == []


def test_shards_of_one_model_belong_together() -> None:
    told = [rank(0, gradients=1, sharded=True), rank(1, gradients=2, sharded=True)]
    assert together(told) == [(0, 1)]


def test_equal_ranks_are_asked_for_nothing_more() -> None:
    assert shards_that_differ([rank(0), rank(1)]) == set()
    assert shards_that_differ([rank(0), rank(1, weights=6)]) == {"model"}


def test_stages_are_not_compared_with_each_other() -> None:
    first = RankDigest(rank=0, parts={"first": ("1", "1")})
    second = RankDigest(rank=1, parts={"second": ("2", "2")})
    assert shards_that_differ([first, second]) == set()


def test_the_minority_has_drifted() -> None:
    good = {"a": (1, 7), "b": (2, 8), "c": (3, 9)}
    bad = {"a": (1, 7), "b": (4, 8), "c": (5, 9)}
    odd, own = odd_weights(parts(good, good, bad, good))
    assert odd is not None
    assert (odd.ranks, odd.agree, odd.what, odd.count) == ((2,), (0, 1, 3), "b", 2)
    assert own == ""


def test_of_two_ranks_one_has_drifted() -> None:
    odd, _ = odd_weights(parts({"a": (1, 7)}, {"a": (2, 7)}))
    assert odd is not None
    assert (odd.ranks, odd.agree) == ((0, 1), ())


def test_experts_are_compared_with_the_same_expert_only() -> None:
    one, other = {"expert": (1, 7)}, {"expert": (2, 8)}
    assert odd_weights(parts(one, other, one, other)) == (None, "")
    odd, _ = odd_weights(parts(one, other, {"expert": (3, 7)}, other))
    assert odd is not None
    assert odd.ranks == (0, 2)


def test_ranks_that_train_apart_are_named_and_not_compared() -> None:
    assert odd_weights(parts({"a": (1, 7)}, {"a": (2, 8)})) == (None, "a")


def test_a_parameter_without_gradient_is_compared_where_all_others_are_copies() -> None:
    one, other = {"a": (1, 7), "frozen": (2, 0)}, {"a": (1, 7), "frozen": (3, 0)}
    odd, _ = odd_weights(parts(one, other))
    assert odd is not None
    assert odd.what == "frozen"
    apart = {"a": (4, 9), "frozen": (3, 0)}
    assert odd_weights(parts(one, apart))[0] is None


def test_an_odd_learning_rate_is_told_with_its_rank() -> None:
    odd = odd_facts([rank(0), rank(1), rank(2)], {0: "0.1", 1: "0.05", 2: "0.1"})
    assert odd is not None
    assert (odd.ranks, odd.what) == ((1,), "rank 1: 0.05, rank 0: 0.1")
    assert odd_facts([rank(0), rank(1, gradients=9)], {0: "0.1", 1: "0.05"}) is None


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("21", "21", (0, 1)),
        ("21", "31", ()),
        ("21", "23", ()),
        ("11", "11", ()),
        ("2", "2", ()),
    ],
)
def test_the_same_batch_twice_while_batches_change(
    first: str, second: str, found: tuple[int, ...]
) -> None:
    told = [
        rank(0, batch=first[0], batch_before=first[1:]),
        rank(1, batch=second[0], batch_before=second[1:]),
    ]
    assert same_batches(told) == found


def test_ranks_that_hold_shards_may_read_the_same() -> None:
    told = [rank(n, batch="2", batch_before="1", sharded=True) for n in range(2)]
    assert same_batches(told) == ()


def test_samplers_divide_one_order() -> None:
    told = [rank(0), rank(1)]
    assert odd_facts(told, {0: "seed 0", 1: "seed 0"}) is None
    odd = odd_facts(told, {0: "seed 0", 1: "seed 7"})
    assert odd is not None
    assert "rank 1: seed 7" in odd.what
    assert odd_facts(told, {0: "seed 0", 1: ""}) is None
