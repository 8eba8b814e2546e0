"""Why a step went bad: pure rules over origin, reading, verdict and run. No torch."""

from stepguard.diagnose.case import Case
from stepguard.diagnose.engine import diagnose
from stepguard.diagnose.page import UnknownCode, all_rules, explain
from stepguard.diagnose.rule import Proof, Rule
from stepguard.diagnose.run_facts import RunFacts

__all__ = ["Case", "Proof", "Rule", "RunFacts", "UnknownCode", "all_rules", "diagnose", "explain"]
