"""What names in a checkpoint mean: element types of all formats, and the role of a value."""

from __future__ import annotations

import re
from typing import Any

from stepguard.records.checks import Role

# --- Element types by their torch names.

SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "bool": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
}  # fmt: skip


def _table(text: str) -> dict[str, str]:
    """Parse words of `name=torch_name`."""
    return dict(word.split("=") for word in text.split())


ALIASES = _table(
    "float=float32 double=float64 half=float16 long=int64 int=int32 short=int16 "
    "cfloat=complex64 cdouble=complex128 chalf=complex32"
)
STORAGES = _table(
    """
    FloatStorage=float32 DoubleStorage=float64 HalfStorage=float16 BFloat16Storage=bfloat16
    LongStorage=int64 IntStorage=int32 ShortStorage=int16 CharStorage=int8 ByteStorage=uint8
    BoolStorage=bool UntypedStorage=uint8 ComplexFloatStorage=complex64
    ComplexDoubleStorage=complex128 QInt8Storage=qint8 QUInt8Storage=quint8 QInt32Storage=qint32
    QUInt4x2Storage=quint4x2 QUInt2x4Storage=quint2x4
    """
)
SAFETENSORS = _table(
    """
    F64=float64 F32=float32 F16=float16 BF16=bfloat16 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2
    F8_E8M0=float8_e8m0fnu F8_E4M3FNUZ=float8_e4m3fnuz F8_E5M2FNUZ=float8_e5m2fnuz C64=complex64
    I64=int64 I32=int32 I16=int16 I8=int8 U64=uint64 U32=uint32 U16=uint16 U8=uint8 BOOL=bool
    """
)
SAFETENSORS_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of types that are packed below a byte: their size is checked, their values are not."""
NUMPY = _table(
    """
    f8=float64 f4=float32 f2=float16 c16=complex128 c8=complex64 i8=int64 i4=int32 i2=int16 i1=int8
    u8=uint64 u4=uint32 u2=uint16 u1=uint8 b1=bool
    """
)
LARGEST = {"float64": 1.797e308, "float32": 3.402e38, "bfloat16": 3.389e38, "float16": 65504.0}
"""Types whose values are judged by magnitude; 8-bit floats have a scale stored beside them."""


def is_real(dtype: str) -> bool:
    """Can an element be NaN or infinite?"""
    return dtype.startswith(("float", "bfloat", "complex")) and dtype != "float4_e2m1fn_x2"


def is_shape(value: object) -> bool:
    """Could these be the sizes or strides of a tensor? Only then may they be multiplied."""
    if not isinstance(value, tuple | list) or len(value) > 64:
        return False
    # Python integers have no end, and one of more than 4300 digits cannot even be printed
    return all(type(n) is int and abs(n) <= 1 << 63 for n in value)


# --- Roles, by structure first and by name second.

_PARTS: dict[Role, str] = {
    "scaler": r"(^|[_:.])(grad|amp|loss)?_?scaler(s|_state|_state_dict)?$|^amp$",
    "scheduler": r"sched",
    "ema": r"(^|[_:.])ema([_.]|$)|^shadow(_params)?$|^averaged_model$|(^|_)swa(_|$)",
    "optimizer": r"optimizer|(^|[_:.])optim(s|_|\.|$)|^opts?(_[a-z]+)?$",
    "rng": r"(^|[_:.])rng([_.]|$)|random_state|random_number"
    r"|^(numpy|python|torch|cuda)_random|^rngs?$",
    "other": r"^(callbacks?|loops|hyper_parameters|hparams.*|config|cfg|args|metrics?|history"
    r"|losses|loss|sampler.*|best_.*|results?|meta(data)?|train_state|data_?loader.*|tokenizer)$",
}
_FILES: dict[Role, str] = {
    "optimizer": r"^(optimizer|optim)|optim_states|_optimizer\.",
    "scheduler": r"^(lr_)?scheduler",
    "scaler": r"^(grad_)?scaler",
    "rng": r"^(rng_state|random_states?|rng)",
    "ema": r"(^|[_-])ema([_.-]|$)",
    "other": r"^(training_args|sampler|dl_state|loader|args)",
}
BUFFERS = re.compile(
    r"(^|[_./])(running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|masked_bias|mask|attn_mask|causal_mask|attn_bias|alibi"
    r"|min_val|max_val|relative_position_index|freqs_cis|cos_cached|sin_cached"
    r"|alphas_cumprod\w*|betas|cached_\w+|pos_ids|observer_enabled|fake_quant_enabled)$"
)
NORM_STATISTICS = re.compile(r"(^|[_./])running_(mean|var)$")
SQUARES = re.compile(
    r"(^|[/.])((max_)?exp_avg_sq(_row|_col)?|square_avg|acc_delta)$|\brunning_var$"
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
    """Recognise the state of an optimizer, scheduler or scaler by its keys."""
    if "param_groups" in value and "state" in value:
        return "optimizer"
    is_schedule = any(key in value for key in ("_step_count", "base_lrs", "_last_lr"))
    if "last_epoch" in value and is_schedule:
        return "scheduler"
    if "growth_factor" in value and "backoff_factor" in value:
        return "scaler"
    return None


def role_of_part(key: Any) -> Role | None:
    """Return the role of an entry by its name: of `model_ema.weight` the first part counts."""
    if not isinstance(key, str) or not key:
        return None
    return _first_match(_PARTS, key[:100].lower().partition(".")[0])


def role_of_file(name: str) -> Role | None:
    """Return the role by the name of the file, for formats that spread a state over several."""
    return _first_match(_FILES, name.lower())


def _first_match(table: dict[Role, str], text: str) -> Role | None:
    for role, pattern in table.items():
        if re.search(pattern, text):
            return role
    return None


def role_of_tensor(context: Role | None, name: str, dtype: str, *, parameter: bool = False) -> Role:
    """Return the role of one tensor below a context (None: part of a model)."""
    if context is not None:
        return context
    if parameter:
        return "parameter"
    if "/_buffers/" in f"/{name}" or BUFFERS.search(name) or not is_real(dtype):
        return "buffer"
    return "parameter"
