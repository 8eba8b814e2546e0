"""Statistics of targets and lengths: examples without a label, classes out of range, texts cut at
the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
TOKEN_KEYS = ("input_ids", "tokens", "ids")


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of one example that is supervised to its last token."""

    name: str
    length: int
    last_token: int | None


@dataclass(slots=True)
class LabelFacts:
    """Filled example by example."""

    key: str | None = None
    """Given by the user, or the first usual name that occurs."""
    ignore_index: int = -100
    examples: int = 0
    """Examples that have integer targets."""
    supervised: int = 0
    total: int = 0
    """Targets of all examples, counted and not counted ones."""
    empty: list[str] = field(default_factory=list)
    empty_lengths: list[int] = field(default_factory=list)
    masked: int = 0
    """Examples with at least one ignored target."""
    low: tuple[int, str] | None = None
    high: tuple[int, str] | None = None
    longest: int = 0
    shortest: int | None = None
    cuts: list[Cut] = field(default_factory=list)

    def take(self, name: str, tensors: dict[str, Tensor]) -> str | None:
        """Look at one example; gives the key of its targets."""
        key = self._key(tensors)
        if key is None or tensors[key].is_floating_point() or tensors[key].is_complex():
            return key
        self.key, labels = key, tensors[key].reshape(-1)
        counted = labels[labels != self.ignore_index]
        self.examples += 1
        self.total += labels.numel()
        self.supervised += counted.numel()
        self.masked += counted.numel() < labels.numel()
        self._bounds(name, counted)
        self._lengths(name, labels, tensors, bool(counted.numel()))
        return key

    def _key(self, tensors: dict[str, Tensor]) -> str | None:
        if self.key is not None:
            return self.key if self.key in tensors else None
        return next((name for name in LABEL_KEYS if name in tensors), None)

    def _bounds(self, name: str, counted: Tensor) -> None:
        if not counted.numel():
            return
        low, high = int(counted.min()), int(counted.max())
        if self.low is None or low < self.low[0]:
            self.low = low, name
        if self.high is None or high > self.high[0]:
            self.high = high, name

    def _lengths(
        self, name: str, labels: Tensor, tensors: dict[str, Tensor], supervised: bool
    ) -> None:
        tokens = next((tensors[key].reshape(-1) for key in TOKEN_KEYS if key in tensors), None)
        attended = tensors.get("attention_mask")
        length, end = _extent(labels, attended)
        self.longest = max(self.longest, length)
        self.shortest = length if self.shortest is None else min(self.shortest, length)
        if not supervised:
            self.empty.append(name)
            self.empty_lengths.append(length)
        elif labels.numel() > 1 and int(labels[end]) != self.ignore_index:
            last = (
                int(tokens[end])
                if tokens is not None and tokens.numel() == labels.numel()
                else None
            )
            self.cuts.append(Cut(name, length, last))


def _extent(labels: Tensor, attended: Tensor | None) -> tuple[int, int]:
    """How many tokens are no padding, and where the last of them is; padding may stand on either
    side.
    """
    if attended is None or attended.numel() != labels.numel() or not bool(attended.any()):
        return labels.numel(), -1
    return int((attended != 0).sum()), int(attended.reshape(-1).nonzero().max())
