"""A run of two ranks on disk, in which a sample of rank 1 is to blame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cli.journals import NAN
from stepguard.journal import Journal
from stepguard.records import Decision, Incident, Origin, Reading, Verdict


def two_ranks(folder: Path, steps: int = 12, bad: int = 8) -> Path:
    """Both ranks recorded the incident; its origin is on rank 1."""
    for rank in range(2):
        journal = Journal(folder, rank)
        header = {"time": 1e9 + rank, "run": "r", "attempt": 1, "rank": rank, "world": 2}
        journal.write("run", header)
        for step in range(steps):
            reading = Reading(step=step, loss=2.0 - step / 10, grad_norm=0.5, lr=(1e-4,))
            if step == bad:
                reading = replace(reading, loss=NAN, bad_ranks=(1,))
            journal.step(reading, committed=step != bad)
            if step == bad:
                journal.incident(_incident(reading, rank))
        journal.write("end", {"steps": steps, "incidents": 1, "armed": True})
        journal.close()
    return folder


def _incident(reading: Reading, rank: int) -> Incident:
    return Incident(
        id="8-0",
        step=reading.step,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=reading,
        origin=Origin(step=reading.step, phase="forward", op="aten.log", rank=1),
        decision=Decision(action="skip", consecutive=1, total=1),
        rank=rank,
    )
