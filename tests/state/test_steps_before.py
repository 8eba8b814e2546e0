"""The steps before a bad one, beside its capsule: what is written comes back, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.parts import step_of
from scenes import batches, difference
from stepguard import CapsuleError
from stepguard.probes.whatif import copied_state
from stepguard.state.capsule import Window, read_window, window_step, write_window
from stepguard.state.run_state import RunState

PLENTY = 2**30


def window() -> Window:
    step = step_of(*batches(2), index=7, scale=8.0, clip_norm=0.5)
    state = copied_state(RunState(step.named_roots(), step.optimizer))
    return Window(state, [window_step(step, 0.25, (0.1,))], [window_step(step, None, ())])


def test_window_comes_back_as_it_was_written(tmp_path: Path) -> None:
    given = window()
    assert write_window(tmp_path, given, PLENTY) == ""
    found = read_window(tmp_path)
    assert found is not None
    assert found.first == 7
    assert difference(found.start.tensors, given.start.tensors) == ""
    assert found.start.facts == given.start.facts
    for before, after in zip(given.steps + given.others, found.steps + found.others, strict=True):
        assert difference(after.micro_batches, before.micro_batches) == ""
        assert (after.loss, after.lr) == (before.loss, before.lr)
        assert (after.scale, after.clip_norm) == (8.0, 0.5)
        assert all(map(torch.equal, (r.cpu for r in after.rng), (r.cpu for r in before.rng)))


def test_capsule_without_a_window_has_none(tmp_path: Path) -> None:
    assert read_window(tmp_path) is None


def test_window_that_is_too_large_or_not_plain_is_refused_in_words(tmp_path: Path) -> None:
    assert "are left for them" in write_window(tmp_path, window(), 10)
    odd = window()
    odd.steps[0].micro_batches = (object(),)
    assert "object" in write_window(tmp_path, odd, PLENTY)
    assert read_window(tmp_path) is None


def test_damaged_window_is_one_clear_error(tmp_path: Path) -> None:
    write_window(tmp_path, window(), PLENTY)
    (tmp_path / "window" / "window.json").write_text('{"schema": 1}', encoding="utf-8")
    with pytest.raises(CapsuleError, match="damaged"):
        read_window(tmp_path)
