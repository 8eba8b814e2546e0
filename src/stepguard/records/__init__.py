"""Plain frozen records: what every other layer exchanges. No torch in here."""

from stepguard.records.decision import Action, Decision
from stepguard.records.evidence import Evidence
from stepguard.records.finding import Certainty, Edit, Finding, Remedy
from stepguard.records.incident import Incident
from stepguard.records.origin import Operand, Origin, Phase, Statement
from stepguard.records.reading import Reading
from stepguard.records.settings import GuardConfig, Policy
from stepguard.records.sink import Sink
from stepguard.records.verdict import Severity, Verdict, VerdictKind
from stepguard.records.verification import Problem, Rate, Role, Verification

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
