"""The sharded models of the tests: torch's own FSDP2, FSDP1, tensor parallelism, on one small net.

Engines of two ranks and of four: each is a wrapper, a mesh or an optimizer that torch has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

FEATURES, CLASSES = 6, 3
RATE = 0.05
TENSOR_PARALLEL = 2
"""Ranks that compute one batch together, where both ways of sharding are combined."""
Built = tuple[nn.Module, torch.optim.Optimizer]


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    model = nn.Sequential(*layers)
    model.register_buffer("level", torch.zeros(1))
    return model


def every_rank() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for part in model.children():
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def split(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"))


def mixed() -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard(network(), every_rank(), mp_policy=policy)


def offload() -> nn.Module:
    return shard(network(), every_rank(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp() -> nn.Module:
    """Sharded by pairs, replicated over the pairs."""
    return shard(network(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))


def both() -> nn.Module:
    """Tensor parallel in pairs, FSDP2 over the pairs."""
    mesh = init_device_mesh("cpu", (2, TENSOR_PARALLEL), mesh_dim_names=("data", "tensor"))
    return shard(split(network(), mesh["tensor"]), mesh["data"])


def meshes() -> nn.Module:
    """Parameters on two meshes and on none: the last layer is FSDP2's, over pairs of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    model = network()
    fully_shard(model.get_submodule("0"), mesh=every_rank())
    fully_shard(model.get_submodule("2"), mesh=mesh)
    model.register_parameter("plain", nn.Parameter(torch.ones(CLASSES)))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": lambda: shard(network(), every_rank()),
    "fused": lambda: shard(network(), every_rank()),
    "foreach": lambda: shard(network(), every_rank()),
    "accumulate": lambda: shard(network(), every_rank()),
    "dropout": lambda: shard(network(dropout=0.3), every_rank()),
    "tp": lambda: split(network(), every_rank()),
    **{function.__name__: function for function in (fsdp1, mixed, offload, hsdp, both, meshes)},
}
KERNELS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}


def build(engine: str) -> Built:
    """A model and its optimizer, the same weights on every rank before they are sharded."""
    model = MODELS[engine]()
    kernel = KERNELS.get(engine, {})
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, **kernel)


def data_rank(engine: str) -> int:
    """Ranks that compute one batch together share their data."""
    if engine == "tp":
        return 0
    if engine == "both":
        return dist.get_rank() // TENSOR_PARALLEL
    return dist.get_rank()
