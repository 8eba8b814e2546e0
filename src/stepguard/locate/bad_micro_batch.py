"""Which micro-batch is bad, and is it bad only when compiled?"""

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
    """Index of the first bad one, with the gradients of those before it left in place; None if all
    are clean.

    A bad loss was seen when the step ran, so it needs no search. A bad gradient of several
    micro-batches does.
    """
    replayer.clear_gradients()
    if reading.bad_micro_batches:
        return reading.bad_micro_batches[0]
    count = len(replayer.step.micro_batches)
    if count == 1:
        return 0
    before: dict[str, Tensor] = {}
    for micro in range(count):
        before = {
            name: p.grad.clone() for name, p in replayer.parameters.items() if p.grad is not None
        }
        if not replayer.run(micro).clean:
            for name, parameter in replayer.parameters.items():
                parameter.grad = before.get(name)
            return micro
    return None


def compiled_only(replayer: Replayer) -> bool:
    """Clean eagerly: is the step bad when it runs compiled, as it did?"""
    if not _compiled(replayer.step):
        return False
    for micro in range(len(replayer.step.micro_batches)):
        replayer.clear_gradients()
        if not replayer.run(micro, eager=False).clean:
            return True
    return False


def repeats(replayer: Replayer) -> bool:
    """Run in place a few times more: does the step give the same bits each time?

    A clean step that repeats exactly was hit by something from outside. One that does not is itself
    unsteady: a race, an unordered reduction, random numbers that are not restored.
    """
    runs = [_once(replayer), _once(replayer)]
    while len(runs) < REPETITIONS and replayer.effort.affords(1.0):
        runs.append(_once(replayer))
    return all(_same(run, runs[0]) for run in runs[1:])


def _once(replayer: Replayer) -> list[Tensor]:
    replayer.clear_gradients()
    losses = [replayer.run(micro).loss for micro in range(len(replayer.step.micro_batches))]
    gradients = [p.grad for p in replayer.parameters.values()]
    return [t.detach().clone() for t in (*losses, *gradients) if t is not None]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    if len(one) != len(other):
        return False
    # NaN differs from itself: a repetition that turns bad is not the same either
    return all(torch.equal(plain(a), plain(b)) for a, b in zip(one, other, strict=True))


def _compiled(step: Step) -> bool:
    """Is there anything that torch.compile made?"""
    functions = (step.loss_fn, step.model)
    if any(hasattr(f, "_torchdynamo_orig_callable") or hasattr(f, "_orig_mod") for f in functions):
        return True
    modules = (m for root in (step.model, *step.modules.values()) for m in root.modules())
    return any(_compiled_forward(m) or hasattr(m, "_orig_mod") for m in modules)


def _compiled_forward(module: nn.Module) -> bool:
    """Did `module.compile()` put something there? A guard that listens is in the same place, around
    it.
    """
    present = compiled_call(module)
    return getattr(present, "below", present) is not None
