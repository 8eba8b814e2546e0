"""Scenes on the device `toy`, in a process of its own; prints one line of JSON.

A backend can be made known to torch once in a process and not be taken back.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from device.toy_device import load, reads
from settings_of import config_of
from stepguard import Guard

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


def restored(folder: Path) -> dict[str, Any]:
    """Saved on the device, restored into other objects on the device, and trained on alike."""
    data = batches(20)
    first = Scene()
    config = config_of(run_dir=folder / "run", **QUIET)
    with Guard(first.net, first.optimizer, config=config) as guard:
        for batch in data[:10]:
            guard.step(first.loss_fn, batch)
        saved = guard.save()
        for batch in data[10:]:
            guard.step(first.loss_fn, batch)
    ended = first.state()
    second = Scene()
    with torch.no_grad():
        for parameter in second.net.parameters():
            parameter.zero_()
    with Guard(second.net, second.optimizer, config=config) as guard:
        done = guard.restore()
        for batch in data[10:]:
            guard.step(second.loss_fn, batch)
    device = {parameter.device.type for parameter in second.net.parameters()}
    sound = saved is not None and stepguard.verify(saved).ok
    return {
        "sound": sound,
        "done": done,
        "same": same(ended, second.state()),
        "device": sorted(device),
    }


def rewound() -> dict[str, Any]:
    """A weight that turns NaN between two steps: back to a snapshot, and as if it never was."""
    ends = []
    actions = []
    for damage in (False, True):
        scene = Scene()
        config = config_of(snapshot_every=4, probation=4, **QUIET)
        with Guard(scene.net, scene.optimizer, config=config) as guard:
            for number, batch in enumerate(batches(STEPS)):
                if damage and number == 30:
                    with torch.no_grad():
                        scene.net.outer.weight[0, 0] = math.nan
                guard.step(scene.loss_fn, batch)
            actions += [incident.decision.action for incident in guard.incidents]
        ends.append(copy.deepcopy(scene.state()))
    return {"actions": actions, "same": same(*ends)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = {
        "healthy": healthy(),
        "vetoed": vetoed(),
        "restored": restored(Path(sys.argv[1])),
        "rewound": rewound(),
    }
    print(json.dumps(told))
