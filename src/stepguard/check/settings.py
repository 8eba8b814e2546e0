"""Configuration and launcher as plain values: read, never executed."""

from __future__ import annotations

import ast
import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stepguard._errors import ConfigError
from stepguard.records.codec import NUMBER, READERS, read_table

KINDS = (*READERS, ".py")
"""Suffixes of files that `read_settings` reads."""

# --- A configuration that remembers which of its keys were read.


class Tracked(MutableMapping[str, Any]):
    """A nested dict that notes reads by item, by attribute and by `**`.

    Taking a value is a read, asking for names (`in`, `len`) is not. Nested mappings are tracked
    key by key, and a key that the program writes counts as read.
    """

    def __init__(
        self, values: Mapping[str, Any], *, _prefix: str = "", _read: set[str] | None = None
    ) -> None:
        # Attributes are keys of the configuration, so these go around `__setattr__`.
        if _read is None:
            values, _read = copy.deepcopy(plain(values)), set()
        self.__dict__.update(_values=values, _prefix=_prefix, _read=_read)

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        whole = f"{self._prefix}{key}"
        self._read.add(whole)
        if isinstance(value, Mapping):
            return Tracked(value, _prefix=f"{whole}.", _read=self._read)
        if _is_list_of_mappings(value):
            parts = enumerate(value)
            return [Tracked(part, _prefix=f"{whole}.{n}.", _read=self._read) for n, part in parts]
        return value

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and inspect ask every object for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {self._prefix}{name}") from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value
        self._read.add(f"{self._prefix}{key}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Tracked({self._values!r})"

    # A copy counts reads for the original: what the program takes from it is a use of the key.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tracked:
        return Tracked(copy.deepcopy(self._values, memo), _prefix=self._prefix, _read=self._read)

    def __copy__(self) -> Tracked:
        return Tracked(dict(self._values), _prefix=self._prefix, _read=self._read)


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def plain(settings: Any) -> dict[str, Any]:
    """Return a mapping, a dataclass or a namespace as a dict, without counting a read."""
    if isinstance(settings, Tracked):
        settings = settings._values
    if isinstance(settings, Mapping):
        return dict(settings)
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return dataclasses.asdict(settings)
    if hasattr(settings, "__dict__") and not isinstance(settings, type):
        return dict(vars(settings))
    raise ConfigError(
        f"config is a {type(settings).__name__}; give a mapping, a dataclass or a namespace."
    )


def unread(settings: Tracked) -> list[str]:
    """Dotted keys of the leaves that were not read."""
    return [leaf.key for leaf in flat(plain(settings)) if leaf.key not in settings._read]


# --- One table of settings by their many names.


def named_lists(text: str) -> dict[str, list[str]]:
    """Parse `meaning: name name ...`; a line without a meaning continues the one above."""
    found: dict[str, list[str]] = {}
    for word in text.split():
        if word.endswith(":"):
            names = found.setdefault(word[:-1], [])
        else:
            names.append(word)
    return found


NAMES = named_lists(
    """
    lr: learning_rate lr max_lr peak_lr base_lr init_lr
    min_lr: min_lr min_learning_rate lr_min final_lr eta_min
    clip: clip_norm grad_clip grad_clip_norm clip_grad_norm max_grad_norm gradient_clip_val
        gradient_clipping grad_norm_clip clip_grad
    warmup: warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup
    steps: num_train_steps max_steps train_num_steps total_steps num_steps train_steps max_iters
        steps
    epochs: num_train_epochs max_epochs num_epochs epochs
    accumulation: gradient_accumulation_steps gradient_accumulate_every accumulate_grad_batches
        accumulation_steps grad_accum grad_accum_steps accum_steps
    save_every: checkpoint_every save_every save_steps save_every_n_steps save_interval
        checkpoint_interval ckpt_every every_n_train_steps save_and_sample_every save_freq
        checkpointing_steps
    keep: save_total_limit checkpoints_total_limit total_limit keep_last max_checkpoints
        save_top_k keep
    run_dir: run_dir output_dir save_dir checkpoint_dir results_folder
    batch_size: train_batch_size per_device_train_batch_size micro_batch_size batch_size
    mixed_precision: mixed_precision precision amp_dtype autocast_dtype
    fp16: fp16 use_fp16 half
    bf16: bf16 use_bf16
    amp: amp use_amp native_amp
    loss_scale: loss_scale

    positive: lr learning_rate max_lr peak_lr base_lr init_lr batch_size train_batch_size
        gradient_accumulation_steps eps adam_epsilon epochs num_epochs num_train_epochs
        hidden_size num_layers
    share: beta1 beta2 adam_beta1 adam_beta2 dropout ema_decay momentum label_smoothing
    text: mixed_precision precision save_strategy eval_strategy version id name seed_name tag
    of_one_start: output_dir run_dir logging_dir resume resume_from_checkpoint checkpoint
        run_name
    shown: learning_rate lr max_lr peak_lr base_lr init_lr batch_size grad_clip clip_norm
        max_grad_norm amp fp16 bf16 mixed_precision precision min_lr weight_decay optimizer
        scheduler model_type seed
    """
)
"""Meaning -> names of the last part of a key, most telling first; case does not matter."""
SPELLINGS = named_lists(
    """
    float32: no none false 32 32-true fp32 float32 float
    float16: 16 fp16 float16 half 16-mixed 16-true
    bfloat16: bf16 bfloat16 bf16-mixed bf16-true
    float64: 64 64-true fp64 float64 double
    """
)
"""dtype -> how accelerate, Lightning, transformers and plain scripts spell it."""


class Setting(NamedTuple):
    """One value and its dotted key."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}"

    def means(self, meaning: str) -> bool:
        """Is the last part of the key one of the names in the table?"""
        return self.name in NAMES[meaning]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2].lower().replace("-", "_")


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    """Yield every leaf with its dotted key. A list is a leaf unless it holds mappings."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{key}.")
        elif _is_list_of_mappings(value):
            for position, part in enumerate(value):
                yield from flat(part, f"{key}.{position}.")
        else:
            yield Setting(key, value)


