"""The ways people keep a training state on disk, ours among them, as one small interface for the
campaigns.

`save` does what the usual code does, rotation included; `load` is what a user does to resume: take
the newest.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.disk.states import GOOD, facts_at
from stepguard.checkpoints import Store
from stepguard.state.files import DISK, Disk

State = dict[str, Tensor]
KEEP = 2


class Format(Protocol):
    """One way to keep a state."""

    what: str

    def missing(self) -> str | None:
        """Why it cannot be tried here."""

    def save(self, folder: Path, step: int, state: State) -> None: ...

    def load(self, folder: Path) -> State | None:
        """The newest state; None when there is none yet. Whatever it raises counts as unusable."""

    def discard_newest(self, folder: Path) -> None:
        """What a user does whose newest state does not load."""


class Here:
    """A format whose package is installed."""

    def missing(self) -> str | None:
        return None


class Sealed(Here):
    """stepguard's store."""

    what = "stepguard store"

    def __init__(self, disk: Disk = DISK) -> None:
        self.disk = disk

    def save(self, folder: Path, step: int, state: State) -> None:
        Store(folder, keep=KEEP, disk=self.disk).save(step, state, facts_at(step), GOOD)

    def load(self, folder: Path) -> State | None:
        store = Store(folder)
        if not store.list():
            return None
        opened = store.open()
        if opened.passed_over:
            raise ValueError(str(opened.passed_over))
        return opened.tensors

    def discard_newest(self, folder: Path) -> None:
        shutil.rmtree(Store(folder).list()[0].path)


class SingleFile(Here):
    """torch.save of one dict into one file."""

    def __init__(self, what: str, write: Callable[[Any, Path], None]) -> None:
        self.what, self._write = what, write

    def save(self, folder: Path, step: int, state: State) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._write(state, folder / "checkpoint.pt")

    def load(self, folder: Path) -> State | None:
        path = folder / "checkpoint.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def discard_newest(self, folder: Path) -> None:
        (folder / "checkpoint.pt").unlink()


class TwoFiles(Here):
    """Weights in one file, optimizer in another, as many scripts have it."""

    what = "torch.save, weights and optimizer apart"

    def save(self, folder: Path, step: int, state: State) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {name: t for name, t in state.items() if name.startswith("model")}, folder / "model.pt"
        )
        torch.save(
            {name: t for name, t in state.items() if name.startswith("opt")},
            folder / "optimizer.pt",
        )

    def load(self, folder: Path) -> State | None:
        if not (folder / "model.pt").exists() and not (folder / "optimizer.pt").exists():
            return None
        loaded: State = torch.load(folder / "model.pt", weights_only=True)
        loaded |= torch.load(folder / "optimizer.pt", weights_only=True)
        return loaded

    def discard_newest(self, folder: Path) -> None:
        for name in ("model.pt", "optimizer.pt"):
            (folder / name).unlink(missing_ok=True)


class Folders(Here):
    """A folder a step, the newest `KEEP` kept."""

    what = ""
    prefix = "checkpoint"

    def save(self, folder: Path, step: int, state: State) -> None:
        self.write(folder / f"{self.prefix}-{step}", state)
        for old in self.all(folder)[KEEP:]:
            shutil.rmtree(old)

    def load(self, folder: Path) -> State | None:
        newest = self.all(folder)[:1]
        return self.read(newest[0]) if newest else None

    def discard_newest(self, folder: Path) -> None:
        shutil.rmtree(self.all(folder)[0])

    def all(self, folder: Path) -> list[Path]:
        """Newest first, as transformers' `get_last_checkpoint` orders them."""
        pattern = re.compile(rf"{self.prefix}-(\d+)")
        found = [
            (int(m.group(1)), p)
            for p in folder.glob("*")
            if (m := pattern.fullmatch(p.name)) and p.is_dir()
        ]
        return [path for _, path in sorted(found, reverse=True)]

    @abstractmethod
    def write(self, path: Path, state: State) -> None: ...

    @abstractmethod
    def read(self, path: Path) -> State: ...


class Distributed(Folders):
    """torch.distributed.checkpoint."""

    what = "torch.distributed.checkpoint (DCP)"

    def write(self, path: Path, state: State) -> None:
        from torch.distributed import checkpoint as dcp

        with _as_exception():
            dcp.save(dict(state), checkpoint_id=path)

    def read(self, path: Path) -> State:
        from torch.distributed import checkpoint as dcp

        reader = dcp.FileSystemReader(path)
        sizes = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(meta.size, dtype=meta.properties.dtype)
            for name, meta in sizes.items()
        }
        with _as_exception():
            dcp.load(state, checkpoint_id=path)
        return state


@contextmanager
def _as_exception() -> Iterator[None]:
    """DCP's CheckpointException is not an Exception, and it warns that there is one process."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as fault:
            raise RuntimeError(str(fault)) from None


class Trainer(Folders):
    """transformers' Trainer, its own `_save_checkpoint` and `get_last_checkpoint`."""

    what = "transformers Trainer"

    def __init__(self) -> None:
        self._trainer: Any = None

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("transformers") else "transformers is not installed"

    def save(self, folder: Path, step: int, state: State) -> None:
        trainer = self._trainer = self._trainer or _trainer(folder, state["model/weight"].numel())
        with torch.no_grad():
            trainer.model.weight.copy_(state["model/weight"])
        slots = trainer.optimizer.state[trainer.model.weight]
        for name in ("exp_avg", "exp_avg_sq", "step"):
            slots[name] = state[f"optimizer/weight/{name}"].clone()
        trainer.state.global_step = step
        trainer._save_checkpoint(trainer.model, trial=None)

    def read(self, path: Path) -> State:
        json.loads((path / "trainer_state.json").read_text())
        weight = load_file(path / "model.safetensors")["weight"]
        slots = torch.load(path / "optimizer.pt", weights_only=True)["state"][0]
        return {
            "model/weight": weight,
            **{f"optimizer/weight/{name}": slots[name] for name in slots},
        }


def _trainer(folder: Path, size: int) -> Any:
    from transformers import Trainer as Theirs
    from transformers import TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    arguments = TrainingArguments(
        output_dir=str(folder), save_total_limit=KEEP, report_to=[], use_cpu=True, disable_tqdm=True
    )
    return Theirs(model=model, args=arguments, optimizers=(optimizer, schedule))


class Safetensors(Here):
    """One safetensors file; used by the corruption campaign only."""

    what = "safetensors"

    def save(self, folder: Path, step: int, state: State) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / "model.safetensors")

    def load(self, folder: Path) -> State | None:
        return load_file(folder / "model.safetensors")

    def discard_newest(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()


def replaced(state: Any, path: Path) -> None:
    """torch.save to a temporary file, then os.replace."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def legacy(state: Any, path: Path) -> None:
    """The format of torch before 1.6."""
    torch.save(state, path, _use_new_zipfile_serialization=False)


FORMATS: dict[str, Callable[[], Format]] = {
    "stepguard": Sealed,
    "in-place": lambda: SingleFile("torch.save in place", torch.save),
    "replace": lambda: SingleFile("torch.save to a temporary file + os.replace", replaced),
    "two-files": TwoFiles,
    "dcp": Distributed,
    "trainer": Trainer,
}
