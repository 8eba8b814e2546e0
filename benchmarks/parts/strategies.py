"""What people do about a bad step: nothing, `continue`, reload the newest finite checkpoint, or a
guard.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import stepguard
from benchmarks.parts.bad_moments import AT, MOMENTS, Moment, Run, begin

EVERY = 25
"""Steps between two checkpoints of those who keep some."""
Strategy = Callable[[Moment, int, int], tuple[float, str]]
"""Of a moment, a seed and a number of batches: the loss on held-out data, and what was done in
words.
"""


def do_nothing(moment: Moment, seed: int, steps: int) -> tuple[float, str]:
    run = begin(moment, seed, steps)
    for step in range(steps):
        _befall(run, step)
        _gradients(run, step)
        run.optimizer.step()
    return run.held_out(), ""


def plain_continue(moment: Moment, seed: int, steps: int) -> tuple[float, str]:
    """`if not torch.isfinite(loss): continue`, and the same for the gradients."""
    run, left_out = begin(moment, seed, steps), 0
    for step in range(steps):
        _befall(run, step)
        if not _gradients(run, step):
            left_out += 1
            continue
        run.optimizer.step()
    return run.held_out(), f"{left_out} left out"


def newest_finite(moment: Moment, seed: int, steps: int) -> tuple[float, str]:
    """`torch.save` every 25 steps if the weights are finite; a bad loss loads the newest, and the
    data go on.

    Where the launcher restarts the run instead, the data begin again at the checkpoint.
    """
    reloads, step = 0, 0
    with tempfile.TemporaryDirectory(prefix="stepguard-moments-") as folder, _disk(moment) as fill:
        run, newest = begin(moment, seed, steps), Path(folder) / "newest.pt"
        _keep(run, 0, newest)
        while step < steps:
            if moment.full_disk and step == AT:
                fill()
            _befall(run, step)
            if step % EVERY == 0 and all(bool(p.isfinite().all()) for p in run.model.parameters()):
                _keep(run, step, newest)
            if _gradients(run, step):
                run.optimizer.step()
            else:
                back = _load(run, newest)
                reloads += 1
                if moment.restarts:
                    if reloads > moment.restarts:
                        return run.held_out(), f"dead after {moment.restarts} restarts"
                    step = back
                    continue
            step += 1
    return run.held_out(), f"{reloads} reloads"


def guarded(moment: Moment, seed: int, steps: int) -> tuple[float, str]:
    """`guard.step` with default settings and a run folder; restarted where a launcher would."""
    said: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="stepguard-moments-") as folder, _disk(moment) as fill:
        for attempt in range(moment.restarts + 1):
            run = begin(moment, seed, steps)
            if _attempt(run, Path(folder), attempt, steps, said, fill):
                break
    done = ", ".join(f"{count} x {action}" for action, count in said.items())
    return run.held_out(), done


def _attempt(
    run: Run, folder: Path, attempt: int, steps: int, said: Counter[str], fill: Callable[[], None]
) -> bool:
    """One process's part of the run. True when it came to its end."""
    config = stepguard.GuardConfig(
        terminal="quiet",
        run_dir=folder,
        checkpoint_every=EVERY,
        probes=stepguard.Probes(anomalies="act" if run.moment.acts else "note"),
    )
    with stepguard.Guard(run.model, run.optimizer, config=config) as guard:
        first = guard.restore() if attempt else 0
        try:
            for step in range(first, steps):
                if run.moment.full_disk and step == AT:
                    fill()
                if not attempt:
                    _befall(run, step)
                guard.step(run.loss, run.batch(step))
            return True
        except stepguard.TrainingHalted:
            return False
        finally:
            said.update(i.decision.action for i in guard.incidents if i.decision is not None)


STRATEGIES: dict[str, Strategy] = {
    "stepguard": guarded,
    "continue": plain_continue,
    "do nothing": do_nothing,
    "newest finite": newest_finite,
}


def all_of(moment: Moment, seed: int, steps: int) -> dict[str, tuple[float, str]]:
    """Every strategy on the same run: how it ended."""
    return {name: strategy(moment, seed, steps) for name, strategy in STRATEGIES.items()}


def in_a_child(moment: Moment, seed: int, steps: int) -> dict[str, tuple[float, str]]:
    """The same in a process of its own: a limit on the size of files holds for all that a process
    writes.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.parts.strategies",
        moment.name,
        str(seed),
        str(steps),
    ]
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=root, timeout=600
    )
    return {name: (loss, done) for name, (loss, done) in json.loads(ended.stdout).items()}


def _befall(run: Run, step: int) -> None:
    if step == AT:
        run.moment.harm(run)


def _gradients(run: Run, step: int) -> bool:
    """Forward and backward; is everything finite?"""
    run.optimizer.zero_grad()
    loss = run.loss(run.batch(step))
    torch.autograd.backward(loss)
    found = [p.grad for p in run.model.parameters() if p.grad is not None]
    return bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in found)


def _keep(run: Run, step: int, path: Path) -> None:
    """Through a sibling, as careful people do; a full disk keeps the older one."""
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "step": step}
    fresh = path.with_suffix(".new")
    try:
        torch.save(state, fresh)
        fresh.replace(path)
    except (OSError, RuntimeError):
        fresh.unlink(missing_ok=True)


def _load(run: Run, path: Path) -> int:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


@contextmanager
def _disk(moment: Moment) -> Iterator[Callable[[], None]]:
    """A disk that takes nothing more once the function given is called: no file may grow, and
    writing says so.
    """
    if not moment.full_disk:
        yield lambda: None
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked, of_seed, batches = sys.argv[1:]
    chosen = next(moment for moment in MOMENTS if moment.name == asked)
    print(json.dumps(all_of(chosen, int(of_seed), int(batches))))
