"""What every loop does around a step: progress, numbers of a step, evaluation, saving, Ctrl+C."""

from __future__ import annotations

import json
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from latentDLM_mmdit.pairs import Batch
from latentDLM_mmdit.ranks import equal_weights
from latentDLM_mmdit.session import Session
from stepguard.check.settings import plain, unread
from stepguard.records.codec import dumps

CONDITIONAL = ("training.mode_weights", "training.sequential_schedule", "data.initial_scan_limit")
"""Settings that only another setting asks for."""
ROUNDED_AWAY, TOO_LARGE = 1e-7, 1e-2
"""Lengths of an update against the weights that deserve a line; 1e-4 to 1e-3 is usual."""
LOG = "training_log.jsonl"
VERSIONS = ("stepguard", "torch", "numpy", "hydra-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One optimizer step as it went."""

    loss: float
    norm: float
    parts: dict[str, float]
    committed: bool = True
    clip_factor: float | None = None


@dataclass(slots=True)
class History:
    """What a run leaves behind in memory."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    refused: int = 0


class Loop(ABC):
    """One run. `folder` is where it writes; None writes nothing."""

    def __init__(self, session: Session, folder: Path | None) -> None:
        self.session, self.folder, self.history = session, folder, History()
        self._metrics: TextIO | None = None
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._first: dict[str, float] = {}
        if folder is not None and session.ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            started = len(
                list(folder.glob("run*.json"))
            )  # a resumed run keeps the facts of its earlier starts
            name = f"run-{started + 1}.json" if started else "run.json"
            (folder / name).write_text(
                json.dumps(_facts(session), indent=1) + "\n", encoding="utf-8"
            )
            self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
            if session.config.logging.log_dir is not None:
                _link_log(Path(session.config.logging.log_dir))

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps done, refused ones included."""

    def batches(self) -> Iterator[Batch]:
        return iter(self.session.batches)

    @abstractmethod
    def one_step(self, micro: list[Batch]) -> Done: ...

    @abstractmethod
    def save(self) -> str:
        """Returns what to say."""

    @abstractmethod
    def resume(self, which: str) -> str: ...

    def close(self) -> None:
        """A second time does nothing."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def train(self, *, bar: bool = True) -> History:
        """All steps that are left."""
        session = self.session
        batches = self.batches()
        if self.folder is not None and self.step == 0:
            self.evaluate()  # what a short run has learned shows only beside where it began
        try:
            with tqdm(
                total=session.total_steps,
                initial=self.step,
                disable=not (bar and session.ranks.first),
            ) as shown:
                while self.step < session.total_steps:
                    done = self._one(list(islice(batches, session.parts)))
                    shown.n = self.step  # a rewind takes it back
                    shown.set_postfix(loss=f"{done.loss:.3f}", lr=f"{session.rate:.2e}")
            if self.folder is not None:
                self.say(self.save())
        except KeyboardInterrupt:
            self.say(
                "stopped by Ctrl+C; training.resume goes on from the last state that was saved"
            )
            raise
        finally:
            self.close()
        return self.history

    def _one(self, micro: list[Batch]) -> Done:
        logging, before = self.session.config.logging, self.step
        due = (before + 1) % logging.log_freq == 0
        weights = self._weights() if due else None
        rate, done = self.session.rate, self.one_step(micro)
        self.history.losses.append(done.loss)
        self.history.norms.append(done.norm)
        self.history.refused += not done.committed
        line = {
            "step": before,
            "epoch": self._epoch(),
            "loss": done.loss,
            **done.parts,
            "grad_norm": done.norm,
            "clip_factor": done.clip_factor,
            "lr": rate,
            "committed": done.committed,
            **self.session.seen(),
        }
        if weights is not None:
            ratio = line["update_ratio"] = self._moved(weights)
            self.say(_words(line, self.session.total_steps))
            if done.committed and not ROUNDED_AWAY < ratio < TOO_LARGE:
                self.say(
                    f"  an update of {ratio:.1e} of the weights is "
                    f"{'large' if ratio >= TOO_LARGE else 'rounded away'}"
                )
        self._write(line)
        if (before + 1) % logging.eval_freq == 0:
            self.evaluate()
        return done

    def evaluate(self) -> dict[str, float]:
        """On the first rank; the others wait for it at their next reduction."""
        if not self.session.ranks.first:
            return {}
        if self._evaluated[0] == self.step:
            return self._evaluated[1]
        found = self.session.evaluate()
        self._evaluated = (self.step, found)
        self._first = self._first or (found if self.step == 0 else {})
        self._write({"step": self.step, **found})
        self.say(
            f"eval at step {self.step}: "
            + ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        )
        return found

    def say(self, text: str) -> None:
        if self.session.ranks.first and self.folder is not None:
            tqdm.write(text)

    def _epoch(self) -> int:
        return self.session.batches.position // self.session.batches.per_epoch

    def _write(self, line: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(dumps(line) + "\n")

    def _weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.session.trainer.parameters()]

    def _moved(self, before: list[Tensor]) -> float:
        """Length of the update over the length of the weights."""
        now = [p.detach().float() for p in self.session.trainer.parameters()]
        moved = torch.stack(
            [(a - b.float()).norm() for a, b in zip(now, before, strict=True)]
        ).norm()
        return float(moved / torch.stack([b.float().norm() for b in before]).norm())

    def finish(self, seconds: float) -> dict[str, float]:
        """The last words of a run, and its evaluation."""
        found, world = self.evaluate(), self.session.ranks.world
        equal = world == 1 or equal_weights(self.session.trainer, self.session.ranks)
        if world > 1 and self.session.ranks.first:
            said = "are equal bit for bit" if equal else "DIFFER: this run is lost"
            print(f"weights of {world} processes {said}", flush=True)
        if self.session.ranks.first:
            left = [key for key in unread(self.session.config) if not key.startswith(CONDITIONAL)]
            told = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
            if self._first:
                told += f"; eval_loss was {self._first['eval_loss']:.4f} at the start"
            refused = f"{self.history.refused} of {len(self.history.losses)} steps refused"
            print(
                f"{self.step} steps in {seconds:.0f} s, {refused}; {told}; see {self.folder}",
                flush=True,
            )
            if left:
                print(f"settings that nothing read: {', '.join(left)}", flush=True)
        return found


def run(loop: Loop, *, bar: bool = True) -> Loop:
    """Resume if asked for, train, evaluate."""
    session = loop.session
    resume, training = session.config.training.resume, session.config.training
    try:
        if session.ranks.first:
            said = (
                f"{session.parameters:,} parameters, {training.dtype} {training.precision}, "
                f"{session.ranks.world} "
            )
            print(
                f"{said}processes, {session.total_steps} steps, warm-up {session.warmup}",
                flush=True,
            )
        if resume is not None:
            loop.say(loop.resume(str(resume)))
        began = time.perf_counter()
        loop.train(bar=bar)
        loop.finish(time.perf_counter() - began)
    finally:
        loop.close()
    return loop


def _link_log(folder: Path) -> None:
    """`training_log.jsonl` beside its folder, where the report's plotting lines look for it."""
    link = folder.parent / LOG
    if link.is_symlink() or not link.exists():
        link.unlink(missing_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(folder.name) / LOG)


def run_folder(config: Any, ranks: Any) -> Path | None:
    """`<save_dir>/<run_name>`; a fresh run never shares the folder of an earlier one, a resumed one
    goes on in it.
    """
    logging = config.logging
    if logging.save_dir is None:
        return None
    base = Path(logging.save_dir)
    taken = sorted(base.glob(f"{logging.run_name}/run.json")) + sorted(
        base.glob(f"{logging.run_name}-[0-9]*/run.json"),
        key=lambda path: int(path.parent.name.rpartition("-")[2]),
    )

    def choose() -> str:
        if not taken:
            return str(base / logging.run_name)
        if config.training.resume is not None:
            return str(taken[-1].parent)
        last = taken[-1].parent.name.removeprefix(logging.run_name).lstrip("-")
        return str(base / f"{logging.run_name}-{int(last or 1) + 1}")

    return Path(ranks.told(choose))


def _facts(session: Session) -> dict[str, Any]:
    """How to get the same run again."""
    return {
        "command": sys.argv,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in VERSIONS},
        },
        "seed": session.config.training.seed,
        "processes": session.ranks.world,
        "device": str(session.ranks.device),
        "parameters": session.parameters,
        "config": plain(session.config),
    }


def _words(line: dict[str, Any], total: int) -> str:
    names = (
        "loss",
        "text_loss",
        "latent_loss",
        "grad_norm",
        "clip_factor",
        "update_ratio",
        "latent_norm",
        "predicted_norm",
    )
    told = " ".join(f"{name} {line[name]:.4g}" for name in names if line.get(name) is not None)
    return f"step {line['step'] + 1}/{total} {told} lr {line['lr']:.2e}"