def find(settings: Mapping[str, Any], meaning: str) -> Setting | None:
    """Find the setting with this meaning: the most telling name, and the nearest to the root."""
    names = NAMES[meaning]
    found = [leaf for leaf in flat(settings) if leaf.value is not None and leaf.means(meaning)]
    return min(found, key=lambda leaf: (names.index(leaf.name), leaf.key.count(".")), default=None)


def number(settings: Mapping[str, Any], meaning: str) -> float | None:
    """The setting as a number; a string that spells one counts as what was meant."""
    found = find(settings, meaning)
    return found and as_number(found.value)


def as_number(value: Any) -> float | None:
    """None for what is not a finite number; the item `config.types` reports strings."""
    # A bool is an int in Python.
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value.replace("_", ""))
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def configured_rate(path: Path) -> float:
    """The one learning rate of a configuration file; several different ones are refused by name."""
    rates = {
        leaf.key: as_number(leaf.value) for leaf in flat(read_settings(path)) if leaf.means("lr")
    }
    found = {key: rate for key, rate in rates.items() if rate is not None}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    if not found:
        said = f"no learning rate ({', '.join(NAMES['lr'])})"
    else:
        listed = ", ".join(f"{key}={rate:g}" for key, rate in found.items())
        said = f"several learning rates ({listed})"
    raise ConfigError(f"--config {path} names {said}; give the right one with --lr.")


# --- What a configuration and a launcher mean by precision.


def meant(word: object) -> str | None:
    """`bf16-mixed` -> `bfloat16`; None for what is not a precision. Case does not matter."""
    plain_word = str(word).removeprefix("torch.").strip().lower()
    for dtype, spellings in SPELLINGS.items():
        if plain_word in spellings:
            return dtype
    return None


class Precision(NamedTuple):
    """The precision that a configuration asks for."""

    dtype: str | None
    """None for mixed precision that names none."""
    said: str
    """The settings that ask."""
    contradiction: str
    """Two of them that exclude each other; empty if there are none."""


def wanted(settings: Mapping[str, Any]) -> Precision | None:
    """None if no setting mentions a precision."""
    said = []
    asked = {}
    named = find(settings, "mixed_precision")
    if named is not None and meant(named.value) is not None:
        asked[meant(named.value)] = named
        said.append(named)
    for name, dtype in (("amp", None), ("fp16", "float16"), ("bf16", "bfloat16")):
        flag = find(settings, name)
        if flag is not None:
            said.append(flag)
            # Also if the value is spelt as a string.
            if str(flag.value).strip().lower() in ("true", "1", "yes", "on"):
                asked.setdefault(dtype, flag)
    if not said:
        return None
    found = next(reversed(asked), "float32")
    if said[0] is named:
        said, found = said[:1], meant(said[0].value)
    different = [str(setting) for dtype, setting in asked.items() if dtype is not None]
    contradiction = ""
    if len(different) > 1:
        contradiction = f"{different[0]} and {different[1]} exclude each other"
    return Precision(found, ", ".join(map(str, said)), contradiction)


# accelerate launch sets its own variables, torchrun sets WORLD_SIZE.
ENVIRONMENT = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_DISTRIBUTED_TYPE": "distributed_type",
    "WORLD_SIZE": "num_processes",
    "CUDA_VISIBLE_DEVICES": "gpu_ids",
}
"""Variable -> field of accelerate's file."""


@dataclass(slots=True)
class Launcher:
    """Values by field of accelerate's file, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    """Field -> `mixed_precision=bf16 in launch.yaml`."""
    conflicts: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> str | None:
        """The precision it asks for; None if it does not."""
        return meant(self.values.get("mixed_precision", "nothing"))


def read_launcher(file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]) -> Launcher:
    """Merge file and environment. The environment is what the script will see, so it wins."""
    found = Launcher()
    for variable, name in ENVIRONMENT.items():
        written, given = file.get(name), environ.get(variable) or None
        if None not in (written, given) and str(written).lower() != str(given).lower():
            found.conflicts.append(
                f"{file_name} sets {name}={written}, the environment {variable}={given}"
            )
        for value, place in ((written, file_name), (given, variable)):
            if value is not None:
                found.values[name] = value
                found.said[name] = f"{name}={value} in {place}"
    return found


# --- Configuration files as plain dicts: JSON, TOML, YAML, and .py files of constants.


def read_settings(path: Path, what: str = "configuration") -> dict[str, Any]:
    """Read the file as nested dicts. Raises ConfigError that says what is wrong with it."""
    return read_table(path, what, 16 << 20, py=lambda text: _constants(ast.parse(text).body))


def _constants(body: list[ast.stmt]) -> dict[str, Any]:
    found = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef) and not statement.bases:
            found[statement.name] = _constants(statement.body)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
                # Only literals: what is computed would have to be run.
                with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    if isinstance(target, ast.Name):
                        found[target.id] = ast.literal_eval(statement.value)
    return found
