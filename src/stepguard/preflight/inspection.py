"""Everything that is measured about a subject, each thing once and only when an item asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stepguard._errors import ConfigError, StepguardError
from stepguard.diagnose.dtypes import plain as plain_dtype
from stepguard.preflight.answers import Missing, Pointless
from stepguard.preflight.checkpoint_facts import Stored, read_stored
from stepguard.preflight.data.examples import first_batch, is_map, source_of, validation_of
from stepguard.preflight.data.facts import DataFacts, Progress, gather
from stepguard.preflight.data.labels import LabelFacts
from stepguard.preflight.probe import Probe, probe_context
from stepguard.preflight.project import Project, read_project
from stepguard.preflight.schedule import Course, dry_run
from stepguard.preflight.settings.keys import Setting, find, number
from stepguard.preflight.settings.launcher import Launcher, launcher
from stepguard.preflight.subject import Subject
from stepguard.preflight.surroundings import Surroundings, surroundings
from stepguard.preflight.traced_step import Live, run_live
from stepguard.preflight.tracking import Tracked, plain
from stepguard.records.verification import Verification
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.verification import check_path as verify

ON_META = "the weights are on the meta device: there is nothing to run yet"
BUILD = "give TARGET as module:function whose function returns"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the check was started from."""

    folder: Path
    config_file: Path | None = None
    tracked: Tracked | None = None
    """The configuration the build function was called with."""
    why_untracked: str = (
        "give TARGET as module:function whose function takes the configuration, and --config FILE"
    )


class Inspection:
    """Lazy: an item that needs what was not given gets `Missing`, which says what to give."""

    def __init__(self, subject: Subject, place: Place, progress: Progress | None = None) -> None:
        self.subject, self.place = subject, place
        self._progress = progress

    @property
    def model(self) -> nn.Module:
        if self.subject.model is None:
            raise Missing(f"{BUILD} the model")
        return self.subject.model

    @property
    def optimizer(self) -> Optimizer:
        if self.subject.optimizer is None:
            raise Missing(f"{BUILD} the optimizer")
        return self.subject.optimizer

    @property
    def scheduler(self) -> Any:
        if self.subject.scheduler is None:
            raise Missing(f"{BUILD} the scheduler")
        return self.subject.scheduler

    @cached_property
    def config(self) -> dict[str, Any]:
        """Empty when there is none."""
        return plain(self.subject.config) if self.subject.config is not None else {}

    def needed_config(self) -> dict[str, Any]:
        if self.subject.config is None:
            raise Missing("give --config FILE")
        return self.config

    def setting(self, meaning: str) -> Setting | None:
        return find(self.config, meaning)

    def number(self, meaning: str) -> float | None:
        return number(self.config, meaning)

    @cached_property
    def steps(self) -> int | None:
        """Optimizer steps of the run, if anybody says."""
        found = self.subject.steps if self.subject.steps is not None else self.number("steps")
        return int(found) if found is not None and found > 0 else None

    @cached_property
    def launcher(self) -> Launcher:
        return launcher(self.subject.launcher or {}, self.subject.launcher_name, os.environ)

    @cached_property
    def around(self) -> Surroundings:
        return surroundings(self.subject.autocast)

    @property
    def scaler(self) -> Any:
        """A GradScaler that is switched on, wherever it lives."""
        for given in (self.subject.scaler, self.around.scaler):
            if given is not None and (not hasattr(given, "is_enabled") or given.is_enabled()):
                return given
        return None

    @cached_property
    def param_dtypes(self) -> dict[str, int]:
        """Elements by dtype, most common first."""
        sizes: dict[str, int] = {}
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                name = plain_dtype(str(parameter.dtype))
                sizes[name] = sizes.get(name, 0) + parameter.numel()
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))

    @property
    def device(self) -> torch.device:
        first = next(iter(self.model.parameters()), None)
        return first.device if first is not None else torch.device("cpu")

    @cached_property
    def batch(self) -> Any:
        """One batch: given, from the loader, or the first examples of the dataset through the
        loader's collate.
        """
        subject = self.subject
        if subject.batch is not None:
            return subject.batch
        try:
            with _kept_randomness():
                if subject.loader is not None:
                    return first_batch(subject.loader)
                if subject.dataset is not None and is_map(subject.dataset) and len(subject.dataset):
                    size = min(len(subject.dataset), int(self.number("batch_size") or 2))
                    return torch.utils.data.default_collate(
                        [subject.dataset[index] for index in range(size)]
                    )
        except Exception as fault:
            said = f"{type(fault).__name__}: {' '.join(str(fault).split())[:100]}"
            raise Missing(
                f"the first batch could not be made ({said}); return a `batch`"
            ) from fault
        raise Missing(f"{BUILD} a batch, loader or dataset")

    @cached_property
    def live(self) -> Live:
        """A forward and backward pass of the real step."""
        if self.subject.model is None:
            raise Missing(f"{BUILD} the model")
        if self.device.type == "meta":
            raise Pointless(ON_META)
        return run_live(self.subject, self.around, self.batch)

    @cached_property
    def probe(self) -> Probe:
        """The dtype arithmetic really has."""
        model = self.model
        if self.device.type == "meta":
            raise Pointless(ON_META)
        live = None
        with suppress(Missing):
            live = self.live
        try:
            return probe_context(model, self.device, self.around, live)
        except StepguardError:
            raise
        except Exception as fault:
            said = f"{type(fault).__name__}: {' '.join(str(fault).split())[:100]}"
            raise Missing(
                f"{self.around.name} cannot be opened here ({said}); give the one that works here"
            ) from fault

    @cached_property
    def course(self) -> Course:
        """The schedule, tried on a copy."""
        return dry_run(self.optimizer, self.scheduler, self.steps)

    @cached_property
    def data(self) -> DataFacts:
        source = source_of(self.subject)
        if source is None:
            raise Missing(
                f"give --data PATH, or {BUILD.removeprefix('give ')} a dataset, loader or batch"
            )
        labels = LabelFacts(key=self.subject.label_key, ignore_index=self.subject.ignore_index)
        with _kept_randomness():
            return gather(source, labels, self._progress)

    @cached_property
    def validation(self) -> DataFacts:
        source = validation_of(self.subject)
        if source is None:
            raise Missing("give --validation PATH, or return a `validation` dataset")
        with _kept_randomness():
            return gather(source, LabelFacts(), self._progress)

    @cached_property
    def verified(self) -> Verification:
        """The checkpoint as `stepguard verify` sees it."""
        if self.subject.checkpoint is None:
            raise Missing("give --checkpoint PATH")
        path = Path(self.subject.checkpoint)
        if not path.exists():
            raise ConfigError(f"checkpoint {path} does not exist.")
        return verify(path)

    @cached_property
    def stored(self) -> Stored:
        if self.subject.checkpoint is None:
            raise Missing("give --checkpoint PATH")
        return read_stored(Path(self.subject.checkpoint))

    @cached_property
    def project(self) -> Project:
        """The user's source below the current directory; the configuration itself is no use of its
        keys.
        """
        file = self.place.config_file
        return read_project(
            self.place.folder, leave_out=frozenset({file.resolve()} if file is not None else ())
        )


@contextmanager
def _kept_randomness() -> Iterator[None]:
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)
