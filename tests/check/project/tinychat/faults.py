"""The healthy project with one thing wrong at a time; each function is a build function."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tinychat.training import EOS, Chats, TinyChat, build, loss_of
from torch import Tensor, nn

import stepguard


def _with(config: Any, **changes: Any) -> dict[str, Any]:
    return build(config) | changes


def _retrained(
    config: Any, model: nn.Module, dtype: torch.dtype, **settings: Any
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, **settings)
    return _with(
        config, model=model, optimizer=optimizer, scheduler=None, loss_fn=loss_of(model, dtype)
    )


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


# precision


def float16_context(config: Any) -> dict[str, Any]:
    parts = build(config)
    return parts | {"loss_fn": loss_of(parts["model"], torch.float16)}


def fp16_ignored_on_cpu(config: Any) -> dict[str, Any]:
    parts = build(config)
    return parts | {
        "loss_fn": loss_of(parts["model"], torch.float32),
        "autocast": _Accelerator("fp16"),
    }


def amp_without_a_dtype(config: Any) -> dict[str, Any]:
    return _with(config, autocast=_Accelerator("no", native_amp=True))


def launcher_overruled(config: Any) -> dict[str, Any]:
    parts = build(config)
    return parts | {
        "loss_fn": loss_of(parts["model"], torch.float32),
        "autocast": _Accelerator("no"),
    }


def other_accumulation(config: Any) -> dict[str, Any]:
    return _with(config, autocast=_Accelerator("bf16", native_amp=True, accumulation=8))


def scaler_over_half_weights(config: Any) -> dict[str, Any]:
    model = TinyChat(**config.model).half()
    scaler = torch.amp.GradScaler("cpu")
    return _retrained(config, model, torch.float32, eps=1e-4) | {"scaler": scaler}


def scaler_without_need(config: Any) -> dict[str, Any]:
    return _with(config, scaler=torch.amp.GradScaler("cpu"))


# optimizer and layers


def half_weights(config: Any) -> dict[str, Any]:
    return _retrained(config, TinyChat(**config.model).half(), torch.float32)


def optimizer_of_another_model(config: Any) -> dict[str, Any]:
    parts = build(config)
    return parts | {"model": TinyChat(**config.model)}


def head_left_out(config: Any) -> dict[str, Any]:
    parts = build(config)
    chosen = [p for name, p in parts["model"].named_parameters() if not name.startswith("head")]
    return parts | {
        "optimizer": torch.optim.AdamW(chosen, lr=config.optimizer.lr),
        "scheduler": None,
    }


def bfloat16_weights(config: Any) -> dict[str, Any]:
    model = TinyChat(**config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return _retrained(config, model.bfloat16(), torch.float32)


def norm_without_eps(config: Any) -> dict[str, Any]:
    return _retrained(config, TinyChat(norm=nn.RMSNorm(8, eps=1e-20)), torch.bfloat16)


class HandNorm(nn.Module):
    """Adds its eps in the dtype of the tensor, where float16 loses it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8, dtype=torch.float16)), 1e-8

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def hand_written_norm(config: Any) -> dict[str, Any]:
    return _retrained(config, TinyChat(norm=HandNorm()), torch.bfloat16)


# learning rate


def literal_rate(config: Any) -> dict[str, Any]:
    parts = build(config)
    return parts | {
        "optimizer": torch.optim.AdamW(parts["model"].parameters(), lr=5e-4),
        "scheduler": None,
    }


def _lambda(config: Any, factor: Any) -> dict[str, Any]:
    parts = build(config)
    optimizer = torch.optim.AdamW(parts["model"].parameters(), lr=config.optimizer.lr)
    return parts | {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
    }


def floor_as_a_factor(config: Any) -> dict[str, Any]:
    total = config.training.num_train_steps
    return _lambda(config, lambda step: min(1, step / 30) * max((1 - step / total) ** 0.96, 1e-6))


def schedule_too_short(config: Any) -> dict[str, Any]:
    parts = build(config)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        parts["optimizer"], max_lr=config.optimizer.lr, total_steps=100
    )
    return parts | {"scheduler": scheduler}


# data


def _changed(config: Any, index: int, **values: Any) -> dict[str, Any]:
    parts = build(config)
    parts["dataset"].rows[index] |= values
    return parts


def no_label_counts(config: Any) -> dict[str, Any]:
    return _changed(
        config, 5, labels=torch.full((10,), -100), attention_mask=torch.ones(10, dtype=torch.long)
    )


def class_out_of_range(config: Any) -> dict[str, Any]:
    labels = torch.full((10,), -100)
    labels[4] = 99
    return _changed(config, 7, labels=labels)


