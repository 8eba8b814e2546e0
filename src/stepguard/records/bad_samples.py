"""One line of the ledger: samples that a step went on without, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Identity = int | str
"""Index of a sample in the data set (or its key there), or the value of `GuardConfig.id_key`."""
Extent = Literal["sample", "micro_batch", "step"]

DATA_CAUSES = ("SG1", "SG2", "SG4")
"""Codes of what is born in data, forward or loss expression: the same samples fail again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSamples:
    """Samples of one micro-batch that did not take part in an update."""

    step: int
    run: str | None = None
    """Id of the run; None where runs have none."""
    attempt: int = 1
    """Which process of the run it was."""
    rank: int = 0
    time: float = 0.0
    micro_batch: int | None = None
    """Which micro-batch of the step, from 0; None where the step had one only."""
    samples: tuple[int, ...] = ()
    """Rows of the micro-batch that are proven guilty; empty where none could be proven."""
    count: int = 0
    """Samples lost; 0 where they cannot be counted."""
    of: int = 0
    """Samples of the whole step; 0 where they cannot be counted."""
    indices: tuple[Identity, ...] | None = None
    """Where `samples` (if empty, all rows) are in the data set, in their order; None: not known."""
    ids: tuple[Identity, ...] | None = None
    """Their values of `GuardConfig.id_key`; None: not known."""
    epoch: int | None = None
    """Pass over the data, from 0."""
    batch: int | None = None
    """Number of the batch in that pass, from 0."""
    left_out: Extent = "step"
    """What the update was made without: the samples, the micro-batch, or the whole step."""
    cause: str = ""
    """Code of the first finding, or the kind of the verdict where there is none."""
    innocent: bool = False
    """These samples did nothing: they were lost with the step of others."""
    place: str = ""
    incident: str = ""

    @property
    def would_fail_again(self) -> bool:
        """Did the data cause it, rather than the weights, the scale or the hardware?"""
        return self.cause.startswith(DATA_CAUSES)
