"""What one rank has of its own is put beside rank 0's state, and taken out again.

Real ranks: tests/distributed/test_copies.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepguard._errors import StoreError
from stepguard.ranks.saving import refuse_other_size, state_of_rank
from stepguard.state.run_state import SavedState


def two_ranks() -> SavedState:
    tensors = {
        "model/a": torch.zeros(1),
        "model/first": torch.zeros(1),
        "rng/0/torch": torch.zeros(1),
        "rank/1/model/a": torch.ones(1),
        "rank/1/model/second": torch.ones(2),
    }
    own = {
        "has": ["model/a", "model/second"],
        "lacks": ["model/first"],
        "facts": {"groups": [{"params": ["a", "second"]}]},
    }
    facts = {"groups": [{"params": ["a", "first"]}], "numbers": 0, "ranks": {"1": own}}
    return SavedState(tensors, facts)


def test_each_rank_finds_its_own_names_values_and_facts() -> None:
    kept = two_ranks()
    first = state_of_rank(kept.tensors, kept.facts, 0)
    second = state_of_rank(kept.tensors, kept.facts, 1)
    assert sorted(first.tensors) == ["model/a", "model/first", "rng/0/torch"]
    assert sorted(second.tensors) == ["model/a", "model/second", "rng/0/torch"]
    assert float(first.tensors["model/a"]) == 0 and float(second.tensors["model/a"]) == 1
    assert first.facts["groups"] == [{"params": ["a", "first"]}]
    assert second.facts["groups"] == [{"params": ["a", "second"]}]
    assert second.facts["numbers"] == 0


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_is_refused_where_trained_weights_differ(size: int) -> None:
    kept = two_ranks()
    refuse_other_size(kept.facts, 2)
    with pytest.raises(StoreError, match=rf"first model/a\) and this run has {size}: .* with 2"):
        refuse_other_size(kept.facts, size)


def test_buffers_of_other_ranks_do_not_bind_a_run_to_its_number_of_ranks() -> None:
    own: dict[str, Any] = {"has": ["model/mean"], "lacks": [], "facts": {}}
    refuse_other_size({"groups": [{"params": ["a"]}], "ranks": {"1": own}}, 4)
