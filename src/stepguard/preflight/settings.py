"""Configuration and launcher as plain values: read, never executed."""

from __future__ import annotations

import ast
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from stepguard._errors import ConfigError

# --- Finding a setting whatever it is called: `lr`, `learning_rate`, `trainer.lr`,
# `LEARNING_RATE`.


def names(text: str) -> tuple[str, ...]:
    """`a b c` as a tuple."""
    return tuple(text.split())


NAMES: dict[str, tuple[str, ...]] = {
    "lr": names("learning_rate lr max_lr peak_lr base_lr"),
    "min_lr": names("min_lr min_learning_rate lr_min final_lr eta_min"),
    "clip": names(
        "clip_norm grad_clip grad_clip_norm clip_grad_norm max_grad_norm gradient_clip_val "
        "gradient_clipping grad_norm_clip clip_grad"
    ),
    "warmup": names("warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup"),
    "steps": names(
        "num_train_steps max_steps train_num_steps total_steps num_steps train_steps max_iters "
        "steps"
    ),
    "epochs": names("num_train_epochs max_epochs num_epochs epochs"),
    "accumulation": names(
        "gradient_accumulation_steps gradient_accumulate_every accumulate_grad_batches "
        "accumulation_steps grad_accum grad_accum_steps accum_steps"
    ),
    "save_every": names(
        "checkpoint_every save_every save_steps save_every_n_steps save_interval "
        "checkpoint_interval ckpt_every every_n_train_steps save_and_sample_every save_freq "
        "checkpointing_steps"
    ),
    "keep": names(
        "save_total_limit checkpoints_total_limit total_limit keep_last max_checkpoints save_top_k "
        "keep"
    ),
    "batch_size": names("train_batch_size per_device_train_batch_size micro_batch_size batch_size"),
    "max_length": names(
        "max_length max_seq_length max_seq_len model_max_length block_size context_length seq_len"
    ),
    "mixed_precision": names("mixed_precision precision amp_dtype autocast_dtype"),
    "weights": names("torch_dtype model_dtype param_dtype weights_dtype dtype"),
    "fp16": names("fp16 use_fp16 half"),
    "bf16": names("bf16 use_bf16"),
    "amp": names("amp use_amp native_amp"),
    "eos": names("eos_token_id eos_id"),
    "ignore_index": names("ignore_index label_ignore_index"),
}
"""Meaning -> names of the last part of a key, most telling first; case does not matter."""
# Not `float`, which takes "nan" and "infinity" for numbers as well.
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Setting(NamedTuple):
    """One value and the dotted key it stands under."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}"


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    """Yield every leaf with its dotted key. A list is a leaf unless it holds mappings."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{key}.")
        elif is_list_of_mappings(value):
            for position, part in enumerate(value):
                yield from flat(part, f"{key}.{position}.")
        else:
            yield Setting(key, value)


def is_list_of_mappings(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(part, Mapping) for part in value)


def find(settings: Mapping[str, Any], meaning: str) -> Setting | None:
    """Find the setting with this meaning: the most telling name, and the nearest to the root."""
    leaves = list(flat(settings))
    for name in NAMES[meaning]:
        same = [leaf for leaf in leaves if last_part(leaf.key) == name and leaf.value is not None]
        if same:
            return min(same, key=lambda leaf: leaf.key.count("."))
    return None


def number(settings: Mapping[str, Any], meaning: str) -> float | None:
    """The setting as a number; a string that spells one counts as what was meant."""
    found = find(settings, meaning)
    if found is None:
        return None
    return as_number(found.value)


def as_number(value: Any) -> float | None:
    """None for what is not a finite number; the item `config.types` tells about strings."""
    # A bool is an int in Python.
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and spells_number(value):
        value = float(value.replace("_", ""))
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def spells_number(text: str) -> bool:
    return NUMBER.fullmatch(text.strip()) is not None


