"""Real checkpoints, written by the real libraries: every format of one small trained model."""

from __future__ import annotations

import json
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from check import hostile


class Small(nn.Module):
    """Parameters, norm statistics, a causal mask, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.outer = nn.Linear(32, 16)
        self.again = nn.Linear(16, 32)
        self.again.weight = self.inner.weight
        self.register_buffer("causal_mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(self.norm(self.inner(x)))
        return found


def trained(steps: int = 3) -> dict[str, Any]:
    """Model, optimizer, scheduler and scaler states after a few steps, as people put them into one
    file.
    """
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-4, total_steps=10)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    state = model.state_dict()
    ema = {name: value.clone() for name, value in state.items() if value.is_floating_point()}
    scaler = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    return {
        "state_dict": state,
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "scaler": scaler,
        "ema": ema,
        "rng_state": torch.get_rng_state(),
        "global_step": steps,
        "epoch": 1,
    }


def save_zip(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def save_legacy(path: Path, value: Any) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


def save_pickle(path: Path, value: Any) -> Path:
    with path.open("wb") as file:
        pickle.dump(value, file)
    return path


def save_safetensors(path: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file({name: value.clone().contiguous() for name, value in state.items()}, path)
    return path


def save_sharded(folder: Path, state: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """As `save_pretrained` does: shards and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    where = {}
    for number in range(shards):
        mine = names[number::shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_safetensors(folder / file, {name: state[name] for name in mine})
        where |= dict.fromkeys(mine, file)
    total = sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def save_trainer(folder: Path, everything: dict[str, Any]) -> Path:
    """A checkpoint folder of transformers' Trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(folder / "model.safetensors", everything["state_dict"])
    torch.save(everything["optimizer"], folder / "optimizer.pt")
    torch.save(everything["lr_scheduler"], folder / "scheduler.pt")
    rng = {"python": (3, tuple(range(20)), None), "cpu": everything["rng_state"]}
    torch.save(rng, folder / "rng_state.pth")
    torch.save(everything["scaler"], folder / "scaler.pt")
    history = [{"loss": 2.0 / step, "grad_norm": 1.0, "step": step} for step in (1, 2)]
    state = {"global_step": 3, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "config.json").write_text("{}")
    return folder


def lightning(everything: dict[str, Any]) -> dict[str, Any]:
    """The dict that Lightning's Trainer puts into a `.ckpt`."""
    best = torch.tensor(float("inf"))
    return {
        "epoch": 1,
        "global_step": everything["global_step"],
        "pytorch-lightning_version": "2.6.6",
        "state_dict": everything["state_dict"],
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"EarlyStopping{'monitor': 'val'}": {"wait_count": 0, "best_score": best}},
        "optimizer_states": [everything["optimizer"]],
        "lr_schedulers": [everything["lr_scheduler"]],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-3},
    }


def save_dcp(folder: Path, value: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, checkpoint_id=folder, no_dist=True)
    return folder


def load_dcp(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def poison(value: torch.Tensor, number: float = float("nan")) -> torch.Tensor:
    """The same tensor with one bad element."""
    changed = value.clone()
    changed.view(-1)[changed.numel() // 2] = number
    return changed


Saver = Callable[[Path, Any], Path]


ONE_FILE: dict[str, Saver] = {"zip": save_zip, "legacy": save_legacy, "pickle": save_pickle}


@contextmanager
def special_file(folder: Path, kind: str) -> Iterator[Path]:
    """Something that would block or never end if it were read."""
    path = Path(kind) if kind.startswith("/") else folder / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "other.json":
        path.write_text("{}")
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "socket":
            _bind(listening, path)
        yield path


def _bind(listening: socket.socket, path: Path) -> None:
    """By a relative name: the path of a socket may not be longer than a hundred letters."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        listening.bind(path.name)
    finally:
        os.chdir(before)


def run_with_bad_ones(folder: Path) -> Path:
    """Two good checkpoints, two corrupt ones, and one that cannot be judged."""
    folder.mkdir()
    everything = trained()
    save_zip(folder / "good.pt", everything)
    save_zip(folder / "bad.pt", {"w": torch.tensor([float("nan")])})
    save_trainer(folder / "checkpoint-20", everything)
    broken = save_trainer(folder / "checkpoint-40", everything)
    (broken / "optimizer.pt").write_bytes((broken / "optimizer.pt").read_bytes()[:-40])
    (folder / "too-large.pt").write_bytes(hostile.bomb(1 << 20))
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
