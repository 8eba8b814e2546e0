"""Megatron's own model, gradient buffers, checks and optimizers on two gloo ranks.

Megatron asks for CUDA tensors by name. `CpuForCuda` answers with those of the processor, so that
everything above the kernels is Megatron's; its fused kernels and its rerun modes are not reached.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from distributed.launch import of_all, on_ranks
from stepguard import ConfigError, GuardConfig, SaveRefused, TrainingHalted, watch

KEEPS_GROUP = True
LENGTH, BATCH, WIDTH, WORDS = 6, 2, 16, 32


class CpuForCuda(TorchFunctionMode):
    """A tensor is made on the processor where CUDA is asked for, and called a CUDA tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


@contextmanager
def megatron() -> Iterator[None]:
    """In the ranks only; `make venv` puts it there."""
    sys.path.append(str(Path(sys.prefix, "megatron", "site-packages")))
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.rerun_state_machine import destroy_rerun_state_machine
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        parallel_state.initialize_model_parallel()
        # the other one keeps states of CUDA's generators
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        try:
            with CpuForCuda():
                yield
        finally:
            torch.cuda.current_device = current
            destroy_rerun_state_machine()
            parallel_state.destroy_model_parallel()


class Training:
    """A model of one layer, and the loop of Megatron's `train_step`."""

    def __init__(self, *, sharded: bool = False) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.core.transformer import TransformerConfig

        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=2,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH
        )
        settings = DistributedDataParallelConfig(
            check_for_nan_in_grad=True, use_distributed_optimizer=sharded
        )
        self.model = DistributedDataParallel(config, settings, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-2, optimizer="adam", clip_grad=1.0, use_distributed_optimizer=sharded
            ),
            [self.model],
        )
        self.machine = get_rerun_state_machine()
        self.source = torch.Generator().manual_seed(dist.get_rank())
        self.results: list[Any] = []

    def guarded(self, **settings: Any) -> Any:
        from stepguard.integrations.megatron import guard

        return guard([self.model], self.optimizer, GuardConfig(terminal="quiet", **settings))

    def step(self, **changed: float) -> Any:
        """`changed`: what rank 1 gets in its second sample, or under the root of its loss."""
        batch = {
            "x": torch.randn(LENGTH, BATCH, WIDTH, generator=self.source),
            "labels": torch.randint(0, WORDS, (BATCH, LENGTH), generator=self.source),
            "gap": torch.ones(1),
        }
        if dist.get_rank() == 1:
            for name, value in changed.items():
                batch[name].select(1 if name == "x" else 0, -1).fill_(value)
        places = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
        while self.machine.should_run_forward_backward(None):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            labels = batch["labels"]
            each = self.model(labels, places, mask, decoder_input=batch["x"], labels=labels)
            loss = each.mean() + (each - each.detach() + batch["gap"]).sqrt().mean()
            for rejects in (torch.isnan, torch.isinf):
                self.machine.validate_result(
                    result=loss, rejection_func=rejects, message="found it in the loss", fatal=True
                )
            loss.backward()
            self.model.finish_grad_sync()
        self.machine.should_checkpoint_and_exit()
        self.results.append(self.optimizer.step())
        return self.results[-1]

    def state(self) -> list[Tensor]:
        found = [part.detach().clone() for part in self.model.parameters()]
        for slots in self.optimizer.chained_optimizers[0].optimizer.state.values():
            found += [value.clone() for value in slots.values() if isinstance(value, Tensor)]
        return found


def equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@on_ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_healthy_run_is_bit_equal_and_a_bad_step_is_passed_over(
    sharded: bool, folder: Path
) -> None:
    with megatron():
        bare, training = Training(sharded=sharded), Training(sharded=sharded)
        with training.guarded(run_dir=folder) as guard:
            for _ in range(2):
                assert bare.step() == training.step()
            assert equal(bare.state(), training.state())
            before = training.state()
            assert training.step(x=math.nan) == (False, None, None)
            assert equal(before, training.state())
            (incident,) = guard.incidents
            assert training.step(gap=0.0) == (False, None, None)
            assert equal(before, training.state())
            assert training.step()[0] and not equal(before, training.state())
            assert [each.step for each in guard.incidents] == [2, 3]
            assert guard.incidents[1].verdict.kind == "nonfinite_gradient"
        assert "step" not in vars(training.optimizer)
        assert "validate_result" not in vars(training.machine)
    origin = incident.origin
    assert (incident.verdict.kind, incident.findings[0].code) == ("nonfinite_input", "SG101")
    assert "decoder_input" in origin.tensor and origin.rank == 1
    assert origin.module.startswith("decoder.layers.0")
    assert of_all((incident.verdict, incident.decision))[0] == (incident.verdict, incident.decision)
    lines = [
        json.loads(line)
        for path in folder.glob("journal*.jsonl")
        for line in path.read_text().splitlines()
    ]
    said = " ".join(line.get("summary", "") for line in lines)
    assert "found it in the loss: nan" in said and "local grad norm for bucket #0" in said


@on_ranks(2)
def test_damaged_weights_are_not_saved_and_stop_all_ranks() -> None:
    with megatron():
        training = Training()
        with training.guarded():
            training.step()
            if dist.get_rank() == 1:
                weight = training.model.get_parameter("module.decoder.final_layernorm.weight")
                weight.data[0] = math.nan
            with pytest.raises(SaveRefused, match="final_layernorm"):
                training.optimizer.sharded_state_dict({})
            with pytest.raises(TrainingHalted) as halted:
                training.step()
    assert "Megatron loads its checkpoints itself" in halted.value.incident.decision.reason


@on_ranks(2)
def test_what_cannot_be_guarded_is_refused() -> None:
    with megatron():
        from stepguard.integrations.megatron import guard

        training = Training()
        with pytest.raises(ConfigError, match="2 model chunks"):
            guard([training.model, training.model], training.optimizer)
        with pytest.raises(ConfigError, match="clip_norm"):
            guard(training.model, training.optimizer, GuardConfig(clip_norm=1.0))
        with pytest.raises(ConfigError, match=r"stepguard\.integrations\.megatron\.guard"):
            watch(training.model, training.optimizer)
