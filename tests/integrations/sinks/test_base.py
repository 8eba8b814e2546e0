"""Which steps a sink sends, and what it says about a missing library."""

from __future__ import annotations

import math
from typing import Any

import pytest

from integrations.sink_run import BAD, train
from stepguard import ConfigError
from stepguard.integrations.sinks import ScalarSink


class Kept(ScalarSink):
    """Remembers what would be sent."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sent: dict[int, dict[str, float]] = {}

    def send(self, values: dict[str, float], step: int) -> None:
        self.sent[step] = values


def test_only_every_nth_step_is_sent_but_a_bad_one_always() -> None:
    kept = Kept(every=5)
    train(kept)
    assert list(kept.sent) == [0, BAD, 5]
    assert [values["stepguard/incidents"] for values in kept.sent.values()] == [0.0, 1.0, 1.0]
    assert all(math.isfinite(value) for values in kept.sent.values() for value in values.values())


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_that_is_not_a_count_is_refused(every: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"Kept: every={every} must be a whole number of at least 1"
    ):
        Kept(every=every)


def test_a_library_that_is_not_there_is_named_with_the_way_to_get_it() -> None:
    class Absent(Kept):
        library, extra = "no_such_library", "absent"

    with pytest.raises(
        ConfigError, match=r"Absent needs no_such_library: pip install 'stepguard\[absent\]'"
    ):
        Absent()
