"""stepguard inside Megatron: call `guard(model, optimizer)` once both are built, on every rank.

    model, optimizer, scheduler = setup_model_and_optimizer(...)
    guard = stepguard.integrations.megatron.guard(model, optimizer)

It works where Megatron checks its loss and gradients itself, `RerunStateMachine.validate_result`,
and where it updates, `optimizer.step`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stepguard._errors import ConfigError, SaveRefused
from stepguard.engine.wiring import check_config
from stepguard.integrations._engine import EngineGuard, bad_slots, plain_copy
from stepguard.integrations._parts import Framework, around, refuse_settings_of_step
from stepguard.records import GuardConfig
from stepguard.sentinel.gradients import bad_buffers
from stepguard.state.sharded import has_room
from stepguard.tensors.values import is_finite

MEGATRON = Framework("megatron-core", first="0.16", before="0.17", tested="0.16.1")
MEGATRON.require()

from megatron.core import parallel_state  # noqa: E402 (first the version)
from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine  # noqa: E402

__all__ = ["MegatronGuard", "SaveRefused", "guard"]

SPLITS = ("tensor_model", "pipeline_model", "context", "expert_model")
"""Ways to split a model over ranks, one of which could not run it again by itself."""


def guard(
    model: nn.Module | list[nn.Module],
    optimizer: MegatronOptimizer,
    config: GuardConfig | None = None,
    *,
    done: int = 0,
) -> MegatronGuard:
    """Guard the steps of this optimizer, of which `done` were made before. `close()` undoes it."""
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    if len(chunks) != 1 or not isinstance(optimizer, MegatronOptimizer):
        raise ConfigError(
            f"guard() got {len(chunks)} model chunks and a {type(optimizer).__name__}; give the "
            "model, of one chunk, and the optimizer that Megatron's setup returned (an interleaved "
            "pipeline is not supported)."
        )
    MEGATRON.need(optimizer, "step", "sharded_state_dict", "config")
    settings = check_config(config)
    refuse_settings_of_step(settings, "use Megatron's clip_grad and loss_scale")
    made = MegatronGuard(chunks[0], optimizer, settings)
    made.port.start_at(done)
    return made


class MegatronGuard(EngineGuard):
    """Guards one optimizer of Megatron. A context manager; built by `guard`.

    `optimizer.step()` of a bad step returns what it returns when fp16 overflows: no success, which
    Megatron counts as a skipped iteration and for which it holds the schedule.
    """

    no_rewind = "Megatron loads its checkpoints itself, when it starts"

    def __init__(self, model: nn.Module, optimizer: Any, config: GuardConfig) -> None:
        self._megatron = optimizer
        self._module = model
        # DistributedDataParallel and Float16Module
        while "module" in self._module._modules:
            self._module = self._module.get_submodule("module")
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        self._optimizers = [one.optimizer for one in chained if one.optimizer is not None]
        if not self._optimizers:
            raise ConfigError("this rank trains no parameter, so there is nothing to guard on it.")
        super().__init__("megatron", self._module, self._optimizers[0], config)
        sizes = (f"get_{split}_parallel_world_size" for split in SPLITS)
        self._whole_model = all(getattr(parallel_state, size)() == 1 for size in sizes)
        self._plain: nn.Module | None = None
        self._checked: Callable[[], Tensor | None] = lambda: None
        """The loss that was checked last: Megatron asks several questions about one."""
        hook = self._module.register_forward_pre_hook(self._called, with_kwargs=True)
        self._undo.callback(hook.remove)
        machine = get_rerun_state_machine()
        around(self._undo, machine, "should_run_forward_backward", self._begins)
        around(self._undo, machine, "validate_result", self._validated)
        around(self._undo, optimizer, "step", self._step)
        around(self._undo, optimizer, "sharded_state_dict", self._sharded)

    # --- what Megatron does: each gets the original first ---

    def _begins(self, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        runs = original(*args, **kwargs)
        if runs:  # perhaps once more
            self._losses, self._seen = [], []
        return runs

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._whole_model and torch.is_grad_enabled():
            self._remember(self._again, (args, kwargs))

    def _again(self, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        """The loss of each token, added, or the output of a model that computes none."""
        args, kwargs = batch
        assert self._plain is not None
        output: Tensor = self._plain(*args, **kwargs)
        return output.float().sum()

    def _validated(
        self,
        original: Callable[..., Any],
        result: Any,
        rejection_func: Callable[[Any], bool],
        message: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Where Megatron would end one rank, let all of them pass over the step together."""
        scalar = isinstance(result, Tensor) and result.numel() == 1
        # of what is checked only a loss can still be differentiated; norms of gradients cannot
        if scalar and result.requires_grad and self._checked() is not result:
            self._checked = weakref.ref(result)
            self._losses.append(result.detach())
        if not self._protect.armed or get_rerun_state_machine().get_mode() != RerunMode.DISABLED:
            return original(result, rejection_func, message, *args, **kwargs)
        rejected = rejection_func(result)
        if rejected and scalar and not is_finite(result):
            self._context.outputs.note("rejected", f"Megatron: {message}: {float(result)}")
            return None
        return original(result, lambda _: rejected, message, *args, **kwargs)

    def _step(self, original: Callable[..., Any]) -> Any:
        success, norm, zeros = self._update(original)
        self._concluded(
            overflow="" if success else "Megatron skipped the update",
            norm=None if norm is None else float(norm),
        )
        self._context.step += 1
        return success, norm, zeros

    def _passed_over(self, original: Callable[..., Any]) -> Any:
        return False, None, None

    def _sharded(
        self, original: Callable[..., Any], state: Any, is_loading: bool = False, **kwargs: Any
    ) -> Any:
        if not is_loading:
            self._refuse_bad_state("a checkpoint of Megatron")
        return original(state, is_loading, **kwargs)

    # --- what Megatron keeps ---

    @property
    def _device(self) -> torch.device:
        return next(self._module.parameters()).device

    @property
    def _scale(self) -> float | None:
        return float(self._megatron.get_loss_scale()) if self._megatron.config.fp16 else None

    @property
    def _calibrates(self) -> bool:
        config = self._megatron.config
        return bool(config.fp16 and config.loss_scale is None)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None:
                yield name, gradient

    def _trouble(self) -> list[str]:
        named = dict(self._module.named_parameters())
        found = [f"param:{name}" for name, parameter in named.items() if not is_finite(parameter)]
        found += bad_buffers({"": self._module})
        for optimizer in self._optimizers:
            found += bad_slots(optimizer)
            for number, group in enumerate(optimizer.param_groups):
                if not found and not all(map(is_finite, group["params"])):
                    found.append(f"param:float32 copy of group {number}")
        return list(dict.fromkeys(found))

    # --- a model that can be run again ---

    @property
    def _whole(self) -> bool:
        return bool(self._seen)

    @contextmanager
    def _plain_model(self, *, hold: bool) -> Iterator[nn.Module | None]:
        """None where one rank holds only a part of the model."""
        if not (hold and self._whole_model and has_room([self._module])):
            yield None
            return
        plain = plain_copy(self._module, {})
        for module in plain.modules():
            if hasattr(module, "gradient_accumulation_fusion"):
                # its kernel writes into buffers that a copy does not have
                vars(module)["gradient_accumulation_fusion"] = False
        yield plain

    @contextmanager
    def _runs_on(self, plain: nn.Module) -> Iterator[None]:
        self._plain = plain
        try:
            yield
        finally:
            self._plain = None
