"""Finding a setting whatever it is called: `lr`, `learning_rate`, `trainer.lr`, `LEARNING_RATE`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


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
