"""Real processes over gloo, and what they said; killed when they take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import forked
from forked import PATHS, TESTS, TORCHRUN

__all__ = ["PATHS", "TESTS", "launch"]


def launch(
    worker: Path,
    out: Path,
    arguments: list[str],
    seconds: int,
    ranks: int = 2,
    options: Sequence[str] | None = None,
    imports: Sequence[str] = (),
) -> tuple[int | None, str]:
    """Exit code and what was said; None when the ranks had to be killed.

    The ranks are forked with torch and `imports` imported, unless `options` of torchrun are given:
    then it starts them.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    log = out / "log"
    words = [str(worker), str(out), *arguments]
    if options is None and not forked.FULL:
        log.write_text("")
        code = forked.logged(words, ranks, log, environment, seconds, imports)
        return code, log.read_text()
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", str(ranks), *(options or ())]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return code, log.read_text()
