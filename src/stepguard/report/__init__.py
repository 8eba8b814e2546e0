"""Showing what happened: records in, terminal panels, summaries, plots and a readable log out. No
torch.
"""

import random

# Importing rich.style draws from Python's `random`: done here once, and taken back.
_state = random.getstate()
import rich.style  # noqa: E402, F401  # the module that draws

random.setstate(_state)

from stepguard.report.screen import same_random_numbers  # noqa: E402
from stepguard.report.sinks import HumanLog  # noqa: E402
from stepguard.report.terminal import Terminal  # noqa: E402

__all__ = ["HumanLog", "Terminal", "same_random_numbers"]
