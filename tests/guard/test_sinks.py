"""The user's loggers hear every step, incident and note; one that fails is dropped, and the run
does not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from scenes import (
    LOOPS,
    Scene,
    bare,
    batches,
    difference,
    grouped,
    noisy_net,
    poisoned,
    quiet,
    state_of,
)
from stepguard import ConfigError, GuardConfig, Incident
from stepguard.engine.protect import SinkDropped
from stepguard.integrations.sinks import Sink
from stepguard.journal import read_run
from stepguard.records import Reading

STEPS = grouped(batches(6), 1)


class Memory(Sink):
    """Keeps what it hears, and fails when told to."""

    def __init__(self, fails_in: str = "") -> None:
        self.heard: list[str] = []
        self._fails_in = fails_in

    def step(self, reading: Reading, committed: bool) -> None:
        self._hear("step", f"step {reading.step}" + ("" if committed else " skipped"))

    def incident(self, incident: Incident) -> None:
        self._hear("incident", f"incident {incident.step}")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._hear("note", kind)

    def close(self) -> None:
        self._hear("close", "close")

    def _hear(self, kind: str, said: str) -> None:
        self.heard.append(said)
        if kind == self._fails_in:
            raise OSError("no route to the dashboard")


def scene() -> Scene:
    model = noisy_net()
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def with_bad_step(at: int) -> list[tuple[Any, ...]]:
    return [(poisoned(micro[0]),) if index == at else micro for index, micro in enumerate(STEPS)]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_sink_hears_every_step_and_the_incident_once_it_is_dealt_with(loop: str) -> None:
    memory = Memory()
    LOOPS[loop](scene(), with_bad_step(2)[:4], quiet(sinks=(memory,)))
    assert memory.heard == [
        "step 0",
        "step 1",
        "step 2 skipped",
        "incident 2",
        "step 3",
        "end",
        "close",
    ]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("fails_in", ["step", "incident", "note", "close"])
def test_a_sink_that_fails_is_dropped_once_and_the_run_is_the_same(
    loop: str, fails_in: str, tmp_path: Path
) -> None:
    broken, healthy = Memory(fails_in), Memory()
    steps, guarded = with_bad_step(2), scene()
    with pytest.warns(
        SinkDropped, match="Memory failed and is dropped.*no route to the dashboard"
    ) as said:
        LOOPS[loop](guarded, steps, quiet(sinks=(broken, healthy), run_dir=tmp_path))
    reference = scene()
    LOOPS[loop](reference, steps, quiet())
    assert len(said) == 1
    assert not difference(state_of(guarded), state_of(reference))
    assert "end" in healthy.heard
    assert healthy.heard[-1] == "close"
    assert "no route to the dashboard" in str(read_run(tmp_path).notes)


def test_sinks_that_fail_together_are_all_dropped() -> None:
    broken = Memory("step"), Memory("note"), Memory("step")
    healthy = Memory()
    with pytest.warns(SinkDropped) as said:
        LOOPS["step"](scene(), STEPS[:3], quiet(sinks=(*broken, healthy)))
    assert len(said) == 3
    assert [word for word in healthy.heard if word.startswith("step")] == [
        "step 0",
        "step 1",
        "step 2",
    ]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_healthy_run_with_sinks_is_bit_identical(loop: str) -> None:
    unguarded = scene()
    bare(unguarded, STEPS)
    guarded = scene()
    LOOPS[loop](guarded, STEPS, quiet(sinks=(Memory(),)))
    assert not difference(state_of(unguarded), state_of(guarded))


def test_the_journal_names_the_sinks_and_copies_none(tmp_path: Path) -> None:
    class Uncopyable(Memory):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("a connection cannot be copied")

    LOOPS["step"](scene(), STEPS[:1], quiet(sinks=(Uncopyable(),), run_dir=tmp_path))
    assert read_run(tmp_path).header["config"]["sinks"] == ["Uncopyable"]


@pytest.mark.parametrize(
    "sinks", [[Memory()], (print,), Memory()], ids=["list", "function", "bare"]
)
def test_what_is_no_tuple_of_sinks_is_refused(sinks: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"GuardConfig.sinks=.* must be a tuple of stepguard.integrations.sinks.Sink",
    ):
        GuardConfig(sinks=sinks)
