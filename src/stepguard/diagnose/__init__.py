"""Why a step went bad: pure rules over origin, reading, verdict and run. No torch."""

from stepguard.diagnose.case import Case, RunFacts
from stepguard.diagnose.engine import UnknownCode, all_rules, diagnose, explain
from stepguard.diagnose.rule import Proof, Rule

__all__ = ["Case", "Proof", "Rule", "RunFacts", "UnknownCode", "all_rules", "diagnose", "explain"]
