"""A model built by the user's function for `stepguard doctor`: its values and its first output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from stepguard._errors import ConfigError
from stepguard.preflight.framework import FrameworkFacts
from stepguard.preflight.inspection import CheckContext, Inspection
from stepguard.preflight.items.model import judge_step, stored_finite
from stepguard.preflight.run import run_item
from stepguard.preflight.subject import Subject, subject_of
from stepguard.preflight.target import call_build
from stepguard.preflight.traced_step import nonfinite_outputs, trace_step
from stepguard.records.examination import Section, SectionStatus, not_checked
from stepguard.records.preflight import Status
from stepguard.state.importing import import_function, importable

STATUSES: dict[Status, SectionStatus] = {
    "pass": "fine",
    "not_applicable": "fine",
    "warn": "warning",
    "fail": "failed",
    "not_checked": "not checked",
}
GIVE_INPUTS = (
    "let the build function return (model, inputs), or give the model an `example_input_array`"
)


class FreshModel:
    """What `module:function` returns. What it raises is told in a section, not raised."""

    def __init__(self, build: str) -> None:
        self._subject = Subject()
        self._fault = ""
        with importable():
            function = import_function(build, ConfigError)
            try:
                self._subject = _as_subject(call_build(function, build), build)
            except ConfigError as fault:
                self._fault = str(fault)

    @property
    def model(self) -> nn.Module | None:
        return self._subject.model

    def values_section(self) -> Section:
        """Are its first values finite?"""
        if self._fault:
            return Section(title="fresh model", status="failed", lines=(self._fault,))
        outcome = run_item(stored_finite, Inspection(self._subject, CheckContext(Path.cwd())))
        said = f"{type(self.model).__name__}: {', '.join(outcome.evidence)}"
        return Section(title="fresh model", status=STATUSES[outcome.status], lines=(said,))

    def forward_section(self) -> Section:
        """Call it in evaluation mode; name the first module whose output is not finite."""
        model = self.model
        if model is None or any(parameter.is_meta for parameter in model.parameters()):
            return not_checked("forward pass", "there is no model with weights")
        inputs = self._subject.batch
        # Lightning keeps an example under the first name, transformers under the second.
        for name in ("example_input_array", "dummy_inputs"):
            if inputs is None:
                inputs = getattr(model, name, None)
        if inputs is None:
            return not_checked("forward pass", GIVE_INPUTS)
        model.eval()
        with _bad_modules(model) as bad:
            step = trace_step(Subject(model=model, batch=inputs), FrameworkFacts(), inputs)
        answer = judge_step(step)
        said = ", ".join(answer.evidence)
        if bad:
            said += f"; first in {bad[0]}"
        return Section(title="forward pass", status=STATUSES[answer.status], lines=(said,))


def _as_subject(built: Any, build: str) -> Subject:
    """A model, (model, inputs), or whatever the build function of `check` may return."""
    if isinstance(built, nn.Module):
        return Subject(model=built)
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        return Subject(model=built[0], batch=built[1])
    return subject_of(built, build)


@contextmanager
def _bad_modules(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the modules whose output is not finite, in the order of calls."""
    bad: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if nonfinite_outputs(output):
            bad.append(names[module] or "the model itself")

    handles = [module.register_forward_hook(hook) for module in names]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()
