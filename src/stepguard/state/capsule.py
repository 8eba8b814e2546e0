"""A bad step on disk: batch, random numbers, state and environment, as safetensors and JSON.

`stepguard replay CAPSULE` runs it again in a fresh process, on another machine. The model's code is
not in it: the capsule names the script, or the function that builds model, optimizer and loss, and
that must be there.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard._errors import CapsuleError
from stepguard.records import Reading, Verdict
from stepguard.records.codec import dumps, from_jsonable, to_plain
from stepguard.state.atomic import new_folder
from stepguard.state.capsule_state import (
    fill_modules,
    fill_optimizer,
    optimizer_facts,
    resting_modules,
    state_tensors,
)
from stepguard.state.rng import RngState, rng_apart, rng_together
from stepguard.state.step import Step
from stepguard.state.tree_json import NotPlainError, put_together, take_apart

SCHEMA = 1
NEEDED = ("step", "scale", "clip_norm", "reading", "rng", "verdict")


@dataclass(slots=True)
class Capsule:
    """A capsule read back. Tensors are still apart; `fill` puts the state into freshly built
    objects.
    """

    folder: Path
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def build(self) -> str | None:
        """`module:function` that returns model, optimizer and loss function."""
        return self._text("build")

    @property
    def script(self) -> str | None:
        """The script that was running, relative to the directory it ran in."""
        return self._text("script")

    @property
    def module(self) -> str | None:
        """The name under which `python -m` ran the script, if it did."""
        return self._text("module")

    @property
    def arguments(self) -> list[str]:
        """What the script was called with."""
        return [str(a) for a in self.facts.get("arguments") or []]

    def decoded(self) -> tuple[Reading, tuple[Any, ...], list[RngState]]:
        """Reading, micro-batches and random numbers; anything odd in them is one clear error."""
        batches = self.facts.get("micro_batches")
        if batches is None:
            why = self.facts.get("left_out", "it was written with capsule='no-data'")
            raise CapsuleError(
                f"{self.folder} holds no batch ({why}); it can be read but not run again."
            )
        try:
            reading = from_jsonable(Reading, self.facts["reading"])
            rng = [rng_together(facts, self.tensors) for facts in self.facts["rng"]]
            return reading, tuple(put_together(batch, self.tensors) for batch in batches), rng
        except RecursionError:
            raise CapsuleError(
                f"{self.folder} is damaged: its batch is nested without end."
            ) from None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as fault:
            what = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
            raise CapsuleError(f"{self.folder} is damaged: {what}.") from None

    def fits(self, roots: Mapping[str, nn.Module], optimizer: Optimizer) -> str:
        """Why these objects are not the ones the capsule was written for, in words; empty when they
        are.
        """
        wanted = self.facts.get("optimizer", {}).get("name")
        if wanted not in (None, type(optimizer).__name__):
            return f"the optimizer is {type(optimizer).__name__}, the capsule's was {wanted}"
        prefixes = {name.split("/")[1] for name in self.tensors if name.startswith("state/")}
        unknown = prefixes - set(roots)
        if unknown:
            return f"there is no module {sorted(unknown)[0]!r}"
        return fill_modules(self.tensors, roots, dry=True)

    def fill(self, roots: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
        """Parameters, buffers, training modes, optimizer state and hyperparameters, as they were."""
        why_not = self.fits(roots, optimizer)
        if why_not:
            raise CapsuleError(f"the capsule does not fit what was built: {why_not}.")
        try:
            fill_modules(self.tensors, roots)
            fill_optimizer(self.tensors, self.facts, roots, optimizer)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as fault:
            raise CapsuleError(
                f"{self.folder} is damaged: its state cannot be filled in ({fault})."
            ) from None

    def differences(self) -> list[str]:
        """What is different here from where the step went wrong."""
        then, now = self.facts.get("environment") or {}, environment()
        return [
            f"{key} {then[key]} there, {now[key]} here"
            for key in now
            if key in then and then[key] != now[key]
        ]

    def _text(self, key: str) -> str | None:
        value = self.facts.get(key)
        return value if isinstance(value, str) else None


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
    tensors: dict[str, Tensor] = state_tensors(step)
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
        "rng": [rng_apart(state, tensors, f"rng/{i}") for i, state in enumerate(step.rng)],
        "optimizer": optimizer_facts(step.optimizer),
        "resting": resting_modules(step),
    }
    if keep == "full":
        facts.update(_batches(step, tensors))
    if sum(t.numel() * t.element_size() for t in tensors.values()) > limit_bytes:
        return False
    stored, facts["complex"], facts["sparse"] = _storable(tensors)
    with new_folder(folder) as temporary:
        save_file(stored, temporary / "tensors.safetensors")
        (temporary / "capsule.json").write_text(dumps(facts), encoding="utf-8")
    return True


def _batches(step: Step, tensors: dict[str, Tensor]) -> dict[str, Any]:
    apart: dict[str, Tensor] = {}
    try:
        batches = [take_apart(b, apart, f"batch/{i}") for i, b in enumerate(step.micro_batches)]
    except NotPlainError as why:
        return {"left_out": str(why)}
    tensors.update(apart)
    return {"micro_batches": batches}


def _storable(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """What safetensors takes: dense, real, contiguous and on the host; and which ones were complex
    or sparse.
    """
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dense = (
            tensor.detach().cpu()
            if tensor.layout is torch.strided
            else tensor.detach().cpu().to_dense()
        )
        plain[name] = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        plain[name] = plain[name].resolve_neg().contiguous().clone()
    complex_ones = [name for name, tensor in tensors.items() if tensor.is_complex()]
    return (
        plain,
        complex_ones,
        [name for name, tensor in tensors.items() if tensor.layout is not torch.strided],
    )


def read_capsule(folder: Path) -> Capsule:
    """Open a capsule; nothing in it is executed. The folder of the incident around it will do."""
    if not (folder / "capsule.json").exists() and (folder / "capsule").is_dir():
        folder = folder / "capsule"
    try:
        facts = json.loads((folder / "capsule.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "tensors.safetensors")
    except (FileNotFoundError, NotADirectoryError) as fault:
        missing = (
            Path(fault.filename).name if getattr(fault, "filename", None) else "tensors.safetensors"
        )
        raise CapsuleError(f"{folder} is not a capsule: {missing} is missing.") from None
    except Exception as fault:
        raise CapsuleError(f"{folder} cannot be read: {fault}") from None
    if (
        not isinstance(facts, dict)
        or not isinstance(facts.get("schema"), int)
        or facts["schema"] > SCHEMA
    ):
        found = facts.get("schema") if isinstance(facts, dict) else facts
        raise CapsuleError(
            f"{folder} has schema {found!r}; this stepguard reads up to {SCHEMA}: upgrade it."
        )
    missing_facts = [key for key in NEEDED if key not in facts]
    if missing_facts:
        raise CapsuleError(
            f"{folder} is damaged: capsule.json says nothing about {missing_facts[0]!r}."
        )
    for name in (n for n in facts.get("complex") or [] if n in tensors):
        tensors[name] = torch.view_as_complex(tensors[name])
    for name in (n for n in facts.get("sparse") or [] if n in tensors):
        tensors[name] = tensors[name].to_sparse()
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
    if (
        main is None
        or main.suffix != ".py"
        or not main.is_file()
        or not main.is_relative_to(Path.cwd())
    ):
        return {}
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = {"module": spec.name} if spec is not None and spec.origin == str(main) else {}
    return {"script": str(main.relative_to(Path.cwd())), "arguments": sys.argv[1:], **module}
