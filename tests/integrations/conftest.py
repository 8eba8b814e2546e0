"""accelerate keeps its state in singletons and environment variables: every test starts and ends
without them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integrations.trainers import same_environment


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    reset()
    with same_environment():
        yield
    reset()
