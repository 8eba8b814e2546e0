"""Ranks of one gloo group as forked processes: torch is imported once, a hung rank is killed."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_SECONDS = 20
"""How long torch itself lets a rank wait in a collective."""
KILLED = "killed"
HUNG = "hung"
POLL = 0.01


def run_ranks(
    count: int, work: Callable[[int, Path], Any], *, seconds: float = 60.0
) -> list[tuple[str, Any]]:
    """How each rank ended, and what it returned: `work` gets its rank and a folder of all.

    A rank ends with "ok", "killed", "hung" (it was killed when time was up) or by an exception.
    Call it in a process of its own, which has started no threads and holds no group.
    """
    folder = Path(tempfile.mkdtemp(prefix="stepguard-ranks-"))
    ports = [os.pipe() for _ in range(count)]
    pids = [_fork(rank, count, ports[rank][0], work, folder) for rank in range(count)]
    # as torchrun does, the store lives in a process that no rank's death takes along; it is made
    # after the forks, since it has a thread, whose locks a fork would copy
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    try:
        for reads, writes in ports:
            os.write(writes, str(store.port).encode())
            os.close(writes)
            os.close(reads)
        ended = _wait(pids, time.monotonic() + seconds)
        return [_ending(folder / f"{rank}.pkl", ended[pid]) for rank, pid in enumerate(pids)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fork(rank: int, count: int, told: int, work: Callable[[int, Path], Any], folder: Path) -> int:
    """Start one rank, which is told the port of the store through a pipe."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", int(os.read(told, 16)), None, False)
        limit = timedelta(seconds=GROUP_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
        answer = ("ok", work(rank, folder))
    except BaseException as error:
        answer = (f"{type(error).__name__}: {error}", traceback.format_exc())
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(answer))
    # without the end of Python, which joins threads of gloo that may wait for ever
    os._exit(0)


def _wait(pids: list[int], deadline: float) -> dict[int, str]:
    """How each process ended; those that are left when time is up are killed."""
    ended: dict[int, str] = {}
    while len(ended) < len(pids):
        for pid in pids:
            if pid in ended:
                continue
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended[pid] = HUNG
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = KILLED if os.WIFSIGNALED(status) else ""
        time.sleep(POLL)
    return ended


def _ending(file: Path, ended: str) -> tuple[str, Any]:
    if ended:
        return ended, None
    answer: tuple[str, Any] = pickle.loads(file.read_bytes())
    return answer
