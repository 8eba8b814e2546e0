"""What a checkpoint on disk says about the run that wrote it: shapes, configuration, versions.

Read as `stepguard verify` reads: nothing in a file is run or imported, and what cannot be
understood is reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.preflight.settings.files import read_settings
from stepguard.verification import Damaged, PickledObject, TensorRecord, read_content

CONFIGS = ("config", "cfg", "hyper_parameters", "hparams", "args", "settings")
MODELS = ("model", "state_dict", "model_state_dict", "net", "module", "weights")
VERSIONS = ("versions", "version", "pytorch-lightning_version", "torch_version")
TORCH_FILES = (".pt", ".pth", ".ckpt", ".bin", ".tar")
SEALED = "model/"
"""How a checkpoint of stepguard names the model's tensors among all others."""
LARGEST_JSON = 16 * 2**20


@dataclass(slots=True)
class Stored:
    """As far as the layout was understood."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The model's tensors."""
    versions: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""


def read_stored(path: Path) -> Stored:
    """A file, or a folder of files as transformers, accelerate and stepguard write it."""
    if not path.exists():
        raise ConfigError(f"checkpoint {path} does not exist.")
    stored = Stored(path)
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.suffix in TORCH_FILES and not file.name.startswith(("training_args", "rng_state")):
            _take(stored, _load(stored, file), file.stem if path.is_dir() else "")
        elif file.suffix == ".safetensors":
            _shapes_of(stored, file)
        elif file.suffix == ".json" and path.is_dir() and file.stat().st_size <= LARGEST_JSON:
            _take_json(stored, file)
    _hydra(stored)
    return stored


def _load(stored: Stored, file: Path) -> Any:
    try:
        return read_content(file)
    except (Damaged, OSError) as fault:
        return _refuse(stored, file, fault)


def _refuse(stored: Stored, file: Path, fault: Exception) -> None:
    reason = " ".join(str(fault).split())
    kind = fault.kind if isinstance(fault, Damaged) else type(fault).__name__
    stored.unread.append(f"{file.name}: {kind}: {reason[:140]}")


def _take(stored: Stored, content: Any, stem: str) -> None:
    if not isinstance(content, Mapping):
        return
    if stem.startswith(
        ("optimizer", "scheduler")
    ):  # of a folder; their tensors are none of the model's
        return
    for name in CONFIGS:
        values = _mapping(content.get(name))
        if values and not stored.config:
            stored.config = values
    for name in VERSIONS:
        found = content.get(name)
        stored.versions |= (
            dict(found) if isinstance(found, Mapping) else {name: str(found)} if found else {}
        )
    for tensors in (*(content.get(name) for name in MODELS), content):
        if isinstance(tensors, Mapping) and not stored.shapes:
            stored.shapes = {
                str(k): tuple(v.shape) for k, v in tensors.items() if isinstance(v, TensorRecord)
            }


def _mapping(value: Any) -> dict[str, Any]:
    """A dict, or what an object such as a Namespace would have as its attributes, as far as it is
    plain.
    """
    if isinstance(value, PickledObject):
        value = value.entries or value.state
    return (
        {str(key): _plain(part) for key, part in value.items() if _known(part)}
        if isinstance(value, dict)
        else {}
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict | PickledObject):
        return _mapping(value)
    return (
        [_plain(part) for part in value if _known(part)]
        if isinstance(value, list | tuple)
        else value
    )


def _known(value: Any) -> bool:
    if isinstance(value, PickledObject):
        return isinstance(value.entries or value.state, dict)
    return value is None or isinstance(value, str | int | float | list | tuple | dict)


def _shapes_of(stored: Stored, file: Path) -> None:
    """The header is JSON behind eight bytes that say its length; the tensors are not read."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > LARGEST_JSON:
                raise ValueError(f"its header claims {length:,} bytes")
            header = json.loads(stream.read(length))
        named = {k: tuple(v["shape"]) for k, v in header.items() if k != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError) as fault:
        _refuse(stored, file, fault)
        return
    if any(name.startswith(SEALED) for name in named):
        named = {
            name.removeprefix(SEALED): shape
            for name, shape in named.items()
            if name.startswith(SEALED)
        }
    if not file.name.startswith("optimizer"):
        stored.shapes |= named


def _take_json(stored: Stored, file: Path) -> None:
    """Only files whose name says that they hold the run's settings: `config.json` of transformers
    is the model's.
    """
    if file.stem not in (
        "args",
        "hparams",
        "settings",
        "run_config",
        "training_args",
        "train_config",
        "facts",
    ):
        return
    try:
        found = read_settings(file)
    except ConfigError as fault:
        stored.unread.append(str(fault))
        return
    if file.stem == "facts":
        _take(stored, found, "")
    else:
        stored.config = stored.config or found


def _hydra(stored: Stored) -> None:
    """Hydra keeps the configuration of a run beside it."""
    folder = stored.path if stored.path.is_dir() else stored.path.parent
    file = folder / ".hydra" / "config.yaml"
    if not stored.config and file.is_file():
        stored.config = read_settings(file)
