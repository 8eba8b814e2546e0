"""Weights & Biases, offline: finite numbers on a step axis of their own."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integrations.sink_run import BAD, STEPS, train

# a process of its own: wandb starts a service with threads that outlive the run
WANDB = """
import json, sys, wandb
sys.path.insert(0, {tests!r})
from integrations.sink_run import train
from stepguard.integrations.sinks import WandbSink
run = wandb.init(mode="offline", dir={folder!r}, settings=wandb.Settings(silent=True))
run.log({{"mine": 1.0}})
losses = train(WandbSink())
run.log({{"mine": 2.0}})
summary = {{k: v for k, v in dict(run.summary).items() if not isinstance(v, dict)}}
print("SUMMARY " + json.dumps([losses, summary]))
run.finish()
"""


def test_wandb_gets_finite_numbers_on_an_axis_of_their_own(tmp_path: Path) -> None:
    script = WANDB.format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SUMMARY ")]
    losses, summary = json.loads(line.removeprefix("SUMMARY "))
    assert summary["mine"] == 2.0
    assert summary["stepguard/step"] == STEPS - 1
    assert summary["stepguard/loss"] == pytest.approx(losses[-1])
    assert summary["stepguard/incidents"] == 1.0
    history = records(next(tmp_path.rglob("*.wandb")))
    (bad,) = [record for record in history if record.get("stepguard/nonfinite") == 1.0]
    assert (bad["stepguard/step"], bad["stepguard/skipped"]) == (BAD, 1.0)
    assert "stepguard/loss" not in bad


def records(path: Path) -> list[dict[str, Any]]:
    """History lines of an offline run's file: protobuf records in the blocks of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    found, partial = [], b""
    for kind, data in chunks(path.read_bytes()):
        partial += data
        if kind in WHOLE:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(partial)
            partial = b""
            if record.WhichOneof("record_type") == "history":
                found.append(
                    {
                        i.key or ".".join(i.nested_key): json.loads(i.value_json)
                        for i in record.history.item
                    }
                )
    return found


HEADER, BLOCK, CHUNK, WHOLE = 7, 2**15, 7, (1, 4)


def chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = HEADER
    while place < len(data):
        if BLOCK - place % BLOCK < CHUNK:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        yield kind, data[place + CHUNK : place + CHUNK + length]
        place += CHUNK + length


def test_wandb_without_a_run_says_what_to_do() -> None:
    from stepguard.integrations.sinks import WandbSink

    with pytest.warns(
        RuntimeWarning, match=r"WandbSink found no active run: call wandb.init\(\) first"
    ):
        train(WandbSink())
