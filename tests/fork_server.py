"""A process that has imported torch and forks whoever asks for `python WORDS`, or for ranks of it.

`python -c 'import fork_server; fork_server.serve()'` reads one JSON object for each line of stdin
(see `forked.py`) and writes two lines for each: the process id, and how it ended. A child gets its
own session, folder, variables and files, and then runs its words as Python does: in `__main__`, to
the end of the interpreter. It has imported more than a fresh one would, and it shares the hash seed
of its siblings; a test of either starts a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FIRST = (
    "torch",
    "torch._dynamo",
    "torch.distributed.algorithms.join",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "numpy",
    "stepguard.cli.app",
    "stepguard.guard",
)
"""Imported before the first request."""
GRACE = 10.0
"""Seconds that the other ranks get to end once one has failed."""
POLL = 0.01


def serve() -> None:
    """Answer until stdin ends; returns in a child, too, once it has run its words."""
    requests, answers = os.fdopen(os.dup(0)), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path if path and path not in own]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import(FIRST)
    while line := requests.readline():
        asked = json.loads(line)
        _import(asked["imports"])
        gc.freeze()  # a child has no garbage to look for in what it shares
        child = os.fork()
        if not child:
            os.close(answers)
            requests.close()
            _settle(asked, installed)
            if asked["ranks"]:
                _launch(asked["words"], asked["ranks"])
            else:
                _run(asked["words"])
            return
        os.write(answers, b"%d\n" % child)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _settle(asked: dict[str, Any], installed: list[str]) -> None:
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    sys.path[:] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p] + installed
    for number, name in enumerate(asked["files"]):
        reads = number == 0
        file = os.open(name, os.O_RDONLY if reads else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def _run(words: Sequence[str]) -> None:
    """What `python WORDS` does."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *words]
    while words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, str(Path.cwd()))
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.argv = list(words)
            script = Path(words[0]).absolute()
            sys.path.insert(0, str(script.parent))
            main.__file__ = str(script)
            code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
            exec(code, main.__dict__)
    except Exception as error:
        # without the frame of this function, which the user's program does not have
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _launch(words: Sequence[str], count: int) -> None:
    """Do as torchrun does: ranks that meet at a store of the launcher, and end together."""
    import torch.distributed as dist

    pipes = [os.pipe() for _ in range(count)]
    left: dict[int, int] = {}
    for rank in range(count):
        child = os.fork()
        if not child:
            port = os.read(pipes[rank][0], 16).decode()
            os.environ.update(_of_rank(rank, count, port))
            _run(words)
            return
        left[child] = rank
    # after the forks: it has a thread, whose locks a fork would copy
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for _, writes in pipes:
        os.write(writes, str(store.port).encode())
    failed, deadline = False, float("inf")
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            time.sleep(POLL)
            if time.monotonic() > deadline:
                _signal(left, signal.SIGKILL)
            continue
        code = os.waitstatus_to_exitcode(status)
        rank = left.pop(child)
        if code:
            print(f"rank {rank} ended with exit code {code}", file=sys.stderr, flush=True)
            _signal(left, signal.SIGTERM)
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
    sys.exit(int(failed))


def _signal(children: dict[int, int], number: int) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def _of_rank(rank: int, count: int, port: str) -> dict[str, str]:
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
        **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "forked",
    }
