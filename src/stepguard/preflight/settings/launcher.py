"""What the launcher decides: accelerate's file, and the environment accelerate and torchrun leave
for the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepguard.preflight.settings.keys import as_number
from stepguard.preflight.settings.precision import meant

ENVIRONMENT = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_DISTRIBUTED_TYPE": "distributed_type",
    "WORLD_SIZE": "num_processes",
    "CUDA_VISIBLE_DEVICES": "gpu_ids",
}
FIELDS = (
    "mixed_precision",
    "gradient_accumulation_steps",
    "distributed_type",
    "num_processes",
    "gpu_ids",
)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Values by field, and where each came from. The environment is what the script sees, so it
    comes first.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()
    """File and environment say different things."""

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def dtype(self) -> str | None:
        return meant(self.values["mixed_precision"]) if "mixed_precision" in self.values else None

    def said(self, name: str) -> str:
        """`mixed_precision=bf16 in launch.yaml`."""
        return f"{name}={self.values[name]} in {self.places[name]}"

    def number(self, name: str) -> float | None:
        return as_number(self.values.get(name))


def launcher(file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]) -> Launcher:
    """Both sources as one."""
    values, places, conflicts = {}, {}, []
    for name in FIELDS:
        if file.get(name) is not None:
            values[name], places[name] = file[name], file_name
    for variable, name in ENVIRONMENT.items():
        if not environ.get(variable):
            continue
        if name in values and str(values[name]).lower() != environ[variable].lower():
            conflicts.append(
                f"{file_name} says {name}={values[name]}, the environment "
                f"{variable}={environ[variable]}"
            )
        values[name], places[name] = environ[variable], variable
    return Launcher(values, places, tuple(conflicts))
