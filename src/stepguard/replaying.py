"""Running a capsule again: the same step, in a fresh process, on another machine, with the same origin.

The capsule holds no code. Model, optimizer and loss come from the user's own program: a build function, or the script
that was running, executed up to its first guarded step. Either must lie below the current directory: a capsule can
name it, but cannot bring it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard._errors import CapsuleError
from stepguard.diagnose import RunFacts, diagnose
from stepguard.engine.context import Context
from stepguard.engine.intercept import StepTaken, taking
from stepguard.engine.script import as_main
from stepguard.locate import locate
from stepguard.records import Incident, Verdict
from stepguard.records.verdict import VerdictKind
from stepguard.state.buffers import BufferKeeper
from stepguard.state.capsule import Capsule, read_capsule
from stepguard.state.step import LossFn, Step, unwrapped


def replay(capsule: str | Path, *, build: str | Callable[[], Any] | None = None, script: str | None = None) -> Incident:
    """Run the bad step again and say where its first harmful value is born. Raises CapsuleError with the way out."""
    opened = read_capsule(Path(capsule))
    if callable(build):
        return _from_built(opened, build())
    if build is None and script is None:
        build, script = opened.build, opened.script
    if build is not None:
        return _from_built(opened, _import(build)())
    if script is None:
        raise CapsuleError(
            f"{opened.folder} names neither a script nor a build function; pass script='train.py', or "
            "build='module:function' that returns (model, optimizer, loss_fn)."
        )
    return _from_script(opened, script)


def _from_built(capsule: Capsule, built: Any) -> Incident:
    if not (isinstance(built, tuple) and len(built) in (3, 4) and isinstance(built[0], nn.Module)):
        raise CapsuleError(f"the build function returned {type(built).__name__}; return (model, optimizer, loss_fn).")
    model, optimizer, loss_fn = built[:3]
    modules = built[3] if len(built) == 4 else {}
    return _run(capsule, model, optimizer, loss_fn, modules)


def _from_script(capsule: Capsule, script: str) -> Incident:
    path = _below_here(Path(script))
    found: list[Incident] = []

    def take(context: Context, loss_fn: LossFn) -> None:
        found.append(_run(capsule, context.model, context.optimizer, loss_fn, context.modules))

    grad = torch.is_grad_enabled()
    try:
        with as_main(script, capsule.arguments) as start, taking(take), suppress(StepTaken):
            start()
    finally:
        torch.set_grad_enabled(grad)
    if not found:
        raise CapsuleError(
            f"{path.name} ended without calling guard.step, so there was nothing to run the capsule with."
        )
    return found[0]


def _run(
    capsule: Capsule, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, modules: Mapping[str, nn.Module]
) -> Incident:
    """Fill the objects with the capsule's state and look."""
    roots = {"": unwrapped(model), **modules}
    capsule.fill(roots)
    _fill_optimizer(capsule, optimizer)
    buffers = BufferKeeper(roots.values())
    buffers.remember()
    reading = capsule.reading
    step = Step(
        index=reading.step,
        model=model,
        optimizer=optimizer,
        modules=dict(modules),
        buffers=buffers,
        loss_fn=loss_fn,
        micro_batches=capsule.micro_batches(),
        rng=capsule.rng(),
        scale=float(capsule.facts["scale"]),
        clip_norm=capsule.facts["clip_norm"],
    )
    kind: VerdictKind = capsule.facts.get("verdict", "nonfinite_loss")
    verdict = Verdict(kind=kind, severity="incident", summary=capsule.facts.get("summary", ""))
    incident = Incident(
        id=f"{reading.step:08d}-replay",
        step=reading.step,
        verdict=verdict,
        reading=reading,
        origin=locate(step, reading),
    )
    return replace(incident, findings=diagnose(incident, RunFacts()), capsule=str(capsule.folder))


def _fill_optimizer(capsule: Capsule, optimizer: Optimizer) -> None:
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in capsule.tensors.items():
        place, _, rest = name.partition("/")
        index, _, slot = rest.partition("/")
        if place == "optimizer" and int(index) < len(params):
            optimizer.state[params[int(index)]][slot] = tensor.clone()


def _import(build: str) -> Callable[[], Any]:
    """`module:function`, from below the current directory only."""
    module, _, function = build.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise CapsuleError(
            f"{build}: there is no module {module!r} below the current directory; run it in your project."
        )
    _below_here(Path(spec.origin))
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise CapsuleError(f"{build}: {module!r} has no function {function!r}.")
    result: Callable[[], Any] = found
    return result


def _below_here(path: Path) -> Path:
    """A capsule may name code of the user's project, nothing else on the machine."""
    resolved = path.resolve()
    if not resolved.is_file():
        raise CapsuleError(f"{path} does not exist here; run this in the project's folder, or pass script= or build=.")
    if not resolved.is_relative_to(Path.cwd()):
        raise CapsuleError(f"{path} lies outside the current directory; run this in the project's folder.")
    return resolved
