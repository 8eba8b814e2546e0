"""trackio: every step and the incident in its local store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.sink_run import BAD, STEPS, train, without_bad

# a process of its own: trackio reads its folder when it is imported, and leaves threads behind
TRACKIO = """
import json, os, sys
os.environ.update(TRACKIO_DIR={folder!r}, HF_HUB_OFFLINE="1")
sys.path.insert(0, {tests!r})
import trackio
from trackio.sqlite_storage import SQLiteStorage
from integrations.sink_run import train
from stepguard.integrations.sinks import TrackioSink
trackio.init(project="p", name="r", embed=False, auto_log_cpu=False)
trackio.log({{"mine": 1.0}})
losses = train(TrackioSink())
trackio.log({{"mine": 2.0}})
trackio.finish()
told = [losses, SQLiteStorage.get_logs("p", "r"), SQLiteStorage.get_alerts("p")]
print("TOLD " + json.dumps(told))
"""


def test_trackio_gets_every_step_as_it_was_and_an_alert(tmp_path: Path) -> None:
    script = TRACKIO.format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    losses, logs, alerts = json.loads(line.removeprefix("TOLD "))
    ours = [log for log in logs if "stepguard/step" in log]
    assert [log["stepguard/step"] for log in ours] == list(range(STEPS))
    stored = [log["stepguard/loss"] for log in ours]
    assert without_bad(stored) == pytest.approx(without_bad(losses))
    assert str(stored[BAD]) == "nan"
    assert [log["stepguard/nonfinite"] for log in ours] == [float(s == BAD) for s in range(STEPS)]
    assert [log["mine"] for log in logs if "mine" in log] == [1.0, 2.0]
    (alert,) = alerts
    assert alert["title"] == f"stepguard: nonfinite_input at step {BAD}"


@pytest.mark.process
def test_trackio_without_a_run_says_what_to_do() -> None:
    from stepguard.integrations.sinks import TrackioSink

    with pytest.warns(RuntimeWarning, match=r"TrackioSink found no active run: call trackio.init"):
        train(TrackioSink())
