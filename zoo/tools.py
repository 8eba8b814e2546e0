"""Tools that the zoo scores: stepguard, and what people use today.

    stepguard        one guarded run with default settings, through the public face
    detect_anomaly   torch.autograd.detect_anomaly: raises in the backward, names an autograd node
    module_hooks     the forward hook that everybody copies: NaN in a module's output
    transformers     DebugUnderflowOverflow: hooks on every module, NaN and Inf

Another tool is any function `Scene -> Answer | None`: `python -m zoo --tool module:function`.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zoo.case import Batch, Scene
from zoo.plain import autocast, make_scaler
from zoo.score import Answer, Tool


def stepguard(scene: Scene) -> Answer | None:
    """One guarded run with default settings."""
    with tempfile.TemporaryDirectory() as run_dir:
        incidents, halted = run_guarded(scene, run_dir)
    if not incidents:
        return Answer(step=0, stopped=True, said="halted without an incident") if halted else None
    # The first incident may be a note without a place, such as a rising loss.
    first = next((one for one in incidents if one.origin is not None), incidents[0])
    answer = Answer(
        step=first.step,
        causes=tuple(finding.code for finding in first.findings),
        stopped=halted,
        said=f"step {first.step} {first.verdict.kind}: {first.origin}",
    )
    if first.origin is not None:
        for name in ("phase", "op", "module", "node", "tensor", "micro_batch"):
            setattr(answer, name, getattr(first.origin, name))
        answer.samples = tuple(first.origin.samples or ())
        answer.source = first.origin.source or ""
    return answer


def run_guarded(scene: Scene, run_dir: str) -> tuple[list[Any], bool]:
    """Every incident, and whether the policy stopped the run."""
    import stepguard

    modules = {"criterion": scene.criterion} if scene.criterion is not None else None
    config = stepguard.GuardConfig(clip_norm=scene.clip, run_dir=run_dir, terminal="quiet")

    def loss_fn(batch: Batch) -> Tensor:
        with autocast(scene):
            return scene.loss(scene.model, batch)

    with stepguard.Guard(
        scene.model, scene.optimizer, scaler=make_scaler(scene), modules=modules, config=config
    ) as guard:
        for step in range(scene.steps):
            if scene.before_step:
                scene.before_step(step)
            try:
                guard.step(loss_fn, *scene.micro_batches(step))
            except stepguard.TrainingHalted:
                return list(guard.incidents), True
            if scene.after_step:
                scene.after_step(step)
        return list(guard.incidents), False


def loop(scene: Scene, before: Callable[[int], None]) -> None:
    """The plain training loop, unguarded."""
    scaler = make_scaler(scene)
    for step in range(scene.steps):
        before(step)
        if scene.before_step:
            scene.before_step(step)
        scene.optimizer.zero_grad()
        for batch in scene.micro_batches(step):
            with autocast(scene):
                loss = scene.loss(scene.model, batch)
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(scene.optimizer)
        if scene.clip:
            torch.nn.utils.clip_grad_norm_(scene.model.parameters(), scene.clip)
        if scaler:
            scaler.step(scene.optimizer)
            scaler.update()
        else:
            scene.optimizer.step()
        if scene.after_step:
            scene.after_step(step)


def detect_anomaly(scene: Scene) -> Answer | None:
    """torch.autograd.detect_anomaly."""
    now = {"step": 0}
    try:
        with torch.autograd.set_detect_anomaly(True):
            loop(scene, lambda step: now.update(step=step))
    except RuntimeError as error:
        # "Function 'SqrtBackward0' returned nan values"; the broken run may also end by itself.
        node = str(error).partition("'")[2].partition("'")[0]
        return Answer(step=now["step"], node=node or None, said=str(error)) if node else None
    except ValueError:
        return None
    return None


def module_hooks(scene: Scene) -> Answer | None:
    """The copied forward hook: the first module whose output holds NaN."""
    now = {"step": 0}
    answers: list[Answer] = []

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for value in tree_leaves(out):
                if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
                    answers.append(Answer(step=now["step"], module=name))

        return hook

    roots = {"": scene.model}
    if scene.criterion is not None:
        roots["criterion"] = scene.criterion
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            module.register_forward_hook(hook_of(f"{prefix}.{name}".strip(".")))
    # Some runs end in an error after their first NaN.
    with suppress(RuntimeError, ValueError):
        loop(scene, lambda step: now.update(step=step))
    return answers[0] if answers else None


def transformers(scene: Scene) -> Answer | None:
    """transformers' DebugUnderflowOverflow, which prints its frames and raises ValueError."""
    from transformers.debug_utils import DebugUnderflowOverflow

    now = {"step": 0}
    said = io.StringIO()
    with redirect_stdout(said):
        DebugUnderflowOverflow(scene.model)
        try:
            loop(scene, lambda step: now.update(step=step))
        except ValueError:
            # The last frame header is the dotted path: `encoder.block.2 T5LayerNorm`.
            frames = []
            for line in said.getvalue().splitlines():
                if line and line[0].isalpha() and len(line.split()) == 2:
                    frames.append(line.split()[0])
            return Answer(step=now["step"], module=frames[-1] if frames else None)
        except RuntimeError:
            return None
    return None


TOOLS: dict[str, Tool] = {
    "stepguard": stepguard,
    "detect_anomaly": detect_anomaly,
    "module_hooks": module_hooks,
    "transformers": transformers,
}


def named(name: str) -> Tool:
    """A tool of the list, or `package.module:function`."""
    if name in TOOLS:
        return TOOLS[name]
    module, colon, function = name.partition(":")
    if not colon:
        known = ", ".join(TOOLS)
        raise SystemExit(f"{name!r} is not a tool; use {known} or package.module:function.")
    try:
        found: Tool = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name!r} cannot be imported: {error}") from None
    return found