def last_part(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")


# --- What a configuration means by its precision: a dtype, AMP without one, or nothing.


SPELLINGS = {
    "float32": "no none false 32 32-true fp32 float32 float",
    "float16": "16 fp16 float16 half 16-mixed 16-true",
    "bfloat16": "bf16 bfloat16 bf16-mixed bf16-true",
    "float64": "64 64-true fp64 float64 double",
}
"""dtype -> how accelerate, Lightning, transformers and plain scripts spell it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The precision a configuration asks for."""

    dtype: str | None
    """None: it asks for mixed precision without naming the dtype."""
    said: str
    """`trainer.fp16=True`, with every setting that has a say."""


def meant(word: object) -> str | None:
    """`bf16-mixed` -> `bfloat16`; None for what is not a precision. Case does not matter."""
    plain = str(word).removeprefix("torch.").strip().lower()
    for dtype, spellings in SPELLINGS.items():
        if plain in spellings.split():
            return dtype
    return None


def wanted(settings: Mapping[str, Any]) -> Wanted | None:
    """Find the precision of the arithmetic; None if the configuration does not mention it."""
    named = find(settings, "mixed_precision")
    if named is not None:
        dtype = meant(named.value)
        if dtype is not None:
            return Wanted(dtype, str(named))
    flags = {}
    for name in ("fp16", "bf16", "amp"):
        setting = find(settings, name)
        if setting is not None:
            flags[name] = setting
    if not flags:
        return None
    said = ", ".join(map(str, flags.values()))
    if _is_on(flags.get("bf16")):
        return Wanted("bfloat16", said)
    if _is_on(flags.get("fp16")):
        return Wanted("float16", said)
    if _is_on(flags.get("amp")):
        return Wanted(None, said)
    return Wanted("float32", said)


def contradiction(settings: Mapping[str, Any]) -> str:
    """Name two settings of one configuration that exclude each other; empty if there are none."""
    fp16 = find(settings, "fp16")
    bf16 = find(settings, "bf16")
    if _is_on(fp16) and _is_on(bf16):
        return f"{fp16} and {bf16} exclude each other"
    named = find(settings, "mixed_precision")
    dtype = None
    if named is not None:
        dtype = meant(named.value)
    for flag, means in ((fp16, "float16"), (bf16, "bfloat16")):
        if _is_on(flag) and dtype not in (None, means):
            return f"{named} and {flag} exclude each other"
    return ""


def _is_on(flag: Setting | None) -> bool:
    """True for a flag that is set, also if its value is spelt as a string."""
    if flag is None:
        return False
    return str(flag.value).strip().lower() in ("true", "1", "yes", "on")


# --- What the launcher decides: accelerate's file, and the environment accelerate and torchrun
# set.


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
    """Values by field, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    """File and environment say different things."""

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def dtype(self) -> str | None:
        if "mixed_precision" not in self.values:
            return None
        return meant(self.values["mixed_precision"])

    def said(self, name: str) -> str:
        """`mixed_precision=bf16 in launch.yaml`."""
        return f"{name}={self.values[name]} in {self.places[name]}"

    def number(self, name: str) -> float | None:
        return as_number(self.values.get(name))


def read_launcher(file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]) -> Launcher:
    """Merge both sources. The environment is what the script will see, so it wins."""
    found = Launcher()
    for name in ENVIRONMENT.values():
        if file.get(name) is not None:
            found.values[name] = file[name]
            found.places[name] = file_name
    for variable, name in ENVIRONMENT.items():
        value = environ.get(variable)
        if not value:
            continue
        if name in found.values and str(found.values[name]).lower() != value.lower():
            found.conflicts.append(
                f"{file_name} says {name}={found.values[name]}, the environment {variable}={value}"
            )
        found.values[name] = value
        found.places[name] = variable
    return found


# --- Configuration files as plain dicts: JSON, TOML, YAML, and .py files of constants.


LARGEST = 16 * 2**20
"""Bytes; a larger file is not a configuration."""


def read_settings(path: Path, what: str = "configuration") -> dict[str, Any]:
    """Read the file as nested dicts. Raises ConfigError that says what is wrong with it."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path}: {path.suffix or 'no suffix'} is not a {what} file; use one of "
            f"{', '.join(READERS)}."
        )
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ConfigError(f"{path} has {size:,} bytes; a {what} file has at most {LARGEST:,}.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path} cannot be read as a {what}: {fault}.") from fault
    try:
        # All readers but PyYAML raise a kind of ValueError or SyntaxError.
        found = reader(text)
    except (ValueError, SyntaxError, RecursionError, yaml.YAMLError) as fault:
        said = " ".join(str(fault).split()).rstrip(".")[:200]
        raise ConfigError(f"{path} is not valid {path.suffix[1:]}: {said}.") from fault
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a {type(found).__name__}; a {what} is a mapping of names to values."
        )
    return found


class UnquotedNumber(str):
    """`1e-4` in YAML, without quotes: PyYAML (YAML 1.1) reads a text, OmegaConf a number."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's own reading, with a mark at texts that were meant as numbers."""


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    value = str(loader.construct_scalar(node))
    if node.style is None and spells_number(value):
        return UnquotedNumber(value)
    return value


_Loader.add_constructor("tag:yaml.org,2002:str", _text)


def _yaml(text: str) -> Any:
    # An empty file is None to PyYAML.
    return yaml.load(text, _Loader) or {}


def _python(text: str) -> dict[str, Any]:
    return _constants(ast.parse(text).body)


def _constants(body: list[ast.stmt]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef) and not statement.bases:
            found[statement.name] = _constants(statement.body)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                _take(found, target, statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            _take(found, statement.target, statement.value)
    return found


def _take(found: dict[str, Any], target: ast.expr, value: ast.expr) -> None:
    """Add the assigned value if it is a literal."""
    if isinstance(target, ast.Name):
        try:
            found[target.id] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return


READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".py": _python,
}


# --- The learning rates that a configuration names.


RATE_NAMES = (*NAMES["lr"], "init_lr")


def rate_settings(settings: Mapping[str, Any]) -> list[Setting]:
    """Every setting that is called a learning rate, whatever its value is."""
    return [leaf for leaf in flat(settings) if last_part(leaf.key) in RATE_NAMES]


def configured_rate(path: Path) -> float:
    """The one learning rate of a configuration file; several different ones are refused by name."""
    rates = {}
    for leaf in rate_settings(read_settings(path)):
        rate = as_number(leaf.value)
        if rate is not None:
            rates[leaf.key] = rate
    if not rates:
        raise ConfigError(
            f"--config {path} names no learning rate ({', '.join(RATE_NAMES)}); give --lr."
        )
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name}={rate:g}" for name, rate in rates.items())
        raise ConfigError(
            f"--config {path} names several learning rates ({listed}); give the one that counts by "
            "--lr."
        )
    return next(iter(rates.values()))
