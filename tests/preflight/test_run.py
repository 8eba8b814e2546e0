"""`check`: which items are run, and what an item that raises leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from preflight.asking import inside
from stepguard import ConfigError
from stepguard.check.preflight import Subject, check, selected


def test_items_are_chosen_by_id_section_or_pattern() -> None:
    assert selected(("lr",), ()) == [
        "lr.config",
        "lr.schedule",
        "lr.checkpoint",
    ]
    assert selected(("lr.*",), ("lr.config", "*.checkpoint")) == ["lr.schedule"]
    with pytest.raises(
        ConfigError, match=r"'lrr' is not an item; use an id such as 'lr\.config', or one of"
    ):
        selected(("lrr",), ())


def test_item_that_raises_does_not_hide_the_others(tmp_path: Path) -> None:
    class Strange(nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("odd model")

    with inside(tmp_path):
        result = check(
            Subject(model=Strange(2, 2), config={"lr": 1.0}),
            only=["model.stored_finite", "config.types"],
        )
    outcome = result.outcome("model.stored_finite")
    assert outcome.status == "warn"
    assert "this check itself failed: LookupError: odd model" in outcome.evidence[0]
    assert result.outcome("config.types").status == "pass"
