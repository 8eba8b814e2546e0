"""torchtitan's own Trainer with its debug model, FSDP2 on two gloo ranks.

torchtitan expects a GPU. What stands in for it here: names of a device without memory statistics,
torch's attention for a flex attention that has no backward on a CPU, sums for a reduction that gloo
lacks, and a mock of its exchange of experts, which imports triton and is not called.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.launch import of_all, on_ranks
from stepguard import ConfigError, GuardConfig, SaveRefused

KEEPS_GROUP = True
LENGTH, BATCH, STEPS, BAD_STEP = 16, 2, 5, 3


def find_torchtitan() -> None:
    """In the ranks only; `make venv` puts it there."""
    if "torchtitan" in sys.modules:
        return
    sys.path.append(str(Path(sys.prefix, "torchtitan", "site-packages")))
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    stands_in: Any = torch.cpu
    stands_in.get_device_name = lambda *_: "cpu"
    stands_in.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**33)
    stands_in.memory_stats = lambda *_: {}
    stands_in.reset_peak_memory_stats = stands_in.empty_cache = lambda *_: None
    for name in ("", ".api", ".kernels"):
        sys.modules[f"torchtitan.distributed.minimal_async_ep{name}"] = MagicMock()
    import torchtitan.trainer

    torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **_: None


def made(folder: Path, *, bad: bool = False) -> Any:
    """A trainer whose last rank gets a NaN out of its first layer in BAD_STEP."""
    find_torchtitan()
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Words(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
            self.source = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            places = torch.arange(LENGTH).repeat(BATCH, 1)
            while True:
                words = torch.randint(0, 200, (BATCH, LENGTH + 1), generator=self.source)
                yield {"input": words[:, :-1].contiguous(), "positions": places}, words[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            self.eos_id = 0

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 2048

    config = llama3_debugmodel()
    for _, _, owner, place in config.model_spec.model.traverse(FlexAttention.Config):
        setattr(owner, place, ScaledDotProductAttention.Config())
    config.dataloader, config.tokenizer = Words.Config(), Tokenizer.Config()
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = BATCH, LENGTH, STEPS
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    config.debug.seed, config.dump_folder = 0, str(folder)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 0, None
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)

    def spoil(_: Any, __: Any, output: Tensor) -> Tensor | None:
        here = bad and trainer.step == BAD_STEP and dist.get_rank() == 1
        return output * math.nan if here else None

    trainer.model_parts[0].layers["0"].register_forward_hook(spoil)
    return trainer


def weights(trainer: Any) -> list[Tensor]:
    return [part.to_local().clone() for part in trainer.model_parts[0].parameters()]


def finite(trainer: Any) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in weights(trainer))


@on_ranks(2)
def test_healthy_run_is_bit_equal(folder: Path) -> None:
    bare = made(folder / "bare")
    bare.train()
    trainer = made(folder / "guarded")
    from stepguard.integrations.torchtitan import guard

    with guard(trainer, GuardConfig(terminal="quiet")) as watching:
        trainer.train()
        assert watching.incidents == ()
    assert all(map(torch.equal, weights(bare), weights(trainer)))
    assert "train_step" not in vars(trainer) and "save" not in vars(trainer.checkpointer)


@on_ranks(2)
def test_bad_step_that_torchtitan_would_end_the_run_for(folder: Path) -> None:
    bare = made(folder / "bare", bad=True)
    with pytest.raises(RuntimeError, match="Loss is not finite"):
        bare.train()
    assert not finite(bare)
    trainer = made(folder / "guarded", bad=True)
    from stepguard.integrations.torchtitan import guard

    with guard(trainer, GuardConfig(terminal="quiet")) as watching:
        trainer.train()
        (incident,) = watching.incidents
        assert (trainer.step, incident.step) == (STEPS, BAD_STEP - 1)
        assert incident.verdict.kind == "nonfinite_loss" and incident.reading.bad_ranks == (1,)
        assert finite(trainer)
        assert of_all(incident.verdict) == [incident.verdict] * 2
        trainer.model_parts[0].norm.weight.data.to_local().fill_(math.nan)
        with pytest.raises(SaveRefused, match="norm"):
            trainer.checkpointer.save(STEPS, last_step=True)
    with pytest.raises(ConfigError, match="give the Trainer"):
        guard(trainer.model_parts[0])
