"""Statistics of targets: examples without one, the range of classes, texts cut at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

LABEL_KEYS: tuple[str, ...] = ("labels", "label", "targets", "target", "y")
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
    """Given by the user, or the first usual name that occurs; of a tuple, its last part."""
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
        """Count one example; returns the key of its targets."""
        key = self._key(tensors)
        if key is None or tensors[key].is_floating_point() or tensors[key].is_complex():
            return key
        self.key = key
        labels = tensors[key].reshape(-1)
        counted = labels[labels != self.ignore_index]
        self.examples += 1
        self.total += labels.numel()
        self.supervised += counted.numel()
        self.masked += counted.numel() < labels.numel()
        length, end = _extent(labels, tensors.get("attention_mask"))
        self.longest = max(self.longest, length)
        if self.shortest is None or length < self.shortest:
            self.shortest = length
        if not counted.numel():
            self.empty.append(name)
            self.empty_lengths.append(length)
            return key
        self._bounds(name, int(counted.min()), int(counted.max()))
        if labels.numel() > 1 and int(labels[end]) != self.ignore_index:
            self.cuts.append(Cut(name, length, _token(tensors, labels.numel(), end)))
        return key

    def _key(self, tensors: dict[str, Tensor]) -> str | None:
        names = LABEL_KEYS
        if self.key is not None:
            names = (self.key,)
        for name in names:
            if name in tensors:
                return name
        # Of (x, y) and (x, lengths, y) the last part is the target.
        if self.key is None and len(tensors) > 1 and all(name.isdigit() for name in tensors):
            return max(tensors, key=int)
        return None

    def _bounds(self, name: str, low: int, high: int) -> None:
        if self.low is None or low < self.low[0]:
            self.low = (low, name)
        if self.high is None or high > self.high[0]:
            self.high = (high, name)


def _token(tensors: dict[str, Tensor], length: int, position: int) -> int | None:
    """The token at a position, if the example has one token for each label."""
    for key in TOKEN_KEYS:
        if key in tensors:
            if tensors[key].numel() != length:
                return None
            return int(tensors[key].reshape(-1)[position])
    return None


def _extent(labels: Tensor, attended: Tensor | None) -> tuple[int, int]:
    """Count the tokens that are not padding, and find the last: padding may be on either side."""
    if attended is None or attended.numel() != labels.numel() or not bool(attended.any()):
        return labels.numel(), -1
    return int((attended != 0).sum()), int(attended.reshape(-1).nonzero().max())
