"""Replay a capsule: the same step, in a fresh process or on another machine, with the same origin.

The capsule holds no code. Model, optimizer and loss come from the user's own program: a build
function, or the script that was running, executed up to its first guarded step. Either must lie
below the current directory, and neither beside a capsule or a journal: a capsule can name code, it
cannot bring it. Code that a capsule names is run without a question only if this user has written
the capsule here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stepguard._errors import CapsuleError
from stepguard.diagnose import RunFacts, diagnose
from stepguard.engine.context import Context
from stepguard.engine.incident.tried_remedies import try_remedies
from stepguard.engine.interception import StepTaken, taking
from stepguard.locate import locate
from stepguard.locate.exception_origin import place_replayed_exception
from stepguard.locate.locate_budget import LocateBudget
from stepguard.records import Evidence, Incident, Origin, Reading, Verdict
from stepguard.records.verdict import VerdictKind
from stepguard.run.script import as_main
from stepguard.state.buffers import BufferKeeper
from stepguard.state.capsule import Capsule, read_capsule
from stepguard.state.importing import Check, find_module, import_function, importable, inside
from stepguard.state.replay import rerun
from stepguard.state.step import LossFn, Step, unwrapped

SAME_LOSS = 1e-4
"""Other kernels and thread counts round differently; a loss that far apart is another one."""
MOST_STEPS = 100
"""Guarded steps that may pass before one fits the capsule: a GAN has two guards."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
RECORDS = ("journal*.jsonl", "capsule.json", "window.json", "seal.json")
"""Files of folders that people send each other: no code of a project is kept beside them."""
MOST_RUNS = 1000.0
"""Runs of the step that trying the fixes may take: nothing waits for it here."""

Inspect = Callable[[Step, Incident], None]
Confirm = Callable[[str], bool]
"""Asked with what would be run, for a capsule that was not made here."""


def replay(
    capsule: str | Path,
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    inspect: Inspect | None = None,
    confirm: Confirm = lambda command: False,
) -> Incident:
    """Run the bad step again and locate its first harmful value. Raises CapsuleError.

        incident = stepguard.replay("runs/a/incidents/00000048-nonfinite_loss", script="train.py")

    This runs code: `build` or `script` where given, else what the capsule names. `confirm` is asked
    before code that a capsule of somebody else, another machine or another folder names.
    `inspect` is called with the step and the incident while the script's objects are still alive.
    """
    content = read_capsule(Path(capsule))
    again = CapsuleReplay(content, inspect)
    if callable(build):
        return again.from_built(build())
    if build is not None:
        with importable():
            return again.from_built(import_function(build, CapsuleError)())
    if script is not None:
        return again.from_script(script, None)
    check: Check = lambda path: None  # noqa: E731
    if not content.made_here:
        check = partial(_refuse_brought, content)
        if content.command and not confirm(content.command):
            raise CapsuleError(
                f"{content.folder} was not made by you, on this machine, in this folder, and names "
                f"code to run: {content.command}. Look at it, then pass --yes, or name the code "
                "yourself with --script or --build (script=, build=)."
            )
    if content.build is not None:
        with importable():
            return again.from_built(import_function(content.build, CapsuleError, check)())
    if content.script is None:
        raise CapsuleError(
            f"{content.folder} names neither a script nor a build function; pass "
            "script='train.py', or build='module:function' that returns (model, optimizer, "
            "loss_fn)."
        )
    return again.from_script(content.script, content.module, check)


