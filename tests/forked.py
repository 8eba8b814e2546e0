"""`python WORDS`, and ranks of it, forked from a process that has imported torch.

The import is most of what a short process costs. Every run of the tests has one such server
(`fork_server.py`), started when it is first needed. With STEPGUARD_FULL=1 the processes are fresh.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import stepguard

FULL = os.environ.get("STEPGUARD_FULL", "") not in ("", "0")
"""Everything at full length: see CONTRIBUTING.md."""
DOCUMENTED = FULL or os.environ.get("STEPGUARD_DOCUMENTED", "") not in ("", "0")
"""Also what guards a documented command and takes long, as `.ci/run` wants it."""
TESTS = Path(__file__).parent
PATHS = [str(Path(stepguard.__file__).parents[1]), str(TESTS), str(TESTS.parent)]
"""The package, the tests and the benchmarks, for processes of their own."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
_server: list[subprocess.Popen[str]] = []


def python(
    words: Sequence[str],
    *,
    folder: Path | str | None = None,
    variables: dict[str, str] | None = None,
    given: str | None = None,
    seconds: float = 120,
    imports: Sequence[str] = (),
    ranks: int = 0,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """How `python WORDS` ended, and what it printed: `subprocess.run` of a script, -m or -c.

    `given` is what it reads; `imports` are modules that the server keeps for others, too; `ranks`
    of it run at once, as torchrun runs them. `fresh` is for a test of the start itself; variables
    that Python reads when it starts imply it.
    """
    variables = dict(os.environ) if variables is None else variables
    launcher = [*TORCHRUN, "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, *words]
    read = {name for name in variables if name.startswith("PYTHON") and name != "PYTHONPATH"}
    if FULL or fresh or any(variables[name] != os.environ.get(name) for name in read):
        return subprocess.run(
            command,
            cwd=folder,
            env=variables,
            input=given,
            capture_output=True,
            encoding="utf-8",
            timeout=seconds,
        )
    with tempfile.TemporaryDirectory(prefix="stepguard-forked-") as kept:
        files = [os.devnull, f"{kept}/out", f"{kept}/err"]
        if given is not None:
            files[0] = f"{kept}/given"
            Path(files[0]).write_text(given, encoding="utf-8")
        code = _ask(words, files, folder, variables, seconds, count=ranks, imports=imports)
        out, err = (Path(file).read_text(encoding="utf-8") for file in files[1:])
    if code is None:
        raise subprocess.TimeoutExpired(command, seconds, out, err)
    return subprocess.CompletedProcess(command, code, out, err)


def logged(
    words: Sequence[str],
    ranks: int,
    log: Path,
    variables: dict[str, str],
    seconds: float,
    imports: Sequence[str] = (),
) -> int | None:
    """Exit code of the ranks of `python WORDS`, which write to `log`; None: killed."""
    files = [os.devnull, str(log), str(log)]
    return _ask(words, files, None, variables, seconds, count=ranks, imports=imports)


def _ask(
    words: Sequence[str],
    files: list[str],
    folder: Path | str | None,
    variables: dict[str, str],
    seconds: float,
    *,
    count: int = 0,
    imports: Sequence[str] = (),
) -> int | None:
    asked = {
        "words": list(map(str, words)),
        "files": files,
        "folder": str(folder or Path.cwd()),
        "variables": variables,
        "ranks": count,
        "imports": list(imports),
    }
    server = _started()
    assert server.stdin is not None and server.stdout is not None
    child = 0
    try:
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        child = int(server.stdout.readline())
        ended, _, _ = select.select([server.stdout], [], [], seconds)
        if not ended:
            os.killpg(child, signal.SIGKILL)
        code = int(server.stdout.readline())
    except BaseException:
        # a test that ran out of time leaves an answer unread: the next one gets another server
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        _server.remove(server)
        server.kill()
        server.communicate()
        raise
    return code if ended else None


def _started() -> subprocess.Popen[str]:
    if not _server:
        _server.append(
            subprocess.Popen(
                [sys.executable, "-c", "import fork_server; fork_server.serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                cwd=TESTS,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        )
    return _server[0]


@atexit.register
def _stop() -> None:
    for server in _server:
        server.communicate()
