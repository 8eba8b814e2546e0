"""Showing what happened: records in, terminal panels, summaries, plots and a readable log out. No
torch.
"""

from stepguard.report._random import same_random_numbers
from stepguard.report.sinks import HumanLog
from stepguard.report.terminal import Terminal

__all__ = ["HumanLog", "Terminal", "same_random_numbers"]
