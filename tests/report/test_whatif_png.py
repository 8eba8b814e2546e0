"""The picture of what would have helped, from a literal."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from report.test_whatif import FOUND
from stepguard.report.plot import write_trials_png


@pytest.mark.parametrize("largest", [2.0, 1e6, math.inf])
def test_picture_of_every_trial_is_written(tmp_path: Path, largest: float) -> None:
    first = replace(FOUND.outcomes[0], losses=(1.0, 0.5, largest))
    write_trials_png(replace(FOUND, outcomes=(first, *FOUND.outcomes[1:])), tmp_path / "whatif.png")
    content = (tmp_path / "whatif.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_nothing_tried_is_still_a_picture(tmp_path: Path) -> None:
    write_trials_png(replace(FOUND, outcomes=()), tmp_path / "whatif.png")
    assert (tmp_path / "whatif.png").exists()
