"""SG921: a classifier that knows how frequent the classes are, and nothing else."""

from __future__ import annotations

import math
from statistics import fmean

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, possible
from stepguard.diagnose.seen import trained
from stepguard.records.look import Look

ENOUGH_LOOKS = 8
LONG = 96
"""Steps after which something would have been learned."""
BELOW, ABOVE = 0.98, 1.03
"""Mean loss, beside the entropy, of a model that knows no more; one that is trained on noise is a
little above."""
LEAST_ENTROPY = 0.3
NEARLY_ALL = 0.9
FEWEST_TARGETS = 256
MOVED = 0.05
"""Of the size of all weights, that they must have moved by."""
LEARNED = 0.8
"""Loss, beside the entropy of the labels, below which something is learned from the inputs."""


def recognise(case: Case) -> Proof | None:
    looks = [look for look in case.looks if look.facts.classes]
    if len(looks) < ENOUGH_LOOKS:
        return None
    counts = [sum(column) for column in zip(*_of_one_size(looks), strict=True)]
    total = sum(counts)
    if total < FEWEST_TARGETS:
        return None
    return _answers_by_frequency(looks, counts)


def _answers_by_frequency(looks: list[Look], counts: list[int]) -> Proof | None:
    """Nearly all targets are one class, or the loss is that of their frequencies."""
    total = sum(counts)
    share = max(counts) / total
    entropy = -sum(count / total * math.log(count / total) for count in counts if count)
    late = [look.facts.cross_entropy for look in looks[len(looks) // 2 :]]
    losses = [loss for loss in late if loss is not None]
    learned = bool(losses) and fmean(losses) < LEARNED * entropy
    if share == 1.0:
        return None  # contrastive losses put the right answer first, always
    if share >= NEARLY_ALL and len(counts) > 1 and not learned and looks[-1].step >= LONG:
        return possible(
            f"{share:.0%} of the {total:,} targets seen at {len(looks)} looks are class "
            f"{counts.index(max(counts))} of {len(counts)}: a model that always answers so is "
            "right as often, and the loss is no lower than its"
        )
    if looks[-1].step < LONG or entropy < LEAST_ENTROPY or not _stays_at(entropy, losses):
        return None
    if _distance(looks) < MOVED:
        return None  # weights that have hardly moved cannot have learned anything yet
    return possible(
        f"the cross entropy is {fmean(losses):.4g} up to step {looks[-1].step}, and that of the "
        f"label frequencies alone is {entropy:.4g}: the inputs tell the model nothing about the "
        "labels"
    )


def _distance(looks: list[Look]) -> float:
    """How far all weights would have come with every update as large as at the looks."""
    shares = []
    for look in looks:
        rows = trained(look)
        size = sum(one.elements * one.weight**2 for one in rows)
        step = sum(one.elements * (one.update or 0.0) ** 2 for one in rows)
        shares.append(math.sqrt(step / size) if size else 0.0)
    return fmean(shares) * looks[-1].step


def _stays_at(entropy: float, losses: list[float]) -> bool:
    """A slow start that still falls is not the end."""
    half = len(losses) // 2
    if not half or not BELOW <= fmean(losses) / entropy <= ABOVE:
        return False
    return fmean(losses[half:]) >= BELOW * fmean(losses[:half])


def _of_one_size(looks: list[Look]) -> list[tuple[int, ...]]:
    size = len(looks[-1].facts.classes)
    return [look.facts.classes for look in looks if len(look.facts.classes) == size]


RULE = Rule(code="SG921", recognise=recognise)
