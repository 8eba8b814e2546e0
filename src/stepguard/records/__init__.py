"""Plain frozen records: what every other layer exchanges. No torch in here."""

from stepguard.records.checks import Problem, Rate, Role, Verification
from stepguard.records.incident import (
    Action,
    Certainty,
    Decision,
    Edit,
    Evidence,
    Finding,
    Incident,
    Operand,
    Origin,
    Phase,
    Reading,
    Remedy,
    Severity,
    Sink,
    Statement,
    Verdict,
    VerdictKind,
)
from stepguard.records.settings import GuardConfig, Policy

__all__ = [
    "Action",
    "Certainty",
    "Decision",
    "Edit",
    "Evidence",
    "Finding",
    "GuardConfig",
    "Incident",
    "Operand",
    "Origin",
    "Phase",
    "Policy",
    "Problem",
    "Rate",
    "Reading",
    "Remedy",
    "Role",
    "Severity",
    "Sink",
    "Statement",
    "Verdict",
    "VerdictKind",
    "Verification",
]
