"""A bad step on disk: batch, random numbers, state and environment, as safetensors and JSON.

`stepguard replay CAPSULE` runs it again in a fresh process, on another machine. The model's code is not in it: the
capsule names the function that builds model, optimizer and loss, and that must be importable there.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stepguard._errors import CapsuleError
from stepguard.records import Reading, Verdict
from stepguard.records.codec import dumps, from_jsonable, to_plain
from stepguard.state.atomic import new_folder
from stepguard.state.plain import NotPlainError, put_together, take_apart
from stepguard.state.rng import RngState
from stepguard.state.step import Step

SCHEMA = 1


@dataclass(slots=True)
class Capsule:
    """A capsule read back. Tensors are still apart; `fill` puts the state into a freshly built model."""

    folder: Path
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def build(self) -> str | None:
        """`module:function` that returns model, optimizer and loss function."""
        build: str | None = self.facts.get("build")
        return build

    @property
    def script(self) -> str | None:
        """The script that was running, relative to the directory it ran in."""
        script: str | None = self.facts.get("script")
        return script

    @property
    def arguments(self) -> list[str]:
        """What the script was called with."""
        return [str(a) for a in self.facts.get("arguments", [])]

    @property
    def reading(self) -> Reading:
        return from_jsonable(Reading, self.facts["reading"])

    def micro_batches(self) -> tuple[Any, ...]:
        batches = self.facts.get("micro_batches")
        if batches is None:
            why = self.facts.get("left_out", "the switch capsule='no-data' was set")
            raise CapsuleError(f"{self.folder} holds no batch ({why}); it can be read but not run again.")
        return tuple(put_together(batch, self.tensors) for batch in batches)

    def rng(self) -> list[RngState]:
        return [_rng_from(facts, self.tensors) for facts in self.facts["rng"]]

    def fill(self, roots: dict[str, nn.Module]) -> None:
        """Load parameters and buffers of every root; names that do not fit are an error with the way out."""
        for prefix, root in roots.items():
            key = f"state/{prefix}/"
            state = {name.removeprefix(key): t for name, t in self.tensors.items() if name.startswith(key)}
            try:
                root.load_state_dict(state, strict=False, assign=False)
            except RuntimeError as fault:
                raise CapsuleError(f"the model built by {self.build} does not fit the capsule: {fault}") from None
            missing = set(state) - {n for n, _ in [*root.named_parameters(), *root.named_buffers()]}
            if missing:
                raise CapsuleError(f"the model built by {self.build} lacks {sorted(missing)[:3]} of the capsule.")


def write_capsule(
    folder: Path,
    step: Step,
    reading: Reading,
    *,
    verdict: Verdict,
    build: str | None,
    keep: Literal["full", "no-data"],
    limit_bytes: int,
) -> bool:
    """Write the step; False when it would be larger than the limit (then nothing is written)."""
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "step": step.index,
        "scale": step.scale,
        "clip_norm": step.clip_norm,
        "build": build,
        **running_script(),
        "reading": to_plain(reading),
        "verdict": verdict.kind,
        "summary": verdict.summary,
        "environment": environment(),
        "rng": [_rng_apart(state, tensors, f"rng/{i}") for i, state in enumerate(step.rng)],
        "optimizer": {"name": type(step.optimizer).__name__},
    }
    if keep == "full":
        try:
            facts["micro_batches"] = [take_apart(b, tensors, f"batch/{i}") for i, b in enumerate(step.micro_batches)]
        except NotPlainError as why:
            facts["left_out"] = str(why)
    _state_apart(step, tensors)
    if sum(t.numel() * t.element_size() for t in tensors.values()) > limit_bytes:
        return False
    with new_folder(folder) as temporary:
        save_file(tensors, temporary / "tensors.safetensors")
        (temporary / "capsule.json").write_text(dumps(facts), encoding="utf-8")
    return True


def read_capsule(folder: Path) -> Capsule:
    """Open a capsule; nothing in it is executed."""
    try:
        facts = json.loads((folder / "capsule.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "tensors.safetensors")
    except FileNotFoundError as fault:
        raise CapsuleError(f"{folder} is not a capsule: {Path(fault.filename or '').name} is missing.") from None
    except Exception as fault:
        raise CapsuleError(f"{folder} cannot be read: {fault}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("schema"), int) or facts["schema"] > SCHEMA:
        found = facts.get("schema") if isinstance(facts, dict) else facts
        raise CapsuleError(f"{folder} has schema {found!r}; this stepguard reads up to {SCHEMA}: upgrade it.")
    return Capsule(folder, facts, tensors)


def environment() -> dict[str, Any]:
    """What another machine needs to know to judge a different outcome."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def running_script() -> dict[str, Any]:
    """The main script, if it is a file below the current directory."""
    main = Path(sys.argv[0]).resolve() if sys.argv and sys.argv[0] else None
    if main is None or main.suffix != ".py" or not main.is_file() or not main.is_relative_to(Path.cwd()):
        return {}
    return {"script": str(main.relative_to(Path.cwd())), "arguments": sys.argv[1:]}


def _state_apart(step: Step, tensors: dict[str, Tensor]) -> None:
    for prefix, root in step.named_roots().items():
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            tensors[f"state/{prefix}/{name}"] = tensor.detach().cpu().contiguous().clone()
    for index, parameter in enumerate(_parameters(step)):
        for slot, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{slot}"] = value.detach().cpu().contiguous().clone()


def _parameters(step: Step) -> list[Tensor]:
    return [p for group in step.optimizer.param_groups for p in group["params"]]


def _rng_apart(state: RngState, tensors: dict[str, Tensor], name: str) -> dict[str, Any]:
    version, numbers, gauss = state.python
    tensors[f"{name}/cpu"] = state.cpu
    tensors[f"{name}/python"] = torch.tensor(numbers, dtype=torch.int64)
    facts: dict[str, Any] = {"name": name, "python_version": version, "python_gauss": gauss}
    if state.numpy is not None:
        kind, keys, position, has_gauss, cached = state.numpy
        tensors[f"{name}/numpy"] = torch.tensor(keys.astype("int64"))
        facts["numpy"] = [kind, int(position), int(has_gauss), float(cached)]
    for i, device in enumerate(state.devices):
        tensors[f"{name}/device{i}"] = device.cpu()
    return facts


def _rng_from(facts: dict[str, Any], tensors: dict[str, Tensor]) -> RngState:
    name = facts["name"]
    python = (facts["python_version"], tuple(tensors[f"{name}/python"].tolist()), facts.get("python_gauss"))
    numpy = None
    if "numpy" in facts:
        kind, position, has_gauss, cached = facts["numpy"]
        numpy = (kind, tensors[f"{name}/numpy"].numpy().astype("uint32"), position, has_gauss, cached)
    return RngState(cpu=tensors[f"{name}/cpu"], devices=(), python=python, numpy=numpy)
