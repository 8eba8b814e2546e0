"""stepguard inside DeepSpeed: call `guard(engine)` after `deepspeed.initialize`, on every rank.

    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    guard = stepguard.integrations.deepspeed.guard(engine)

Writing `loss = guard.loss(loss_fn, batch)` in place of `loss = loss_fn(batch)` lets a bad step be
located: `loss_fn` calls the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepguard._errors import ConfigError, SaveRefused, StepguardError
from stepguard.engine.wiring import check_config
from stepguard.integrations._engine import EngineGuard, bad_slots, plain_copy
from stepguard.integrations._parts import Framework, around, refuse_settings_of_step
from stepguard.records import Decision, GuardConfig
from stepguard.sentinel.gradients import bad_buffers
from stepguard.state.batch import LossFn, total_loss
from stepguard.state.sharded import has_room
from stepguard.tensors.names import swapped
from stepguard.tensors.values import is_finite

DEEPSPEED = Framework("deepspeed", first="0.19", before="0.20", tested="0.19.8")
DEEPSPEED.require()

from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402 (first the version)
from deepspeed.runtime.zero.partition_parameters import GatheredParameters  # noqa: E402
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

__all__ = ["SaveRefused", "ZeroGuard", "guard"]

OF_ENGINE = ("backward", "step", "save_checkpoint", "load_checkpoint", "global_steps", "module")
OF_ZERO_1_2 = ("averaged_gradients", "check_grad_overflow", "has_overflow", "_update_scale")
OF_ZERO_3 = ("averaged_gradients", "_overflow_check_and_loss_scale_update", "_update_scale")


def guard(engine: DeepSpeedEngine, config: GuardConfig | None = None) -> ZeroGuard:
    """Guard the steps and the checkpoints of this engine. `close()` undoes everything."""
    if type(engine) is not DeepSpeedEngine:
        raise ConfigError(
            f"guard() got a {type(engine).__name__}; give the DeepSpeedEngine that "
            "deepspeed.initialize returned (a PipelineEngine is not supported)."
        )
    DEEPSPEED.need(engine, *OF_ENGINE)
    zero = engine.optimizer
    if type(zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        raise ConfigError(
            f"the engine updates with {type(zero).__name__}; this guard works with ZeRO stages 1, "
            '2 and 3: set {"zero_optimization": {"stage": 1}}.'
        )
    third = type(zero) is DeepSpeedZeroOptimizer_Stage3
    DEEPSPEED.need(zero, *(OF_ZERO_3 if third else OF_ZERO_1_2))
    offloads = zero.offload_optimizer if third else zero.cpu_offload
    if offloads or engine.mpu is not None:
        what = "offloads the optimizer" if offloads else "is split over ranks (mpu)"
        raise ConfigError(f"the engine {what}, which this guard has not been tested with.")
    settings = check_config(config)
    refuse_settings_of_step(settings, 'use "gradient_clipping" and "fp16" of the engine')
    return ZeroGuard(engine, settings)


class ZeroGuard(EngineGuard):
    """Guards one engine. A context manager; built by `guard`.

    A bad update is passed over on all ranks by the path that DeepSpeed takes when fp16 overflows,
    without a change of the loss scale.
    """

    no_rewind = "this run has saved no checkpoint through engine.save_checkpoint yet"

    def __init__(self, engine: Any, config: GuardConfig) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        super().__init__("deepspeed", engine.module, self._zero.optimizer, config)
        self._saved: tuple[int, Path, str] | None = None
        """Step, folder and tag of the newest checkpoint, which was good when it was written."""
        around(self._undo, engine, "backward", self._backward)
        around(self._undo, engine, "step", self._step)
        around(self._undo, engine, "save_checkpoint", self._save)
        around(self._undo, self._zero, "step", self._update)

    def loss(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """Return `loss_fn(batch)` and remember it, so that a bad step can be located.

        Give the result to `engine.backward`. Call the engine in `loss_fn`, not the model inside it:
        a bad micro-batch is run again on a copy of the model that DeepSpeed knows nothing of.
        """
        self._remember(functools.partial(self._divided, loss_fn), batch)
        return total_loss(loss_fn(batch))

    # --- what the engine does: each gets the original first ---

    def _backward(
        self,
        original: Callable[..., Any],
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Any:
        divisor = self._engine.gradient_accumulation_steps() if scale_wrt_gas else 1
        self._losses.append(loss.detach() / divisor)
        return original(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        skipped = f"DeepSpeed skipped the update (skipped_steps: {self._engine.skipped_steps})"
        norm = self._zero._global_grad_norm
        self._concluded(
            overflow=skipped if self._zero.overflow else "",
            norm=None if norm is None else float(norm),
        )
        self._context.step = int(self._engine.global_steps)
        return result

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._context.step = int(self._engine.global_steps)
        return super()._update(original, *args, **kwargs)

    def _passed_over(self, original: Callable[..., Any]) -> Any:
        """Let ZeRO drop gradients and update as after an overflow; the loss scale stays."""
        zero = self._zero

        def overflowed(update_scale: bool = True) -> bool:
            zero.overflow = True
            return True

        with ExitStack() as undo:
            undo.enter_context(swapped(zero, "_update_scale", lambda *_: None))
            if type(zero) is DeepSpeedZeroOptimizer_Stage3:
                name = "_overflow_check_and_loss_scale_update"
                undo.enter_context(swapped(zero, name, overflowed))
            else:
                undo.enter_context(swapped(zero, "check_grad_overflow", other=True))
                undo.enter_context(swapped(zero, "has_overflow", lambda *_, **__: True))
            return original()

    def _save(self, original: Callable[..., Any], save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        tag = kwargs.get("tag") or (args[0] if args else None)
        tag = tag or f"global_step{self._engine.global_steps}"
        self._refuse_bad_state(f"{save_dir}/{tag}")
        result = original(save_dir, *args, **kwargs)
        self._saved = int(self._engine.global_steps), Path(save_dir), str(tag)
        return result

    def _target(self) -> tuple[int, str] | None:
        if self._saved is None:
            return None
        step, folder, tag = self._saved
        return step, str(folder / tag)

    def _rewind(self, decision: Decision) -> Decision:
        assert self._saved is not None
        step, folder, tag = self._saved
        loaded, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        if loaded is None:
            why = f"{folder}/{tag} could not be loaded"
            return replace(decision, action="stop", reason=why, rewound_to=None)
        return replace(decision, rewound_to=step)

    # --- what the engine keeps ---

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._engine.device
        return device

    @property
    def _scale(self) -> float | None:
        return float(self._zero.loss_scale) if self._engine.fp16_enabled() else None

    @property
    def _calibrates(self) -> bool:
        return bool(self._engine.fp16_enabled() and self._zero.dynamic_loss_scale)

    def _trouble(self) -> list[str]:
        module = self._engine.module
        found = [f"param:{name}" for name, part in parts_held(self._engine) if not is_finite(part)]
        found += bad_buffers({"": module}) + bad_slots(self.optimizer)
        return list(dict.fromkeys(found))

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the reduced gradients, by name."""
        zero = self._zero
        third = type(zero) is DeepSpeedZeroOptimizer_Stage3
        groups = zero.fp16_groups if third else zero.params_in_partition
        for number, gradients in zero.averaged_gradients.items():
            # padding of the last partition has no parameter
            for place, gradient in enumerate(gradients or ()):
                names = self._engine.param_names
                known = place < len(groups[number])
                name = names.get(groups[number][place], "") if known else ""
                if gradient is not None:
                    yield name, gradient

    # --- a model that can be run again ---

    def _divided(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """The loss as the engine divides it for accumulation."""
        divisor: int = self._engine.gradient_accumulation_steps()
        loss = total_loss(loss_fn(batch))
        return loss if divisor == 1 else loss.div(divisor)

    @contextmanager
    def _plain_model(self, *, hold: bool) -> Iterator[nn.Module | None]:
        """A copy of the model without hooks and with whole parameters. All ranks enter at once."""
        module = self._engine.module
        third = type(self._zero) is DeepSpeedZeroOptimizer_Stage3
        room = has_room([module])
        # all of them or none: gathering is a collective
        if third and self._context.agreement.any_rank(not room, self._engine.device):
            yield None
            return
        plain = None
        with GatheredParameters(list(module.parameters()), enabled=third):
            if hold and room:
                plain = plain_copy(module, {})
        yield plain

    @contextmanager
    def _runs_on(self, plain: nn.Module) -> Iterator[None]:
        """Calls of the engine run the copy; those of its model are refused."""
        engine = self._engine
        original = engine.module

        def refuse(*_: Any) -> None:
            raise StepguardError("the loss function calls the model itself; call the engine")

        with ExitStack() as undo:
            for module in original.modules():
                undo.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
            undo.enter_context(swapped(engine, "forward", functools.partial(plain.__call__)))
            undo.callback(engine._modules.__setitem__, "module", original)
            engine._modules["module"] = plain
            yield


def parts_held(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of each parameter, and of its float32 master."""
    zero = engine.optimizer
    if type(zero) is not DeepSpeedZeroOptimizer_Stage3:
        yield from engine.module.named_parameters()
        for number, part in enumerate(zero.single_partition_of_fp32_groups):
            yield f"float32 part of group {number}", part
        return
    for name, parameter in engine.module.named_parameters():
        yield name, parameter.ds_tensor[: _real(parameter)]
    for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in group:
            yield engine.param_names[parameter], flat[start : start + _real(parameter)]
            start += parameter.partition_numel()


def _real(parameter: Any) -> int:
    """Elements of a part that belong to the parameter; padding after them is not initialised."""
    size = int(parameter.partition_numel())
    before = size * dist.get_rank(parameter.ds_process_group)
    return max(0, min(size, int(parameter.ds_numel) - before))
