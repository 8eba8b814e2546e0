"""Failures of the zoo on two ranks whose model is sharded by FSDP2, each also on one process.

torchrun --standalone --nproc-per-node 2 sharded_zoo_worker.py OUT CASE ...
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zoo.case import Case, Scene
from zoo.catalogue import load
from zoo.tools import run_guarded

from stepguard import Incident


def sharded(scene: Scene) -> Scene:
    """Shard the model, and hand its optimizer the shards."""
    before = {id(parameter): name for name, parameter in scene.model.named_parameters()}
    fully_shard(scene.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    after = dict(scene.model.named_parameters())
    for group in scene.optimizer.param_groups:
        group["params"] = [after[before[id(parameter)]] for parameter in group["params"]]
    return scene


def told(incidents: list[Incident]) -> dict[str, Any]:
    """Where the first incident with an origin comes from."""
    located = [incident for incident in incidents if incident.origin is not None]
    if not located:
        return {}
    origin = located[0].origin
    assert origin is not None
    return {
        "step": located[0].step,
        "phase": origin.phase,
        "module": origin.module,
        "op": origin.op,
        "node": origin.node,
        "source": origin.source,
        "tensor": origin.tensor,
        "samples": origin.samples,
        "micro_batch": origin.micro_batch,
        "reproduced": origin.reproduced,
        "findings": [finding.code for finding in located[0].findings],
    }


def run(case: Case, *, shard: bool) -> dict[str, Any]:
    scene = case.build(False)
    try:
        if shard:
            sharded(scene)
        with tempfile.TemporaryDirectory() as folder:
            incidents, halted = run_guarded(scene, folder)
    except Exception:
        return {"error": traceback.format_exc(limit=4)}
    finite = all(bool(_local(p).isfinite().all()) for p in scene.model.parameters())
    return {"told": told(incidents), "halted": halted, "finite": finite}


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    cases = load()
    if names == ["all"]:
        names = [case.name for case in cases.values() if not case.control]
    # before there is a process group: one process, as in an ordinary run
    alone = {name: run(cases[name], shard=False) for name in names}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name in names:
        outcome = {"alone": alone[name], "sharded": run(cases[name], shard=True)}
        torch.save(outcome, out / f"{name}.{dist.get_rank()}.pt")
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
