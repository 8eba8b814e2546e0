"""Find the bad micro-batch; say whether only compiled code is bad and whether a step repeats."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepguard.locate.finite import plain
from stepguard.locate.replay import Replayer
from stepguard.records.reading import Reading
from stepguard.state.step import Step
from stepguard.tensors.torch_private import compiled_call

REPETITIONS = 3


def bad_micro_batch(replayer: Replayer, reading: Reading) -> int | None:
    """Return the index of the first bad one, None if all are clean.

    Gradients of the micro-batches before it are left in place. A bad loss was seen when the step
    ran, so it needs no search; a bad gradient of several micro-batches does.
    """
    replayer.clear_gradients()
    if reading.bad_micro_batches:
        return reading.bad_micro_batches[0]
    count = len(replayer.step.micro_batches)
    if count == 1:
        return 0
    for micro in range(count):
        before = replayer.copied_gradients()
        if not replayer.run(micro).clean:
            for name, parameter in replayer.parameters.items():
                parameter.grad = before.get(name)
            return micro
    return None


def compiled_only(replayer: Replayer) -> bool:
    """True if a step that is clean when run eagerly is bad when it runs compiled, as it did."""
    if not _compiled(replayer.step):
        return False
    for micro in range(len(replayer.step.micro_batches)):
        replayer.clear_gradients()
        if not replayer.run(micro, eager=False).clean:
            return True
    return False


def repeats(replayer: Replayer) -> bool:
    """Run the step a few times more: True if it gives the same bits each time.

    A clean step that repeats exactly was hit by something from outside. One that does not is itself
    unsteady: a race, an unordered reduction, random numbers that are not restored.
    """
    runs = [_results(replayer), _results(replayer)]
    while len(runs) < REPETITIONS and replayer.budget.affords(1.0):
        runs.append(_results(replayer))
    return all(_same(run, runs[0]) for run in runs[1:])


def _results(replayer: Replayer) -> list[Tensor]:
    """Run the step once; return its losses and gradients."""
    replayer.clear_gradients()
    results: list[Tensor | None] = []
    for micro in range(len(replayer.step.micro_batches)):
        results.append(replayer.run(micro).loss)
    for parameter in replayer.parameters.values():
        results.append(parameter.grad)
    return [tensor.detach().clone() for tensor in results if tensor is not None]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    if len(one) != len(other):
        return False
    # NaN differs from itself: a repetition that turns bad is not the same either.
    return all(torch.equal(plain(a), plain(b)) for a, b in zip(one, other, strict=True))


def _compiled(step: Step) -> bool:
    """True if torch.compile made anything of the step."""
    for function in (step.loss_fn, step.model):
        # torch.compile keeps what it was given: a function in the one, a module in the other.
        if hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod"):
            return True
    for root in (step.model, *step.modules.values()):
        if any(_compiled_module(module) for module in root.modules()):
            return True
    return False


def _compiled_module(module: nn.Module) -> bool:
    """True for the result of `torch.compile(module)` and after `module.compile()`."""
    if hasattr(module, "_orig_mod"):
        return True
    # A guard that records the model's calls stands in the same place, around what was there.
    present = compiled_call(module)
    return getattr(present, "below", present) is not None
