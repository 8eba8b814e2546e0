"""A log for `tail -f` and grep, and one JSON object a step for a quick plot.

`train_<time>.log` is this run's log, `latest.log` a link to the newest, `training_log.jsonl`
continues over restarts. Every line is written out before the next step starts, so a crash can lose
at most the line being written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from stepguard.records import Incident, Origin, Reading, Sink
from stepguard.records.codec import dumps
from stepguard.records.linefile import LineFile
from stepguard.records.place import place
from stepguard.report import messages, phrases
from stepguard.report.decision_words import ACTION_WORDS, budget

LATEST = "latest.log"
STEPS = "training_log.jsonl"
STAMP = "%Y%m%d-%H%M%S"

_LOSS_KINDS = ("nonfinite_loss", "nonfinite_input")
_GRADIENT_KINDS = ("nonfinite_gradient", "infinite_norm", "scaler_collapse")


class HumanLog(Sink):
    """Written by rank 0; on other ranks every method does nothing (their journals have it all)."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int = 0,
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.folder = Path(folder)
        self._clock = clock
        self._log: LineFile | None = None
        self._steps: LineFile | None = None
        if rank == 0:
            self._open()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = _unused_path(self.folder, self._clock().strftime(STAMP))
        self._log = LineFile(self.path)
        point_link(self.folder / LATEST, self.path.name)
        drop_torn_line(self.folder / STEPS)
        self._steps = LineFile(self.folder / STEPS)

    def step(self, reading: Reading, committed: bool = True) -> None:
        """One line a step, and one JSON object whose `loss` is null where it is not finite."""
        self.line(step_line(reading, committed=committed))
        if self._steps is not None:
            self._steps.append((dumps(self._object(reading, committed)) + "\n").encode())

    def _object(self, reading: Reading, committed: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": reading.step, "loss": reading.loss}
        if reading.components:
            fields["components"] = reading.components
        if reading.followed:
            fields["followed"] = reading.followed
        return {
            **fields,
            "grad_norm": reading.grad_norm,
            "lr": list(reading.lr),
            "seconds": reading.seconds,
            "committed": committed,
            "time": self._clock().isoformat(timespec="seconds"),
        }

    def incident(self, incident: Incident) -> None:
        """The ERROR lines: what is invalid, its parts, where and why, and what is done about it."""
        for text in error_lines(incident):
            self.line(text)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one line; other lines of the journal than notes and faults are for programs."""
        if kind == "fault":
            self.line(messages.disarmed(fields))
        elif kind == "note":
            title = phrases.verdict_title(str(fields.get("kind")))
            self.line(f"note at step {fields.get('step')}: {title}: {fields.get('summary')}")

    def line(self, text: str) -> None:
        """Any line, for instance `Checking model parameters before epoch 15...`."""
        if self._log is not None:
            self._log.append((text.replace("\n", "\n  ") + "\n").encode(errors="replace"))

    def close(self) -> None:
        for file in (self._log, self._steps):
            if file is not None:
                file.close()
        self._log = self._steps = None

    def __enter__(self) -> HumanLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step_line(reading: Reading, *, committed: bool = True) -> str:
    """`step 12 loss 2.3412 grad_norm 0.91 lr 1.00e-04 0.21s`."""
    words = [f"step {reading.step}"]
    if reading.loss is not None:
        digits = ".4f" if abs(reading.loss) < 1e6 else ".4e"
        words.append(f"loss {reading.loss:{digits}}")
    for name, value in reading.components.items():
        words.append(f"{name} {value:.4f}")
    if reading.grad_norm is not None:
        words.append(f"grad_norm {_norm(reading.grad_norm)}")
    if reading.lr:
        words.append(f"lr {phrases.rates(reading.lr)}")
    for name, value in reading.followed.items():
        words.append(f"{name} {phrases.number(value)}")
    if reading.seconds is not None:
        words.append(f"{reading.seconds:.2f}s")
    if not committed:
        words.append("(not committed)")
    return " ".join(words)


def _norm(norm: float) -> str:
    readable = not phrases.finite(norm) or norm == 0 or 0.1 <= norm < 1e6
    return f"{norm:.2f}" if readable else f"{norm:.2e}"


def error_lines(incident: Incident) -> Iterator[str]:
    """Yield the lines about one bad step, at least one of which starts with ERROR."""
    yield from _headline(incident)
    if incident.origin is not None:
        yield from _origin_lines(incident.origin, len(incident.reading.micro_losses))
    if incident.findings:
        yield f"  cause: {incident.findings[0].code} {incident.findings[0].title}"
    if incident.reading.lr:
        rates = phrases.rates(incident.reading.lr, incident.reading.schedule)
        yield f"  lr: {rates}"
    if incident.decision is not None:
        yield ACTION_WORDS[incident.decision.action].log
        used = f"  {budget(incident.decision)}"
        if incident.decision.reason:
            used += f": {incident.decision.reason}"
        yield used


def _origin_lines(origin: Origin, micro_batches: int) -> Iterator[str]:
    where = f"  origin: {origin.phase} {place(origin)}".rstrip()
    culprits = phrases.culprits(origin, micro_batches)
    if culprits:
        where += f", {culprits}"
    yield where
    if origin.output is not None:
        yield f"  output: {phrases.operand(origin.output)}"


def _headline(incident: Incident) -> Iterator[str]:
    reading = incident.reading
    kind = incident.verdict.kind
    step = incident.step
    if kind in _LOSS_KINDS:
        yield f"ERROR: Invalid loss at step {step}: {reading.loss}"
        for name, value in reading.components.items():
            yield f"  {name}: {value}"
    elif kind in _GRADIENT_KINDS:
        yield f"ERROR: NaN/Inf gradient norm at step {step}"
        yield f"ERROR: Invalid gradient norm: {reading.grad_norm}"
    else:
        yield f"ERROR: {phrases.verdict_title(kind)} at step {step}"
    if incident.verdict.summary:
        yield f"  {incident.verdict.summary}"


def _unused_path(folder: Path, stamp: str) -> Path:
    """Two runs that start within one second do not write into the same file."""
    path = folder / f"train_{stamp}.log"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"train_{stamp}-{number}.log"
    return path


def point_link(link: Path, target: str) -> None:
    """Make `link` name `target` in one step: a reader sees the old or the new one, never none."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target)
        fresh.replace(link)
    except OSError:
        # A filesystem without links still gets its log, only without the short name.
        fresh.unlink(missing_ok=True)


def drop_torn_line(path: Path) -> None:
    """A crash may have left half a line; readers of this file expect every line to be whole."""
    if not path.exists():
        return
    # Searched backwards in small blocks: the file grows over all restarts of a run.
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end != size:
            file.truncate(end)
