"""Facts a checkpoint on disk holds about the run that wrote it: shapes, configuration, versions.

Read as `stepguard verify` reads: nothing in a file is run or imported, and what cannot be
understood is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.preflight.settings.settings_file import read_settings
from stepguard.verification import (
    Damaged,
    PickledObject,
    TensorRecord,
    is_checkpoint_file,
    read_content,
)

CONFIGS = ("config", "cfg", "hyper_parameters", "hparams", "args", "settings")
MODELS = ("model", "state_dict", "model_state_dict", "net", "module", "weights")
VERSIONS = ("versions", "version", "pytorch-lightning_version", "torch_version")
NOT_THE_MODEL = ("training_args", "rng_state", "random_states", "optimizer", "scheduler")
"""Files of a folder that hold no tensors of the model."""
SETTINGS_FILES = ("args", "hparams", "settings", "run_config", "training_args", "train_config")
"""JSON files that hold the run's settings; `config.json` of transformers is the model's."""
SEALED_FACTS = "facts"
"""The JSON file of a checkpoint of stepguard."""
SEALED_MODEL = "model/"
"""How a checkpoint of stepguard names the model's tensors among all others."""


@dataclass(slots=True)
class CheckpointFacts:
    """As far as the layout was understood."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The model's tensors."""
    versions: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""


def read_checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read a file, or a folder of files as transformers, accelerate and stepguard write it."""
    facts = CheckpointFacts(path)
    if path.is_file():
        _read_file(facts, path)
        folder = path.parent
    else:
        folder = path
        for file in sorted(path.iterdir()):
            if file.suffix == ".json":
                _read_json(facts, file)
            elif not file.name.startswith(NOT_THE_MODEL) and is_checkpoint_file(file):
                _read_file(facts, file)
    # Hydra keeps the configuration of a run beside its outputs.
    file = folder / ".hydra" / "config.yaml"
    if not facts.config and file.is_file():
        facts.config = read_settings(file)
    return facts


def _read_file(facts: CheckpointFacts, file: Path) -> None:
    try:
        content = read_content(file)
    except Damaged as fault:
        facts.unread.append(f"{file.name}: {fault.kind}: {fault.detail[:140]}")
        return
    _take(facts, content)


def _take(facts: CheckpointFacts, content: Any) -> None:
    """Take what is known from the top level of a checkpoint."""
    if not isinstance(content, Mapping):
        return
    for name in CONFIGS:
        facts.config = facts.config or _plain_mapping(content.get(name))
    for name in VERSIONS:
        found = content.get(name)
        if isinstance(found, Mapping):
            facts.versions |= dict(found)
        elif found:
            facts.versions[name] = str(found)
    _take_shapes(facts, content)


def _take_shapes(facts: CheckpointFacts, content: Mapping[Any, Any]) -> None:
    tensors = _shapes(content)
    # A file of tensors only may be one shard of several.
    if len(tensors) == len(content):
        facts.shapes |= _model_part(tensors)
        return
    for name in MODELS:
        facts.shapes = facts.shapes or _shapes(content.get(name))
    facts.shapes = facts.shapes or tensors


def _model_part(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The model's tensors of a sealed checkpoint, which names those of the optimizer as well."""
    sealed = {}
    for name, shape in shapes.items():
        if name.startswith(SEALED_MODEL):
            sealed[name.removeprefix(SEALED_MODEL)] = shape
    return sealed or shapes


def _shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    if isinstance(tensors, Mapping):
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorRecord):
                found[str(name)] = tuple(tensor.shape)
    return found


def _plain_mapping(value: Any) -> dict[str, Any]:
    """Plain values of a dict, or of the attributes an object such as a Namespace would have."""
    if isinstance(value, PickledObject):
        value = value.entries or value.state
    if not isinstance(value, dict):
        return {}
    return {str(key): _plain(part) for key, part in value.items() if _is_plain(part)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict | PickledObject):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value if _is_plain(part)]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, PickledObject):
        return isinstance(value.entries or value.state, dict)
    return value is None or isinstance(value, str | int | float | list | tuple | dict)


def _read_json(facts: CheckpointFacts, file: Path) -> None:
    if file.stem not in (*SETTINGS_FILES, SEALED_FACTS):
        return
    try:
        found = read_settings(file)
    except ConfigError as fault:
        facts.unread.append(str(fault))
        return
    if file.stem == SEALED_FACTS:
        _take(facts, found)
    else:
        facts.config = facts.config or found