def answers_cut_off(config: Any) -> dict[str, Any]:
    parts = build(config)
    for index in (2, 3):
        ids = torch.arange(2, 12)
        labels = ids.clone()
        labels[: index + 1] = -100
        assert int(ids[-1]) != EOS
        whole = {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": torch.ones(10, dtype=torch.long),
        }
        parts["dataset"].rows[index] |= whole
    return parts


def nan_in_the_data(config: Any) -> dict[str, Any]:
    sound = torch.randn(16)
    sound[3] = torch.nan
    return _changed(config, 17, sound=sound)


def silence(config: Any) -> dict[str, Any]:
    return _changed(config, 9, sound=torch.zeros(16))


def wrong_unit(config: Any) -> dict[str, Any]:
    return _changed(config, 11, sound=torch.randn(16) * 1e6)


def outside_the_declared_range(config: Any) -> dict[str, Any]:
    return _with(config, data_range={"sound": (-0.5, 0.5)})


def value_missing(config: Any) -> dict[str, Any]:
    return _changed(config, 13, sound=None)


class _Broken(Chats):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 19:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


def unreadable_example(config: Any) -> dict[str, Any]:
    return _with(config, dataset=_Broken())


def repeated_example(config: Any) -> dict[str, Any]:
    parts = build(config)
    parts["dataset"].rows[21] = parts["dataset"].rows[4] | {"id": "another name"}
    return parts


def leaked_example(config: Any) -> dict[str, Any]:
    parts = build(config)
    parts["validation"].rows[2] = parts["dataset"].rows[6] | {"id": "validation-2"}
    return parts


# model


def poisoned_weights(config: Any) -> dict[str, Any]:
    parts = build(config)
    with torch.no_grad():
        parts["model"].head.weight[2, 3] = torch.nan
    return parts


def poisoned_statistics(config: Any) -> dict[str, Any]:
    parts = build(config)
    parts["model"].batch_norm.running_var[1] = torch.inf
    return parts


def loss_of_zero_over_zero(config: Any) -> dict[str, Any]:
    parts = build(config)
    inner, model = parts["loss_fn"], parts["model"]

    def loss(batch: Any) -> Tensor:
        mask = torch.zeros(4)
        return inner(batch)["text"] + (model.alpha * mask).sum() / mask.sum()

    return parts | {"loss_fn": loss}


def infinite_slope(config: Any) -> dict[str, Any]:
    parts = build(config)
    inner, model = parts["loss_fn"], parts["model"]
    return parts | {
        "loss_fn": lambda batch: inner(batch)["text"] + (model.alpha - model.alpha.detach()).sqrt()
    }


def runaway_scalar(config: Any) -> dict[str, Any]:
    parts = build(config)
    with torch.no_grad():
        parts["model"].alpha.fill_(88.7)
    return parts


# checklist


def eps_without_effect(config: Any) -> dict[str, Any]:
    parts = build(config)
    inner = parts["loss_fn"]

    def loss(batch: Any) -> Tensor:
        counted = batch["labels"].ne(-100).float().sum().clamp(min=1) + 1e-8
        return inner(batch)["text"] / counted

    return parts | {"loss_fn": loss}


def policy_without_rewind(config: Any) -> dict[str, Any]:
    policy = stepguard.Policy(actions=("skip", "stop"))
    return _with(
        config, guard=stepguard.GuardConfig(clip_norm=0.5, checkpoint_every=100, policy=policy)
    )


def rare_checkpoints(config: Any) -> dict[str, Any]:
    return _with(config, guard=stepguard.GuardConfig(clip_norm=0.5, checkpoint_every=5000))


def no_warmup(config: Any) -> dict[str, Any]:
    return _lambda(config, lambda step: 1.0)


def raw_latents(config: Any) -> dict[str, Any]:
    parts = build(config)
    for row in parts["dataset"].rows:
        row["sound"] = row["sound"] * 300
    return parts


def clipping_with_sgd(config: Any) -> dict[str, Any]:
    parts = build(config)
    optimizer = torch.optim.SGD(parts["model"].parameters(), lr=config.optimizer.lr)
    guard = stepguard.GuardConfig(clip_norm=5.0, checkpoint_every=100)
    return parts | {"optimizer": optimizer, "scheduler": None, "guard": guard}


def several_at_once(config: Any) -> dict[str, Any]:
    """What the picture in the docs shows."""
    parts = half_weights(config)
    chats = parts["dataset"]
    chats.rows[5] |= {"labels": torch.full((10,), -100)}
    chats.rows[17]["sound"][3] = torch.nan
    chats.rows[21] = chats.rows[4] | {"id": "another name"}
    return parts
