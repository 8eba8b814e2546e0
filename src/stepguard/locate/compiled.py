"""Which compiled region makes a bad value that the eager step does not have?

Nothing inside a compiled region can be traced as it runs, so its boundary is watched: the first
region whose inputs are finite and whose outputs, or gradients, are not. The same region run eagerly
on the same inputs is the witness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.operands import numeric, summarise, tensors_in
from stepguard.locate.replay import Replayer
from stepguard.locate.witness import first_bad_value
from stepguard.records.incident import Evidence, Origin, Witness, with_evidence
from stepguard.tensors.names import named_modules
from stepguard.tensors.torch_private import COMPILED_CALL, compiled_call, tree_map
from stepguard.tensors.values import is_finite

WHAT_RAN = "torch.compile"


@dataclass(slots=True)
class _Call:
    """One call of a compiled region."""

    name: str
    module: nn.Module
    below: Callable[..., Any]
    given: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    came_in: list[Tensor] = field(default_factory=list)
    """Gradients of the outputs."""
    went_out: list[Tensor] = field(default_factory=list)
    """Gradients of the inputs."""


def locate_region(replayer: Replayer, micro: int, origin: Origin) -> Origin:
    """Run the compiled micro-batch again; the origin at the first region that is to blame.

    Unchanged where no region is: the loss function itself is compiled, or a part of a region that
    an earlier one has spoiled.
    """
    replayer.clear_gradients()
    with _watched(replayer) as calls:
        ran = replayer.run(micro, eager=False)
    try:
        found = _guilty_forward(calls) if not ran.loss_finite else _guilty_backward(calls)
        if found is None:
            return origin
        backward = ran.loss_finite
        read = found.came_in if backward else found.inputs
        bad = [one for one in (found.went_out if backward else found.outputs) if not _fine([one])]
        origin = replace(
            origin,
            phase="backward" if backward else "forward",
            module=found.name,
            op=WHAT_RAN,
            micro_batch=micro,
            inputs=tuple(summarise(f"input {n}", one) for n, one in enumerate(read[:6])),
            output=summarise("out", bad[0]) if bad else None,
        )
        if backward:
            return origin
        return with_evidence(origin, Evidence(witnesses=(_eagerly(found),)))
    finally:
        replayer.clear_gradients()


def _guilty_forward(calls: list[_Call]) -> _Call | None:
    for call in calls:
        if _fine(call.inputs) and not _fine(call.outputs):
            return call
    return None


def _guilty_backward(calls: list[_Call]) -> _Call | None:
    for call in reversed(calls):
        gradients = [one.grad for one in call.module.parameters() if one.grad is not None]
        if call.came_in and _fine(call.came_in) and not _fine([*call.went_out, *gradients]):
            return call
    return None


def _fine(tensors: list[Tensor]) -> bool:
    return all(is_finite(one) for one in tensors if numeric(one))


def _eagerly(call: _Call) -> Witness:
    """The region without the compiler, on the inputs it had."""
    name = f"`{call.name or 'the model'}` run eagerly"
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            args, kwargs = call.given
            outputs = tensors_in(call.below(*args, **kwargs))
    except Exception as error:
        return Witness(path="eager", name=name, why_not=f"{type(error).__name__}: {error}"[:100])
    value, agrees = first_bad_value(call.outputs, outputs)
    return Witness(path="eager", name=name, finite=_fine(outputs), value=value, agrees=agrees)


@contextmanager
def _watched(replayer: Replayer) -> Iterator[list[_Call]]:
    """Note what goes in and out of every compiled region."""
    calls: list[_Call] = []
    undo: list[Callable[[], None]] = []
    step = replayer.step
    # the roots of a step are what is inside the compiled wrappers
    wrappers = [("", step.model), *step.modules.items()]
    for name, module in (*wrappers, *named_modules(step.named_roots())):
        spaces = vars(module)
        if "_orig_mod" in module._modules:
            key = "forward"
        elif _compiled_in_place(module):
            key = COMPILED_CALL
        else:
            continue
        if isinstance(spaces[key], _Boundary):
            continue
        below = spaces[key]
        # not by setattr, which a compiled module passes on to the module inside
        spaces[key] = _Boundary(calls, name.replace("_orig_mod", "").strip("."), module, below)
        undo.append(partial(spaces.__setitem__, key, below))
    try:
        yield calls
    finally:
        for one in reversed(undo):
            one()


def _compiled_in_place(module: nn.Module) -> bool:
    """After `module.compile()`; a guard that listens to calls stands in the same place."""
    present = compiled_call(module)
    return present is not None and getattr(present, "below", present) is not None


class _Boundary:
    """Stands in the place of a compiled call, and notes what passes."""

    def __init__(
        self, calls: list[_Call], name: str, module: nn.Module, below: Callable[..., Any]
    ) -> None:
        self._calls = calls
        self._name = name
        self._module = module
        self._below = below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def copy(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) else value

        given = tree_map(copy, (args, kwargs))
        result = self._below(*args, **kwargs)
        outputs = tensors_in(result)
        copies = [one.detach() for one in outputs]
        call = _Call(self._name, self._module, self._below, given, tensors_in(given), copies)
        self._calls.append(call)
        for tensors, seen in ((outputs, call.came_in), (tensors_in((args, kwargs)), call.went_out)):
            for one in tensors:
                if one.requires_grad:
                    one.register_hook(seen.append)  # type: ignore[no-untyped-call]
        return result
