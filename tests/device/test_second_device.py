"""A device that is not the CPU: the same guarantees, and one read of values a step.

The device is `toy`, built by torch's extension loader from `toy_device.cpp`. What it shows is that
nothing names a device and nothing reads values in between. What only a GPU has (streams that run
ahead, pinned memory that matters, graph capture) it does not show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepguard

TESTS = Path(__file__).parents[1]
SOURCE = Path(stepguard.__file__).parents[1]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What one process told of all scenes; the first time on a machine it also compiles."""
    # torch's loader calls `ninja`, which pip puts beside the interpreter
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    search = f"{SOURCE}{os.pathsep}{TESTS}"
    env = {**os.environ, "PATH": tools, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("worker.py"))],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_healthy_run_is_bit_identical_with_one_read_a_step(told: dict[str, Any]) -> None:
    assert told["healthy"] == {
        "bare reads": 0,
        "guard.step reads": 1,
        "watch reads": 1,
        "guard.step same": True,
        "watch same": True,
    }


def test_bad_step_is_vetoed_and_placed(told: dict[str, Any]) -> None:
    lines = Path(__file__).with_name("worker.py").read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("# BORN HERE"))
    assert told["vetoed"] == {
        "committed": False,
        "unchanged": True,
        "op": "aten.log",
        "source": f"worker.py:{number}",
        "samples": [4],
        "code": "SG202",
    }


def test_selftest_holds_on_the_device(told: dict[str, Any]) -> None:
    not_there = ("float16 with GradScaler", "a stream of its own", "synchronisations")
    assert told["selftest"] == {
        "healthy run unchanged": True,
        "the same, fused optimizer": True,
        "bad step vetoed and located": True,
        "checkpoint restored": True,
        "damaged weight rewound": True,
        "cost": True,
        **dict.fromkeys(not_there, None),
    }
