"""A small run on disk, and the command line: in this process, or in one of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import forked
import stepguard
from stepguard.cli.app import app
from stepguard.journal import Journal
from stepguard.records import Decision, Finding, Incident, Origin, Reading, Verdict

NAN = float("nan")


def write_run(folder: Path) -> Path:
    """Twelve steps, of which number 8 is bad."""
    journal = Journal(folder)
    journal.write("run", {"stepguard": "0.1.0", "config": {"clip_norm": 1.0}})
    for step in range(12):
        bad = step == 8
        reading = Reading(
            step=step,
            loss=NAN if bad else 2.0 - step / 10,
            grad_norm=NAN if bad else 0.5,
            lr=(1e-4,),
        )
        journal.step(reading, committed=not bad)
        if bad:
            journal.incident(_incident(reading, folder))
    journal.close()
    return folder


def _incident(reading: Reading, folder: Path) -> Incident:
    return Incident(
        id="8-0",
        step=8,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=reading,
        origin=Origin(
            step=8, phase="forward", module="attn", op="aten._softmax", source="model.py:88"
        ),
        findings=(
            Finding(code="SG204", title="softmax over a fully masked row", certainty="certain"),
        ),
        decision=Decision(action="skip", consecutive=1, total=1),
        run=str(folder),
    )


def run_stepguard(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """`python -m stepguard WORDS`, with its output piped."""
    source = str(Path(stepguard.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "COLUMNS": "100", **settings}
    return forked.python(["-m", "stepguard", *words], variables=env)


def invoke(*words: str | Path, given: str | None = None, **variables: str) -> Any:
    """`stepguard WORDS` in this process: exit code, stdout and stderr."""
    return CliRunner().invoke(app, list(map(str, words)), input=given, env=variables)
