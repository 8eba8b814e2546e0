"""Which checkpoints rotation may delete, and the words of a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard._errors import SaveRefused
from stepguard.integrations.transformers import to_delete

ALL = ["c-1", "c-2", "c-3", "c-4"]


@pytest.mark.parametrize(
    ("keep", "protected", "deleted"),
    [
        (4, set(), []),
        (2, set(), ["c-1", "c-2"]),
        (1, set(), ["c-1", "c-2", "c-3"]),
        (1, {Path("c-2")}, ["c-1", "c-3"]),
        (2, {Path("c-1")}, ["c-2", "c-3"]),
        (3, {Path("c-1")}, ["c-2"]),
    ],
)
def test_oldest_go_but_never_the_newest_or_a_protected_one(
    keep: int, protected: set[Path], deleted: list[str]
) -> None:
    assert to_delete(ALL, keep, protected) == deleted


def test_refusal_names_a_few_tensors_and_the_way_out() -> None:
    refusal = SaveRefused("checkpoint-5", [f"param:{i}" for i in range(5)])
    assert str(refusal).startswith("refused to save checkpoint-5: non-finite stored tensors: 5")
    assert "(param:0, param:1, param:2, ...)" in str(refusal)
    assert "load the last good checkpoint" in str(refusal)
