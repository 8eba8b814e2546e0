"""Everything that is measured about a subject, each thing once and only if an item asks for it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from stepguard._errors import ConfigError, StepguardError
from stepguard.diagnose.dtypes import plain as real_format
from stepguard.preflight.answers import NotApplicable, NotGiven, one_line
from stepguard.preflight.checkpoint_facts import CheckpointFacts, read_checkpoint_facts
from stepguard.preflight.data.examples import first_batch, is_map, source_of, validation_of
from stepguard.preflight.data.facts import DataFacts, Progress, gather
from stepguard.preflight.data.label_facts import LabelFacts
from stepguard.preflight.framework import FrameworkFacts, read_framework
from stepguard.preflight.probe import Probe, probe_precision
from stepguard.preflight.project import Program, Project, read_program, read_project
from stepguard.preflight.schedule import DryRun, dry_run
from stepguard.preflight.settings.keys import Setting, find, number
from stepguard.preflight.settings.launcher import Launcher, read_launcher
from stepguard.preflight.subject import Subject
from stepguard.preflight.traced_step import TracedStep, trace_step
from stepguard.preflight.tracking import Tracked, plain
from stepguard.records.verification import Verification
from stepguard.state.rng import kept_rng
from stepguard.verification import check_path as verify

BUILD = "give TARGET as module:function whose function returns"


@dataclass(frozen=True, slots=True)
class CheckContext:
    """How the check was started."""

    folder: Path
    """Where the project's source lies."""
    script: Path | None = None
    """The program that is checked; None where only a configuration or data is given."""
    config_file: Path | None = None
    tracked: Tracked | None = None
    """The configuration the build function was called with."""
    why_untracked: str = (
        "give TARGET as module:function whose function takes the configuration, and --config FILE"
    )


