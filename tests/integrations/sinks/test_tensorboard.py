"""TensorBoard: the event file holds the NaN and its finite companion."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from integrations.sink_run import BAD, STEPS, train, without_bad


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The event files read back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_the_nan_and_its_companion(tmp_path: Path) -> None:
    from stepguard.integrations.sinks import TensorBoardSink

    losses = train(TensorBoardSink(tmp_path))
    found = curves(tmp_path)
    assert [step for step, _ in found["stepguard/loss"]] == list(range(STEPS))
    shown = [value for _, value in found["stepguard/loss"]]
    assert math.isnan(shown[BAD])
    assert without_bad(shown) == pytest.approx(without_bad(losses))
    for name in ("stepguard/nonfinite", "stepguard/skipped"):
        assert [step for step, value in found[name] if value == 1.0] == [BAD]
    assert found["stepguard/lr"][0][1] == pytest.approx(0.01)


def test_a_writer_of_the_user_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    from stepguard.integrations.sinks import TensorBoardSink

    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]
        train(TensorBoardSink(writer=writer))
        writer.add_scalar("mine", 1.0, 99)  # type: ignore[no-untyped-call]
    assert curves(tmp_path)["mine"] == [(99, 1.0)]
