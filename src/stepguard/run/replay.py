"""Running a capsule again: the same step, in a fresh process, on another machine, with the same
origin.

The capsule holds no code. Model, optimizer and loss come from the user's own program: a build
function, or the script that was running, executed up to its first guarded step. Either must lie
below the current directory: a capsule can name it, but cannot bring it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stepguard._errors import CapsuleError
from stepguard.diagnose import RunFacts, diagnose
from stepguard.engine.context import Context
from stepguard.engine.interception import StepTaken, taking
from stepguard.locate import locate
from stepguard.locate.exception_origin import place_replayed_exception
from stepguard.records import Incident, Verdict
from stepguard.records.verdict import VerdictKind
from stepguard.run.script import as_main
from stepguard.state.buffers import BufferKeeper
from stepguard.state.capsule import Capsule, read_capsule
from stepguard.state.importing import find_module, import_function, importable, inside
from stepguard.state.step import LossFn, Step, unwrapped

MOST_STEPS = 100
"""Guarded steps of a script that may pass before one belongs to the capsule (a GAN has two guards).
"""

Inspect = Callable[[Step, Incident], None]


def replay(
    capsule: str | Path,
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    inspect: Inspect | None = None,
) -> Incident:
    """Run the bad step again and say where its first harmful value is born. Raises CapsuleError
    with the way out.

    `inspect` is called with the step and the incident while the script's objects are still alive.
    """
    again = _Again(read_capsule(Path(capsule)), inspect)
    if callable(build):
        return again.from_built(build())
    if build is not None or (script is None and again.capsule.build is not None):
        with importable():
            return again.from_built(
                import_function(build or str(again.capsule.build), CapsuleError)()
            )
    module = again.capsule.module if script is None else None
    script = script or again.capsule.script
    if script is None:
        raise CapsuleError(
            f"{again.capsule.folder} names neither a script nor a build function; pass "
            f"script='train.py', or "
            "build='module:function' that returns (model, optimizer, loss_fn)."
        )
    return again.from_script(script, module)


class _Again:
    """One capsule on its way to an incident."""

    def __init__(self, capsule: Capsule, inspect: Inspect | None) -> None:
        self.capsule, self._inspect = capsule, inspect
        self._decoded = capsule.decoded()
        self._found: Incident | None = None
        self._offers, self._why_not = 0, ""

    def from_built(self, built: Any) -> Incident:
        if not (
            isinstance(built, tuple) and len(built) in (3, 4) and isinstance(built[0], nn.Module)
        ):
            what = f"a tuple of {len(built)}" if isinstance(built, tuple) else type(built).__name__
            raise CapsuleError(
                f"the build function returned {what}; return (model, optimizer, loss_fn)."
            )
        model, optimizer, loss_fn, *modules = built
        return self._run(model, optimizer, loss_fn, modules[0] if modules else {})

    def from_script(self, script: str, module: str | None) -> Incident:
        path = _below_here(Path(script))
        if module is not None:
            with importable():
                find_module(module, module, CapsuleError)
        grad = torch.is_grad_enabled()
        try:
            with (
                as_main(
                    module or script, self.capsule.arguments, module=module is not None
                ) as start,
                taking(self._take),
            ):
                self._start(start, path.name)
        finally:
            torch.set_grad_enabled(grad)
        if self._found is None:
            raise CapsuleError(
                f"{path.name} gave nothing to run the capsule with: "
                + (self._why_not or "it ended without calling guard.step")
                + "; pass script= or build=."
            )
        return self._found

    def _start(self, start: Callable[[], None], name: str) -> None:
        try:
            start()
        except StepTaken:
            return
        except CapsuleError:
            raise
        except SystemExit as ending:
            self._why_not = self._why_not or f"it ended with exit code {ending.code!r}"
        except Exception as fault:
            raise CapsuleError(
                f"{name} failed before its step could be taken: {type(fault).__name__}: {fault}"
            ) from fault

    def _take(self, context: Context, loss_fn: LossFn) -> bool:
        """The first step whose model and optimizer are those of the capsule."""
        self._offers += 1
        why_not = self.capsule.fits(context.roots, context.optimizer)
        if why_not and self._offers < MOST_STEPS:
            self._why_not = why_not
            return False
        if not why_not:
            self._found = self._run(context.model, context.optimizer, loss_fn, context.modules)
        return True

    def _run(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        modules: Mapping[str, nn.Module],
    ) -> Incident:
        """Fill the objects with the capsule's state and look."""
        capsule, (reading, batches, rng) = self.capsule, self._decoded
        roots = {"": unwrapped(model), **modules}
        capsule.fill(roots, optimizer)
        buffers = BufferKeeper(roots.values())
        buffers.remember()
        step = Step(
            index=reading.step,
            model=model,
            optimizer=optimizer,
            modules=dict(modules),
            buffers=buffers,
            loss_fn=loss_fn,
            micro_batches=batches,
            rng=rng,
            scale=float(capsule.facts["scale"]),
            clip_norm=capsule.facts["clip_norm"],
        )
        kind: VerdictKind = capsule.facts["verdict"]
        verdict = Verdict(
            kind=kind, severity="incident", summary=str(capsule.facts.get("summary", ""))
        )
        incident = Incident(
            id=f"{reading.step:08d}-replay", step=reading.step, verdict=verdict, reading=reading
        )
        found = place_replayed_exception(step) if kind == "exception" else locate(step, reading)
        incident = replace(incident, origin=found, capsule=str(capsule.folder))
        incident = replace(incident, findings=diagnose(incident, RunFacts()))
        if self._inspect is not None:
            self._inspect(step, incident)
        return incident


def _below_here(path: Path) -> Path:
    """A capsule may name code of the user's project, nothing else on the machine."""
    resolved = inside(path, str(path), CapsuleError)
    if not resolved.is_file():
        raise CapsuleError(
            f"{path} does not exist here; run this in the project's folder, or pass script= or "
            f"build=."
        )
    return resolved