class Inspection:
    """Lazy facts about a subject. Raises NotGiven, which says what to give, for what is missing."""

    def __init__(
        self,
        subject: Subject,
        context: CheckContext,
        progress: Progress | None = None,
        *,
        verified: Verification | None = None,
    ) -> None:
        self.subject = subject
        self.context = context
        self._progress = progress
        self._verified = verified

    @property
    def model(self) -> nn.Module:
        if self.subject.model is None:
            raise NotGiven(f"{BUILD} the model")
        return self.subject.model

    @property
    def optimizer(self) -> Optimizer:
        if self.subject.optimizer is None:
            raise NotGiven(f"{BUILD} the optimizer")
        return self.subject.optimizer

    @property
    def scheduler(self) -> Any:
        if self.subject.scheduler is None:
            raise NotGiven(f"{BUILD} the scheduler")
        return self.subject.scheduler

    @cached_property
    def config(self) -> dict[str, Any]:
        """Empty if there is none."""
        if self.subject.config is None:
            return {}
        return plain(self.subject.config)

    def needed_config(self) -> dict[str, Any]:
        if self.subject.config is None:
            raise NotGiven("give --config FILE")
        return self.config

    def setting(self, meaning: str) -> Setting | None:
        return find(self.config, meaning)

    def number(self, meaning: str) -> float | None:
        return number(self.config, meaning)

    @cached_property
    def steps(self) -> int | None:
        """Optimizer steps of the run, if they are given or configured."""
        found: float | None = self.subject.steps
        if found is None:
            found = self.number("steps")
        if found is None or found <= 0:
            return None
        return int(found)

    @cached_property
    def launcher(self) -> Launcher:
        return read_launcher(self.subject.launcher or {}, self.subject.launcher_name, os.environ)

    @cached_property
    def framework(self) -> FrameworkFacts:
        return read_framework(self.subject.autocast)

    @property
    def scaler(self) -> Any:
        """A GradScaler that is switched on, the subject's or the framework's."""
        for given in (self.subject.scaler, self.framework.scaler):
            if given is not None and (not hasattr(given, "is_enabled") or given.is_enabled()):
                return given
        return None

    @cached_property
    def param_dtypes(self) -> dict[str, int]:
        """Elements by dtype, most common first."""
        sizes: dict[str, int] = {}
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                name = real_format(str(parameter.dtype))
                sizes[name] = sizes.get(name, 0) + parameter.numel()
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))

    @property
    def device(self) -> torch.device:
        for parameter in self.model.parameters():
            return parameter.device
        return torch.device("cpu")

    @cached_property
    def batch(self) -> Any:
        """One batch: given, from the loader, or of the first examples of the dataset."""
        if self.subject.batch is not None:
            return self.subject.batch
        try:
            with kept_rng():
                batch = self._first_batch()
        except Exception as fault:
            raise NotGiven(
                f"the first batch could not be made ({one_line(fault, 100)}); return a `batch`"
            ) from fault
        if batch is None:
            raise NotGiven(f"{BUILD} a batch, loader or dataset")
        return batch

    def _first_batch(self) -> Any:
        if self.subject.loader is not None:
            return first_batch(self.subject.loader)
        dataset = self.subject.dataset
        if dataset is None or not is_map(dataset) or not len(dataset):
            return None
        size = min(len(dataset), int(self.number("batch_size") or 2))
        return default_collate([dataset[index] for index in range(size)])

    @cached_property
    def traced_step(self) -> TracedStep:
        """A forward and backward pass of the real step."""
        self._needs_weights()
        step = trace_step(self.subject, self.framework, self.batch)
        if step.fault and self.subject.loss_fn is None:
            # How the model is called was a guess, so its exception proves nothing.
            raise NotGiven(
                f"return `loss_fn`; the model alone cannot be called with a batch ({step.fault})"
            )
        return step

    def _needs_weights(self) -> None:
        if self.device.type == "meta":
            raise NotApplicable("the weights are on the meta device: there is nothing to run yet")

    @cached_property
    def probe(self) -> Probe:
        """The dtype arithmetic really has."""
        self._needs_weights()
        step = None
        with suppress(NotGiven):
            step = self.traced_step
        opened = self.program.autocast if self.context.script is not None else ""
        if step is None and opened and not self.framework.openers:
            raise NotGiven(
                f"return `loss_fn` and a batch, or `autocast`: the program opens it at {opened}"
            )
        try:
            probe = probe_precision(self.model, self.device, self.framework, step)
            if opened and not self.framework.openers and probe.dtype in self.param_dtypes:
                probe = replace(probe, how=f"{probe.how}; autocast at {opened} did not change it")
            return probe
        except StepguardError:
            raise
        except Exception as fault:
            raise NotGiven(
                f"{self.framework.name} cannot be opened here ({one_line(fault, 100)}); give the "
                "one that works here"
            ) from fault

    @cached_property
    def schedule(self) -> DryRun:
        """The schedule, tried on a copy."""
        return dry_run(self.optimizer, self.scheduler, self.steps)

    @cached_property
    def data(self) -> DataFacts:
        source = source_of(self.subject)
        if source is None:
            raise NotGiven(
                f"give --data PATH, or {BUILD.removeprefix('give ')} a dataset, loader or batch"
            )
        labels = LabelFacts(key=self.subject.label_key, ignore_index=self.subject.ignore_index)
        with kept_rng():
            return gather(source, labels, self._progress)

    @cached_property
    def validation(self) -> DataFacts:
        source = validation_of(self.subject)
        if source is None:
            raise NotGiven("give --validation PATH, or return a `validation` dataset")
        with kept_rng():
            return gather(source, LabelFacts(), self._progress)

    @cached_property
    def verified(self) -> Verification:
        """The checkpoint as `stepguard verify` sees it."""
        if self._verified is not None:
            return self._verified
        return verify(self._checkpoint_path())

    @cached_property
    def checkpoint(self) -> CheckpointFacts:
        return read_checkpoint_facts(self._checkpoint_path())

    def _checkpoint_path(self) -> Path:
        if self.subject.checkpoint is None:
            raise NotGiven("give --checkpoint PATH")
        path = Path(self.subject.checkpoint)
        if not path.exists():
            raise ConfigError(
                f"checkpoint {path} does not exist; give a checkpoint file or folder."
            )
        return path

    @cached_property
    def project(self) -> Project:
        """The source below the folder the check was started in."""
        leave_out: frozenset[Path] = frozenset()
        if self.context.config_file is not None:
            # A configuration in Python names all its keys, which is not a use of them.
            leave_out = frozenset({self.context.config_file.resolve()})
        return read_project(self.context.folder, leave_out=leave_out)

    @cached_property
    def program(self) -> Program:
        """The source of the program itself: its script, and what that imports from the folder."""
        return read_program(self.context.folder, self.context.script)
