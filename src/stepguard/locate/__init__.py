"""TBD."""

from stepguard.records import Origin, Reading
from stepguard.state.step import Step


def locate(step: Step, reading: Reading) -> Origin:
    return Origin(step=step.index, phase="forward")
