"""The checkpoint: whole and finite, of this model, and written by the code that would run now."""

from __future__ import annotations

import platform

import torch

from stepguard import __version__
from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import (
    Answer,
    NotApplicable,
    NotGiven,
    failed,
    listed,
    passed,
    warned,
)
from stepguard.report.phrases import count, first_few, size

PREFIXES = ("module.", "_orig_mod.")
"""Put before every name by DistributedDataParallel and by torch.compile."""


@item("checkpoint.sound", "the checkpoint is whole and finite")
def sound(run: Inspection) -> Answer:
    found = run.verified
    said = f"{found.format}: {count(found.tensors, 'tensor')}, {size(found.bytes)}"
    more = f"stepguard verify {run.subject.checkpoint} lists everything."
    if found.errors:
        return failed(
            f"{said}; {count(len(found.errors), 'problem')}: {first_few(found.errors, 2)}",
            fix=f"Do not resume from it; {more}",
        )
    if found.warnings:
        return warned(f"{said}; {first_few(found.warnings, 2)}", fix=more)
    return passed(f"{said}, whole and finite")


@item("checkpoint.fits", "the checkpoint fits the model")
def fits(run: Inspection) -> Answer:
    stored = run.checkpoint
    if not stored.shapes:
        raise NotApplicable(
            f"{stored.path.name} holds no model state that can be read "
            f"({first_few(stored.unread, 1) or 'empty'})"
        )
    had = {_bare(name): shape for name, shape in stored.shapes.items()}
    wanted = {}
    for name, tensor in run.model.state_dict().items():
        # Modules may keep objects that are not tensors in their state (get_extra_state).
        if hasattr(tensor, "shape"):
            wanted[_bare(name)] = tuple(tensor.shape)
    said = listed("missing", sorted(wanted.keys() - had.keys()))
    said += listed("not in the model", sorted(had.keys() - wanted.keys()))
    other = []
    for name in sorted(wanted.keys() & had.keys()):
        if wanted[name] != had[name]:
            other.append(f"{name} {had[name]} for {wanted[name]}")
    if other:
        said.append(f"{first_few(other, 2)}: other shape")
    if not said:
        return passed(
            f"{count(len(wanted), 'tensor')} of {stored.path.name} match the model in name and "
            "shape"
        )
    return failed(
        *said, fix="Build the model with the settings of the checkpoint; strict=False hides this."
    )


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


@item("code.current", "code and versions in use")
def code_current(run: Inspection) -> Answer:
    now = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "stepguard": __version__,
    }
    said = [", ".join(f"{name} {version}" for name, version in now.items())]
    try:
        times = sorted(run.traced_step.ops.items())
        listed = ", ".join(f"{name} ({number})" for name, number in times)
        said.append(f"the step runs {listed or 'no exponential, logarithm, root or softmax'}")
    except NotGiven:
        pass
    try:
        then = run.checkpoint.versions
    except NotGiven:
        then = {}
    other = []
    for name, version in now.items():
        if str(then.get(name, version)) != version:
            other.append(f"{name} {then[name]} -> {version}")
    if not other:
        return passed(*said)
    return warned(
        *said,
        f"since the checkpoint: {', '.join(other)}",
        fix="Resume with the versions of the checkpoint, or start with a short comparison of the "
        "loss.",
    )
