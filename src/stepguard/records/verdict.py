"""What a Reading means: fine, worth a line, suspicious, or an incident."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VerdictKind = Literal[
    "ok",
    "nonfinite_input",
    "nonfinite_loss",
    "loss_overflow",
    "nonfinite_gradient",
    "nonfinite_parameter",
    "nonfinite_buffer",
    "nonfinite_optimizer_state",
    "infinite_norm",
    "zero_loss",
    "no_labels",
    "scale_calibration",
    "scaler_collapse",
    "spike",
    "drift",
    "lr_mismatch",
    "exception",
    "replica_drift",
    "same_data",
]

FINITE_KINDS: tuple[VerdictKind, ...] = ("spike", "drift")
"""Anomalies of finite numbers: told, and by default not acted upon."""

Severity = Literal["ok", "note", "suspicion", "incident"]
"""`note` is a journal line; `suspicion` asks for evidence; `incident` is acted upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one step: kind, how grave it is, and the numbers it rests on."""

    kind: VerdictKind = "ok"
    severity: Severity = "ok"
    summary: str = ""
    """One sentence with the value that was wrong."""
    evidence: dict[str, float | int | str] | None = None

    @property
    def bad(self) -> bool:
        """True when the step must not be committed."""
        return self.severity == "incident"

    @property
    def finite_anomaly(self) -> bool:
        """True for a spike or a drift: suspicious, but every number is finite."""
        return self.kind in FINITE_KINDS


OK = Verdict()
