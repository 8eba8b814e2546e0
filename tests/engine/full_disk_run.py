"""A guarded run in a folder that fills up; prints one JSON object. Arguments: mode, folder, what
happens to it.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import warnings
from pathlib import Path

import torch

import stepguard
from scenes import Batch, batches, plain_net, poisoned


def wholly_bad(batch: Batch) -> Batch:
    """No sample is left that an update could be made from."""
    return torch.full_like(batch[0], torch.nan), batch[1]


def fill(folder: Path) -> Path:
    """Take every byte that is left."""
    ballast = folder.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return ballast


def spoil(how: str, folder: Path) -> None:
    if how == "full":
        fill(folder)
    elif how == "limit":
        size = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, resource.RLIM_INFINITY))
    elif how == "deleted":
        shutil.rmtree(folder)


def main(mode: str, folder: Path, how: str) -> None:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = stepguard.GuardConfig(run_dir=folder / "run", human_log=folder / "log")
    make = stepguard.watch if mode == "watch" else stepguard.Guard
    guard = make(model, optimizer, config=config)

    def loss_fn(batch: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def one(batch: Batch) -> None:
        if mode == "step":
            guard.step(loss_fn, batch)
            return
        optimizer.zero_grad()
        loss_fn(batch).backward()
        optimizer.step()

    data = batches(12)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in data[:3]:
            one(batch)
        spoil(how, folder)
        one(data[3])
        before = [p.clone() for p in model.parameters()]
        one(wholly_bad(data[4]))
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        (folder.parent / "ballast").unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for batch in data[5:]:
            one(batch)
        one(poisoned(data[4]))
        guard.close()
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    told = {
        "same": same,
        "finite": finite,
        "armed": guard.armed,
        "incidents": [incident.step for incident in guard.incidents],
        "warned": sorted({warning.category.__name__ for warning in said}),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
