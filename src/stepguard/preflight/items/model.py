"""The model: stored values, one real step, and limits on single parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from stepguard.preflight.inspection import Inspection, TracedStep, item
from stepguard.preflight.subject import Answer, NotGiven, failed, passed, warned
from stepguard.report.phrases import count, first_few
from stepguard.state.buffers import keeps_statistics


@item("model.stored_finite", "stored weights and state are finite")
def stored_finite(run: Inspection) -> Answer:
    total = 0
    bad = []
    for name, tensor in _stored_tensors(run):
        total += 1
        wrong = _count_nonfinite(tensor)
        if wrong:
            bad.append(f"{name} ({wrong:,} of {tensor.numel():,} values)")
    if not bad:
        return passed(f"{total:,} tensors of model and optimizer are finite")
    return failed(
        f"{count(len(bad), 'tensor')} of {total:,} not finite: {first_few(bad, 4)}",
        fix="Load the last good checkpoint; torch.empty without an initialisation looks like this "
        "as well.",
    )


def _stored_tensors(run: Inspection) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in run.model.named_parameters():
        yield f"param:{name}", parameter
    for prefix, module in run.model.named_modules():
        # Other buffers may hold -inf or NaN on purpose: a mask, a sentinel.
        if keeps_statistics(module):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield f"buffer:{name}", buffer
    if run.subject.optimizer is None:
        return
    for index, state in enumerate(run.subject.optimizer.state.values()):
        if isinstance(state, dict):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"opt:{key} of parameter {index}", value


def _count_nonfinite(tensor: Tensor) -> int:
    if tensor.device.type == "meta" or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    return int((~torch.isfinite(tensor.detach())).sum())


@item("model.fresh_forward", "one step of the model is finite")
def fresh_forward(run: Inspection) -> Answer:
    return judge_step(run.traced_step)


def judge_step(step: TracedStep) -> Answer:
    """Judge what one forward and backward pass gave."""
    if step.fault:
        return failed(
            f"the step raised {step.fault}",
            fix="Run the step alone; the run dies at its first step.",
        )
    loss = ""
    if step.loss is not None:
        loss = f"loss {step.loss:.4g}"
        if not math.isfinite(step.loss):
            return failed(
                f"{loss} on one batch",
                fix="stepguard.Guard names the operation: guard.step(loss_fn, batch).",
            )
    if step.outputs_bad:
        return failed(
            f"outputs not finite: {first_few(step.outputs_bad, 4)}",
            fix="Check the inputs and the initialisation.",
        )
    if step.grads_bad:
        return failed(
            f"{loss}, {count(len(step.grads_bad), 'parameter')} with bad gradients: "
            f"{first_few(step.grads_bad, 4)}",
            fix="Look for sqrt, norm, log or a division at 0: finite values with infinite slopes.",
        )
    # Also the norm of a loss that reaches no parameter.
    if step.grad_norm == 0:
        return warned(
            f"{loss}, all gradients are 0",
            fix="Nothing is learned: check masks, labels and detach.",
        )
    if step.grad_norm is not None:
        loss += f", gradient norm {step.grad_norm:.4g}"
    return passed(f"one batch: {loss or 'outputs finite'}")


def floating_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that hold real numbers, by name."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            found[name] = tensor.detach()
    return found


@item("scalars.limit", "watched values are within their limits")
def scalars_limit(run: Inspection) -> Answer:
    if not run.subject.watch:
        raise NotGiven("give --watch PATTERN=LIMIT, for instance --watch '*.alpha=10'")
    tensors = floating_tensors(run.model)
    bad = []
    checked = 0
    nearest = ""
    nearest_share = 0.0
    for pattern, limit in run.subject.watch.items():
        matching = [name for name in tensors if fnmatchcase(name, pattern)]
        if not matching:
            bad.append(f"{pattern} matches no parameter and no buffer")
        for name in matching:
            checked += 1
            size = float(tensors[name].abs().max())
            # Written so that a NaN is beyond every limit.
            if not size <= limit:
                bad.append(f"{name} reaches {size:.4g}, allowed is {limit:g}")
            elif size / limit >= nearest_share:
                nearest_share = size / limit
                nearest = f"{name}: {size:.4g} of {limit:g}"
    if bad:
        return failed(
            first_few(bad, 4),
            fix="Look at what drives them: initialisation, lr of their group, a checkpoint.",
        )
    return passed(f"{count(checked, 'tensor')}; nearest to its limit is {nearest}")
