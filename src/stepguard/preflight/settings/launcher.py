"""What the launcher decides: accelerate's file, and the environment accelerate and torchrun set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepguard.preflight.settings.keys import as_number
from stepguard.preflight.settings.wanted_precision import meant

# accelerate launch sets its own variables, torchrun sets WORLD_SIZE.
ENVIRONMENT = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_DISTRIBUTED_TYPE": "distributed_type",
    "WORLD_SIZE": "num_processes",
    "CUDA_VISIBLE_DEVICES": "gpu_ids",
}
"""Variable -> field of accelerate's file."""


@dataclass(slots=True)
class Launcher:
    """Values by field, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    """File and environment say different things."""

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def dtype(self) -> str | None:
        if "mixed_precision" not in self.values:
            return None
        return meant(self.values["mixed_precision"])

    def said(self, name: str) -> str:
        """`mixed_precision=bf16 in launch.yaml`."""
        return f"{name}={self.values[name]} in {self.places[name]}"

    def number(self, name: str) -> float | None:
        return as_number(self.values.get(name))


def read_launcher(file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]) -> Launcher:
    """Merge both sources. The environment is what the script will see, so it wins."""
    found = Launcher()
    for name in ENVIRONMENT.values():
        if file.get(name) is not None:
            found.values[name] = file[name]
            found.places[name] = file_name
    for variable, name in ENVIRONMENT.items():
        value = environ.get(variable)
        if not value:
            continue
        if name in found.values and str(found.values[name]).lower() != value.lower():
            found.conflicts.append(
                f"{file_name} says {name}={found.values[name]}, the environment {variable}={value}"
            )
        found.values[name] = value
        found.places[name] = variable
    return found
