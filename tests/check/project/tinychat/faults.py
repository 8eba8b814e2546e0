"""The healthy project with one thing wrong at a time; every name of FAULTS is a build function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tinychat.training import Chats, TinyChat, build, loss_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import stepguard

Parts = dict[str, Any]
IGNORED = torch.full((10,), -100)
WHOLE = torch.ones(10, dtype=torch.long)


class _Accelerator:
    """The parts of accelerate's Accelerator that are looked at, with its behaviour on a CPU."""

    distributed_type = "DistributedType.MULTI_CPU"
    num_processes = 2
    scaler = None

    def __init__(
        self, mixed_precision: str, *, native_amp: bool = False, accumulation: int = 2
    ) -> None:
        self.mixed_precision, self.native_amp = mixed_precision, native_amp
        self.gradient_accumulation_steps = accumulation

    def autocast(self) -> AbstractContextManager[Any]:
        if not self.native_amp:
            return nullcontext()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)
        return torch.autocast("cpu", dtype=dtype)


class HandNorm(nn.Module):
    """Adds its eps in the dtype of the tensor, where float16 loses it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8, dtype=torch.float16)), 1e-8

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _Broken(Chats):
    def __getitem__(self, index: int) -> Parts:
        if index == 19:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


def _in(parts: Parts, dtype: torch.dtype, **more: Any) -> Parts:
    return {"loss_fn": loss_of(parts["model"], dtype), **more}


def _optimized(parts: Parts, chosen: Any = None, lr: float = 5e-5) -> Parts:
    parameters = chosen or parts["model"].parameters()
    return {"optimizer": torch.optim.AdamW(parameters, lr=lr), "scheduler": None}


def _retrained(model: nn.Module, dtype: torch.dtype = torch.float32, **settings: Any) -> Parts:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, **settings)
    return {"optimizer": optimizer, "scheduler": None} | _in({"model": model}, dtype, model=model)


def _moved(model: TinyChat) -> TinyChat:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def _scheduled(parts: Parts, factor: Callable[[int], float]) -> Parts:
    found = _optimized(parts)
    return found | {"scheduler": LambdaLR(found["optimizer"], factor)}


def _row(parts: Parts, index: int, **values: Any) -> Parts:
    parts["dataset"].rows[index] |= values
    return {}


def _set(tensor: Tensor, place: Any, value: float) -> Parts:
    tensor.data[place] = value
    return {}


def _zero_over_zero(parts: Parts) -> Parts:
    inner, model = parts["loss_fn"], parts["model"]

    def loss(batch: Any) -> Tensor:
        mask = torch.zeros(4)
        return inner(batch)["text"] + (model.alpha * mask).sum() / mask.sum()

    return {"loss_fn": loss}


def _lost_eps(parts: Parts) -> Parts:
    inner = parts["loss_fn"]

    def loss(batch: Any) -> Tensor:
        counted = batch["labels"].ne(-100).float().sum().clamp(min=1) + 1e-8
        return inner(batch)["text"] / counted

    return {"loss_fn": loss}


def _by_target(parts: Parts) -> Parts:
    model = parts["model"]

    def loss(batch: Any) -> Tensor:
        logits, _ = model(batch["input_ids"])
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"])

    for index in (0, 1):
        parts["dataset"].rows[index]["labels"][4:] = -100
    return {"loss_fn": loss}


def _steep(parts: Parts) -> Parts:
    inner, alpha = parts["loss_fn"], parts["model"].alpha
    return {"loss_fn": lambda batch: inner(batch)["text"] + (alpha - alpha.detach()).sqrt()}


def _loud(parts: Parts) -> Parts:
    for row in parts["dataset"].rows:
        row["sound"] = row["sound"] * 300
    return {}


def _guard(clip_norm: float = 0.5, every: int = 100, **more: Any) -> Parts:
    return {"guard": stepguard.GuardConfig(clip_norm=clip_norm, checkpoint_every=every, **more)}


def _copied(rows: list[Parts], index: int, source: Parts, name: str) -> Parts:
    rows[index] = source | {"id": name}
    return {}


def _several(parts: Parts) -> Parts:
    """What the picture in the docs shows."""
    _row(parts, 5, labels=IGNORED)
    parts["dataset"].rows[17]["sound"][3] = torch.nan
    return _retrained(TinyChat().half())


FAULTS: dict[str, Callable[[Parts], Parts]] = {
    "float16_context": lambda p: _in(p, torch.float16),
    "fp16_ignored_on_cpu": lambda p: _in(p, torch.float32, autocast=_Accelerator("fp16")),
    "amp_without_a_dtype": lambda p: {"autocast": _Accelerator("no", native_amp=True)},
    "launcher_overruled": lambda p: _in(p, torch.float32, autocast=_Accelerator("no")),
    "other_accumulation": lambda p: {
        "autocast": _Accelerator("bf16", native_amp=True, accumulation=8)
    },
    "half_weights": lambda p: _retrained(TinyChat().half()),
    "optimizer_of_another_model": lambda p: {"model": TinyChat()},
    "head_left_out": lambda p: _optimized(
        p, [q for name, q in p["model"].named_parameters() if not name.startswith("head")]
    ),
    "bfloat16_weights": lambda p: _retrained(_moved(TinyChat()).bfloat16()),
    "norm_without_eps": lambda p: _retrained(
        TinyChat(norm=nn.RMSNorm(8, eps=1e-20)), torch.bfloat16
    ),
    "hand_written_norm": lambda p: _retrained(TinyChat(norm=HandNorm()), torch.bfloat16),
    "literal_rate": lambda p: _optimized(p, lr=5e-4),
    "floor_as_a_factor": lambda p: _scheduled(
        p, lambda step: min(1, step / 30) * max((1 - step / 300) ** 0.96, 1e-6)
    ),
    "schedule_too_short": lambda p: {
        "scheduler": OneCycleLR(p["optimizer"], max_lr=5e-5, total_steps=100)
    },
    "no_label_counts": lambda p: _row(p, 5, labels=IGNORED, attention_mask=WHOLE),
    "nan_in_the_data": lambda p: _row(
        p, 17, sound=torch.randn(16).index_fill(0, torch.tensor(3), torch.nan)
    ),
    "silence": lambda p: _row(p, 9, sound=torch.zeros(16)),
    "wrong_unit": lambda p: _row(p, 11, sound=torch.randn(16) * 1e6),
    "outside_the_declared_range": lambda p: {"data_range": {"sound": (-0.5, 0.5)}},
    "unreadable_example": lambda p: {"dataset": _Broken()},
    "leaked_example": lambda p: _copied(
        p["validation"].rows, 2, p["dataset"].rows[6], "validation-2"
    ),
    "poisoned_weights": lambda p: _set(p["model"].head.weight, (2, 3), torch.nan),
    "poisoned_statistics": lambda p: _set(p["model"].batch_norm.running_var, 1, torch.inf),
    "loss_of_zero_over_zero": _zero_over_zero,
    "infinite_slope": _steep,
    "mean_over_targets": _by_target,
    "runaway_scalar": lambda p: _set(p["model"].alpha, ..., 88.7),
    "eps_without_effect": _lost_eps,
    "policy_without_rewind": lambda p: _guard(policy=stepguard.Policy(actions=("skip", "stop"))),
    "rare_checkpoints": lambda p: _guard(every=5000),
    "no_warmup": lambda p: _scheduled(p, lambda step: 1.0),
    "raw_latents": _loud,
    "clipping_with_sgd": lambda p: {
        "optimizer": torch.optim.SGD(p["model"].parameters(), lr=5e-5),
        "scheduler": None,
        **_guard(clip_norm=5.0),
    },
    "several_at_once": _several,
}


def __getattr__(name: str) -> Callable[[Any], Parts]:
    if name not in FAULTS:
        raise AttributeError(name)

    def fault(config: Any) -> Parts:
        parts = build(config)
        return parts | FAULTS[name](parts)

    return fault
