"""Real processes over gloo, and what they said; killed when they take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import stepguard

TESTS = Path(__file__).parents[1]
PATHS = [str(Path(stepguard.__file__).parents[1]), str(TESTS), str(TESTS.parent)]
"""The package, the tests and the benchmarks, for processes of their own."""


def launch(
    worker: Path,
    out: Path,
    arguments: list[str],
    seconds: int,
    ranks: int = 2,
    options: Sequence[str] = (),
) -> tuple[int | None, str]:
    """Exit code and what was said; None when the ranks had to be killed.

    `options`: further ones of torchrun.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    log = out / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, str(worker), str(out), *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return code, log.read_text()