class CapsuleReplay:
    """Replays one capsule with the objects of the user's program."""

    def __init__(self, capsule: Capsule, inspect: Inspect | None) -> None:
        self.capsule = capsule
        self._inspect = inspect
        self._decoded = capsule.decoded()
        self._found: Incident | None = None
        self._offers = 0
        self._seen: list[Context] = []
        """Of the script's guards."""
        self._why_not = ""

    def from_built(self, built: Any) -> Incident:
        """Replay with what a build function returned."""
        what = ""
        if not isinstance(built, tuple):
            what = type(built).__name__
        elif len(built) not in (3, 4) or not isinstance(built[0], nn.Module):
            what = f"a tuple of {len(built)}"
        if what:
            raise CapsuleError(
                f"the build function returned {what}; return (model, optimizer, loss_fn)."
            )
        model, optimizer, loss_fn, *modules = built
        return self._run(model, optimizer, loss_fn, modules[0] if modules else {})

    def from_script(
        self, script: str, module: str | None, check: Check = lambda path: None
    ) -> Incident:
        """Run the script up to a guarded step that fits, and replay with its objects."""
        path = _below_here(Path(script))
        check(path)
        if module is not None:
            with importable():
                files = find_module(module, module, CapsuleError, check)
            if files != [path]:
                raise CapsuleError(
                    f"{self.capsule.folder} names the script {script} and the module {module}, "
                    "which is another file; pass script= or build=."
                )
        program = as_main(module or script, self.capsule.arguments, module=module is not None)
        grad = torch.is_grad_enabled()
        try:
            with program as start, taking(self._take):
                self._start(start, path.name)
        finally:
            torch.set_grad_enabled(grad)
            # The script ends here without having closed its guards.
            for context in self._seen:
                context.resources.close()
        if self._found is None:
            why = self._why_not or "it ended without calling guard.step"
            raise CapsuleError(
                f"{path.name} gave nothing to run the capsule with: {why}; pass script= or build=."
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
        """Take the first step whose model and optimizer fit the capsule."""
        self._offers += 1
        if not any(context is one for one in self._seen):
            self._seen.append(context)
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
        """Fill the objects with the capsule's state, replay and locate."""
        capsule = self.capsule
        reading, batches, rng = self._decoded
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
        summary = str(capsule.facts.get("summary", ""))
        verdict = Verdict(kind=kind, severity="incident", summary=summary)
        incident = Incident(
            id=f"{reading.step:08d}-replay", step=reading.step, verdict=verdict, reading=reading
        )
        incident = replace(incident, origin=_found(step, incident), capsule=str(capsule.folder))
        incident = replace(incident, findings=diagnose(incident, RunFacts()))
        budget = LocateBudget(steps=MOST_RUNS)
        budget.begin(on_host=True)
        incident = try_remedies(incident, step, RunFacts(), budget)
        if self._inspect is not None:
            self._inspect(step, incident)
        return incident


def _found(step: Step, incident: Incident) -> Origin:
    """Where the bad value is born; of a finite step, whether its loss is the same again."""
    if incident.verdict.kind == "exception":
        return place_replayed_exception(step)
    if incident.verdict.finite_anomaly:
        return _compared(step, incident.reading)
    return locate(step, incident.reading)


def _compared(step: Step, reading: Reading) -> Origin:
    """Nothing is non-finite here, so the replay shows the loss: that is what was wrong with it."""
    losses = rerun(step).losses
    now = math.fsum(losses)
    told = "the replay gives loss"
    same = reading.loss is not None and math.isclose(now, reading.loss, rel_tol=SAME_LOSS)
    if now == reading.loss:
        remark = f"{told} {now:.9g}, the same to the last bit"
    elif reading.loss is None:
        remark = f"{told} {now:.9g}; that of the step was not seen"
    else:
        remark = f"{told} {now:.9g}, in training it was {reading.loss:.9g}"
    departs = None if same else remark
    return Origin(
        step=step.index,
        phase="loss",
        method="rerun",
        reproduced=same,
        evidence=Evidence(departs=departs),
        remarks=(remark,) if same else (),
    )


def _refuse_brought(capsule: Capsule, path: Path) -> None:
    """Raise for code that came with a capsule or a run, or that is installed."""
    resolved = path.resolve()
    folder = capsule.folder.resolve()
    # incidents/<id>/capsule of a run
    run = folder.parents[2] if folder.parent.parent.name == "incidents" else folder
    here = Path.cwd()
    between = [here, *(up for up in resolved.parents if up.is_relative_to(here))]
    beside = any(any(up.glob(name)) for up in between for name in RECORDS)
    if INSTALLED.intersection(resolved.parts) or resolved.is_relative_to(run) or beside:
        raise CapsuleError(
            f"{path} is not code of your project: it is installed, or lies in the folder of a run "
            "or a capsule. To run it all the same, name it with --script or --build."
        )


def _below_here(path: Path) -> Path:
    """A capsule may name code of the user's project, nothing else on the machine."""
    resolved = inside(path, str(path), CapsuleError)
    if not resolved.is_file():
        raise CapsuleError(
            f"{path} does not exist here; run this in the project's folder, or pass script= or "
            f"build=."
        )
    return resolved
