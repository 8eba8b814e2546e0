"""Scenes on the device `toy`, in a process of its own; prints one line of JSON.

A backend can be made known to torch once in a process and not be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from device.toy_device import load, reads
from settings_of import config_of
from stepguard import Guard
from stepguard.run.selftest import selftest

DEVICE = load()
STEPS = 40
QUIET = {"terminal": "quiet"}
Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.inner(x)))
        return self.outer(hidden * torch.log(scale)[:, None])  # BORN HERE


class Scene:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def loss_fn(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch["x"], batch["scale"]), batch["y"])

    def state(self) -> list[Tensor]:
        """Everything that training changes, on the host."""
        found = [tensor.cpu().clone() for tensor in self.net.state_dict().values()]
        for slots in self.optimizer.state.values():
            found += [slot.cpu().clone() for slot in slots.values()]
        return [*found, torch.get_rng_state()]

    def bare_step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss_fn(batch).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()


def batches(count: int, bad: int | None = None) -> list[Batch]:
    source = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        scale = torch.rand(6, generator=source) + 1.5
        if number == bad:
            scale[4] = 0.0
        batch = {
            "x": torch.randn(6, 4, generator=source),
            "scale": scale,
            "y": torch.randint(3, (6,), generator=source),
        }
        made.append({key: value.to(DEVICE) for key, value in batch.items()})
    return made


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def reads_of(do: Callable[[Batch], Any], data: list[Batch]) -> list[int]:
    """Reads of values in each step."""
    counts = []
    for batch in data:
        before = reads()
        do(batch)
        counts.append(reads() - before)
    return counts


def healthy() -> dict[str, Any]:
    """The same training bare, under guard.step and under watch."""
    config = config_of(snapshots=0, look_every=None, **QUIET)
    bare = Scene()
    alone = reads_of(bare.bare_step, batches(STEPS))
    wanted = bare.state()
    stepped = Scene()
    clipped = config_of(snapshots=0, look_every=None, clip_norm=1.0, **QUIET)
    with Guard(stepped.net, stepped.optimizer, config=clipped) as guard:
        by_guard = reads_of(lambda b: guard.step(stepped.loss_fn, b), batches(STEPS))
    by_step = stepped.state()
    watched = Scene()
    with stepguard.watch(watched.net, watched.optimizer, config=config):
        by_watch = reads_of(watched.bare_step, batches(STEPS))
    return {
        "bare reads": max(alone),
        "guard.step reads": max(by_guard),
        "watch reads": max(by_watch),
        "guard.step same": same(wanted, by_step),
        "watch same": same(wanted, watched.state()),
    }


def vetoed() -> dict[str, Any]:
    """A bad step leaves everything as it was, and is placed."""
    scene = Scene()
    data = batches(6, bad=4)
    config = config_of(policy=stepguard.Policy(actions=("skip", "stop")), **QUIET)
    with Guard(scene.net, scene.optimizer, config=config) as guard:
        for batch in data[:4]:
            guard.step(scene.loss_fn, batch)
        before = scene.state()[:-1]
        committed = guard.step(scene.loss_fn, data[4]).committed
        after = scene.state()[:-1]
        guard.step(scene.loss_fn, data[5])
        (incident,) = guard.incidents
    origin = incident.origin
    assert origin is not None
    return {
        "committed": committed,
        "unchanged": same(before, after),
        "op": origin.op,
        "source": str(origin.source).rpartition("/")[2],
        "samples": list(origin.samples),
        "code": incident.findings[0].code,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = {
        "healthy": healthy(),
        "vetoed": vetoed(),
        "selftest": {check.name: check.holds for check in selftest(str(DEVICE)).checks},
    }
    print(json.dumps(told))
