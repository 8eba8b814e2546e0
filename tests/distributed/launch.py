"""Real processes over gloo: `launch` of a script, and tests whose body runs on every rank.

A test under `on_ranks(2)` runs in two forked processes of one group, its assertions included. All
such tests of a module share one launch and run in turn (`conftest.py`); one that fails ends that
launch, and the others go on in the next one, so each failure has the name of its test.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist

import forked
from forked import PATHS, TESTS, TORCHRUN
from stepguard.ranks import agreement

__all__ = ["PATHS", "TESTS", "launch", "on_ranks", "run_cases"]

Function = TypeVar("Function", bound=Callable[..., Any])
GROUP_SECONDS = 60
"""How long torch lets a rank wait in a collective."""
FOLDER = "folder"
"""The argument of a test that gets a folder which all ranks share."""
KEEPS_GROUP = "KEEPS_GROUP"
"""Set in a module whose models torch keeps in caches, and through them the group."""


def environment() -> dict[str, str]:
    """The variables of a process that finds the package and the tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}


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
    log = out / "log"
    words = [str(worker), str(out), *arguments]
    if options is None and not forked.FULL:
        log.write_text("")
        code = forked.logged(words, ranks, log, environment(), seconds, imports)
        return code, log.read_text()
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", str(ranks), *(options or ())]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return code, log.read_text()


# --- tests that run on every rank


class Case(NamedTuple):
    """A call that every rank makes."""

    name: str
    function: str
    values: dict[str, Any]


def on_ranks(count: int) -> Callable[[Function], Function]:
    """Run the test's body on so many ranks; it passes if it does on each."""

    def marked(function: Function) -> Function:
        function.ranks = count  # type: ignore[attr-defined]
        return pytest.mark.process(function)

    return marked


def outcome_of(item: pytest.Function, factory: pytest.TempPathFactory) -> str:
    """Why this test of ranks has failed, empty if it passed; runs those that come after it too."""
    ranks = item.function.ranks
    mine = [
        other
        for other in item.session.items
        if isinstance(other, pytest.Function)
        and other.module is item.module
        and getattr(other.function, "ranks", 0) == ranks
    ]
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # two workers may have tests of one module: one of them launches
    shared = base / f"{Path(item.module.__file__).stem}-{ranks}"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = shared / "outcomes.json"
        known: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
        if item.name not in known:
            cases = [_case(other) for other in mine if other.name not in known]
            out = shared / str(len(known))
            out.mkdir()
            module = f"distributed.{Path(item.module.__file__).stem}"
            known |= _outcomes(cases, *run_cases(module, cases, ranks, out))
            kept.write_text(json.dumps(known))
    return known[item.name]


def _case(item: pytest.Function) -> Case:
    callspec = getattr(item, "callspec", None)
    return Case(item.name, item.function.__name__, dict(callspec.params) if callspec else {})


def _outcomes(cases: Sequence[Case], ends: list[list[Any]], said: str) -> dict[str, str]:
    """By test: why it failed. Those after the first failure are not in it."""
    found: dict[str, str] = {}
    for case, by_rank in zip(cases, ends, strict=True):
        failed = [str(why) for why, _ in by_rank if why]
        found[case.name] = "\n".join(failed)
        if failed:
            found[case.name] += f"\n{said[-3000:]}"
            break
    return found


def run_cases(
    module: str,
    cases: Sequence[Case],
    ranks: int,
    out: Path,
    seconds: int = 280,
    group_seconds: int = GROUP_SECONDS,
) -> tuple[list[list[Any]], str]:
    """By case and rank: why it failed, and what it returned; and what the ranks have said."""
    (out / "cases.json").write_text(json.dumps([module, cases, group_seconds]))
    code, said = launch(Path(__file__), out, [], seconds, ranks, imports=("pytest", "scenes"))
    ends: list[list[Any]] = []
    for number in range(len(cases)):
        files = [out / f"{number}.{rank}" for rank in range(ranks)]
        ends.append(
            [
                pickle.loads(file.read_bytes())
                if file.exists()
                else (f"rank {rank} did not arrive at the end", None)
                for rank, file in enumerate(files)
            ]
        )
    if code != 0 and not any(why for end in ends for why, _ in end):
        ends[-1][0] = (f"the ranks ended with exit code {code}", None)
    return ends, said


def main(out: Path) -> None:
    """Run the cases as one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module, cases, seconds = json.loads((out / "cases.json").read_text())
    tests = importlib.import_module(module)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    rank = dist.get_rank()
    for number, case in enumerate(Case(*each) for each in cases):
        # guards are named by attempt and number: those of one test are none of another's business
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        agreement._numbers.clear()
        torch.manual_seed(1234)
        # a rank that hangs says where, before run_cases ends it
        faulthandler.dump_traceback_later(240)
        function = getattr(tests, case.function)
        values = dict(case.values)
        if FOLDER in inspect.signature(function).parameters:
            values[FOLDER] = out / f"folder-{number}"
            values[FOLDER].mkdir(exist_ok=True)
        try:
            found = function(**values)
        except BaseException as error:
            if error.__traceback__ is not None:
                error = error.with_traceback(error.__traceback__.tb_next)
            told = traceback.TracebackException.from_exception(error, capture_locals=True)
            words = f"rank {rank}: {''.join(told.format())}"
            (out / f"{number}.{rank}").write_bytes(pickle.dumps((words[-6000:], None)))
            os._exit(1)
        (out / f"{number}.{rank}").write_bytes(pickle.dumps(("", found)))
        gc.collect()
        dist.barrier()
        faulthandler.cancel_dump_traceback_later()
    if getattr(tests, KEEPS_GROUP, False):
        # a thread of gloo that outlives Python may abort it (process_group.py)
        sys.stdout.flush()
        os._exit(0)
    from process_group import part

    part()


# --- what tests do on ranks


def of_all(value: Any) -> list[Any]:
    """What every rank has given, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning, none shown."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


if __name__ == "__main__":
    main(Path(sys.argv[1]))
