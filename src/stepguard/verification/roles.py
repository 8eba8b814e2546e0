"""The role of a stored value (parameter, buffer, optimizer, ...), by structure, then by name."""

from __future__ import annotations

import re
from typing import Any

from stepguard.records.verification import Role
from stepguard.verification import dtype_names

_WORDS: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("scaler", re.compile(r"(^|[_:.])(grad|amp|loss)?_?scaler(s|_state|_state_dict)?$|^amp$")),
    ("scheduler", re.compile(r"sched")),
    ("ema", re.compile(r"(^|[_:.])ema([_.]|$)|^shadow(_params)?$|^averaged_model$|(^|_)swa(_|$)")),
    ("optimizer", re.compile(r"optimizer|(^|[_:.])optim(s|_|\.|$)|^opts?(_[a-z]+)?$")),
    (
        "rng",
        re.compile(
            r"(^|[_:.])rng([_.]|$)|random_state|random_number"
            r"|^(numpy|python|torch|cuda)_random|^rngs?$"
        ),
    ),
    (
        "other",
        re.compile(
            r"^(callbacks?|loops|hyper_parameters|hparams.*|config|cfg|args|metrics?|history"
            r"|losses|loss|sampler.*|best_.*|results?|meta(data)?|train_state|data_?loader.*"
            r"|tokenizer)$"
        ),
    ),
)
_FILES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"^(optimizer|optim)|optim_states|_optimizer\.")),
    ("scheduler", re.compile(r"^(lr_)?scheduler")),
    ("scaler", re.compile(r"^(grad_)?scaler")),
    ("rng", re.compile(r"^(rng_state|random_states?|rng)")),
    ("ema", re.compile(r"(^|[_-])ema([_.-]|$)")),
    ("other", re.compile(r"^(training_args|sampler|dl_state|loader|args)")),
)
BUFFERS = re.compile(
    r"(^|[_./])(running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|masked_bias|mask|attn_mask|causal_mask|attn_bias|alibi"
    r"|min_val|max_val|relative_position_index|freqs_cis|cos_cached|sin_cached"
    r"|alphas_cumprod\w*|betas|cached_\w+|pos_ids|observer_enabled|fake_quant_enabled)$"
)
NORM_STATISTICS = re.compile(r"(^|[_./])running_(mean|var)$")
SQUARES = re.compile(
    r"^(max_)?exp_avg_sq(_row|_col)?$|^square_avg$|^acc_delta$|^running_var$|\brunning_var$"
)
"""Sums of squares: never negative."""
USUALLY_ZERO = re.compile(
    r"lora_b|lora_embedding_b|zero|adaln|modulation|gate|gamma|alpha|proj_out|out_proj|c_proj"
    r"|o_proj|to_out|down_proj|fc2|linear2|conv2|conv3|wo\b|out_layers|final|head|bias|pad|mask"
    r"|cache|residual|scale",
    re.IGNORECASE,
)
"""Weights that many recipes start at zero."""


def structural(value: dict[Any, Any]) -> Role | None:
    """Tell the state of an optimizer, scheduler or scaler by its keys."""
    if "param_groups" in value and "state" in value:
        return "optimizer"
    is_schedule = any(key in value for key in ("_step_count", "base_lrs", "_last_lr"))
    if "last_epoch" in value and is_schedule:
        return "scheduler"
    if "growth_factor" in value and "backoff_factor" in value:
        return "scaler"
    return None


def named(key: Any) -> Role | None:
    """Tell by the name of an entry; of a dotted name the first part counts (`model_ema.weight`)."""
    if not isinstance(key, str) or not key:
        return None
    return _first_match(_WORDS, key[:100].lower().partition(".")[0])


def of_file(name: str) -> Role | None:
    """Tell by the name of the file, for formats that spread a state over several."""
    return _first_match(_FILES, name.lower())


def of_tensor(context: Role | None, name: str, dtype: str, *, parameter: bool = False) -> Role:
    """Return the role of one tensor below a context (None: part of a model)."""
    if context is not None:
        return context
    if parameter:
        return "parameter"
    if "/_buffers/" in f"/{name}" or BUFFERS.search(name) or not dtype_names.is_real(dtype):
        return "buffer"
    return "parameter"


def slot(name: str) -> str:
    """Return the last part of a name: `exp_avg_sq` of `optimizer/layer.weight/exp_avg_sq`."""
    return re.split(r"[/.]", name)[-1]


def _first_match(table: tuple[tuple[Role, re.Pattern[str]], ...], text: str) -> Role | None:
    for role, pattern in table:
        if pattern.search(text):
            return role
    return None
