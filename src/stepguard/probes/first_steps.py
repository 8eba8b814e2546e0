"""What the first steps tell: does a resumed run go on where the one before ended, and which tokens
do the first batches teach?
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from stepguard._errors import JournalError
from stepguard.diagnose.case import ResumeFacts, WeightFacts
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import position
from stepguard.journal import parse_line
from stepguard.locate.operands import plain
from stepguard.probes.statistics import root_mean_square
from stepguard.records import Reading
from stepguard.records.probes import Look, TargetFacts
from stepguard.sentinel.torch_patches import last_loads
from stepguard.tensors.names import dotted, named_modules, named_parameters
from stepguard.tensors.values import is_lazy

# --- Did a resumed run resume? Its first steps beside the journal of the run before, in one folder.


HEAD, TAIL, LOOKS = 64, 512, 16
"""Step lines at the beginning and the end of a journal, and probes at its end, that are parsed."""
LEAST_STEPS = 8
"""Updates that make a run: one that failed at its start left nothing to resume from."""
NEAR = 0.25
"""Distance of the weights to those of a probe in the run before, beside their distance to those it
began with, at which they are taken for loaded ones. Weights made anew are about as far from both.
"""
SAME_RATE, OTHER_RATE = 0.01, 1.5
"""Relative difference of rates that are equal, and the factor between rates that are not."""

_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Models that had a guard in this process: their next guard resumes nothing, it continues."""


class EarlierRun:
    """What a journal says of the attempts before the newest one."""

    def __init__(self, journal: Path) -> None:
        self.header: dict[str, Any] = {}
        self.steps: dict[int, dict[str, Any]] = {}
        """Committed steps at the beginning and the end; the newest line of a step counts."""
        self.looks: list[Look] = []
        """The first one, and the newest."""
        head: list[bytes] = []
        tail: deque[bytes] = deque(maxlen=TAIL)
        looks: list[bytes] = []
        kept: list[tuple[bytes, list[bytes], deque[bytes], list[bytes]]] = []
        with journal.open("rb") as lines:
            for line in lines:
                if b'"type":"run"' in line:
                    head, tail, looks = [], deque(maxlen=TAIL), []
                    kept.append((line, head, tail, looks))
                elif b'"type":"step"' in line:
                    (head if len(head) < HEAD else tail).append(line)
                elif b'"type":"look"' in line:
                    looks.append(line)
                    del looks[1:-LOOKS]
        for start, first, last, seen in kept[:-1]:  # the newest one is this process's
            self._add(journal, start, [*first, *last], seen)

    def _add(self, journal: Path, start: bytes, lines: list[bytes], looks: list[bytes]) -> None:
        """One attempt: a run by itself, or what continues the attempt before it."""
        steps = {}
        for line in lines:
            fields = parse_line(line, journal, 0)
            if fields is not None and fields.get("committed"):
                steps[int(fields["step"])] = fields
        if len(steps) < LEAST_STEPS:
            return
        if not min(steps):
            self.steps, self.looks = {}, []
        self.header = parse_line(start, journal, 0) or {}
        self.steps |= steps
        for line in looks:
            fields = parse_line(line, journal, 0)
            if fields is not None:
                self.looks.append(fields["look"])


class ResumeCheck:
    """Facts of the first steps of this process, for the rule on resumes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._continues = context.roots[""] in _seen
        _seen[context.roots[""]] = True
        self.begun = False
        self._first_step = 0
        self._state: int | None = None
        """Updates that the optimizer's state counted before the first step; None: it was empty."""
        self._schedule: tuple[int, ...] = ()
        self._sizes: tuple[list[str], Tensor] | None = None
        """Names of the parameters, and their sizes before the first step, on their device."""
        self._first: Reading | None = None
        self._look: Look | None = None
        """The first probe of this process."""
        self._facts: ResumeFacts | None = None
        self._judged = False

    def begin(self) -> None:
        """The first step is about to begin: it shows what was loaded."""
        context = self._context
        self.begun = True
        if self._continues:
            return
        self._first_step = context.step
        self._state = updates_counted(context.optimizer)
        with suppress(Exception):  # a schedule of the user's own
            if context.scheduler is not None:
                self._schedule = position(context.scheduler)
        if context.outputs.journal is None or context.run.attempt < 2 or context.sharded:
            return
        names, sizes = [], []
        for name, parameter in named_parameters(context.roots):
            if not is_lazy(parameter) and parameter.is_floating_point() and parameter.numel():
                names.append(name)
                sizes.append(root_mean_square(plain(parameter.detach())))
        if sizes:
            self._sizes = names, torch.stack([size.to(sizes[0].device) for size in sizes])

    def facts(self, first: Reading | None, looks: Sequence[Look]) -> ResumeFacts | None:
        """Judged once, from the first probe on; None where nothing was resumed."""
        if self._judged or first is None or not self.begun or self._continues:
            return self._facts
        self._judged = True
        if first.step == self._first_step:
            self._first = first
            self._look = looks[0] if looks else None
            self._facts = self._judge()
        return self._facts

    def _judge(self) -> ResumeFacts | None:
        context = self._context
        earlier = self._earlier()
        if earlier is None:
            # the framework says that it goes on: all that can be known is what it brought along
            return self._described(None, None) if self._first_step else None
        near = None
        if self._sizes is not None and earlier.looks:
            names, sizes = self._sizes  # read where a probe has just waited for the device
            near = nearest(dict(zip(names, sizes.tolist(), strict=True)), earlier.looks)
        resumed = self._first_step or self._state or near is not None
        same = earlier.header.get("optimizer") == type(context.optimizer).__name__ and len(
            earlier.steps[max(earlier.steps)].get("lr", ())
        ) == len(self._first_lr)
        return self._described(earlier, near) if resumed and same else None

    def _earlier(self) -> EarlierRun | None:
        journal = self._context.outputs.journal
        if journal is None or self._context.run.attempt < 2:
            return None
        with suppress(OSError, JournalError, KeyError, ValueError, TypeError):
            earlier = EarlierRun(journal.path)
            return earlier if earlier.steps else None
        return None

    @property
    def _first_lr(self) -> tuple[float, ...]:
        return () if self._first is None else tuple(self._first.lr)

    def _described(self, earlier: EarlierRun | None, near: int | None) -> ResumeFacts:
        assert self._first is not None
        context = self._context
        known: dict[str, Any] = {}
        step = self._first_step or self._state
        if earlier is not None:
            last = max(earlier.steps)
            losses = []
            for number in sorted(earlier.steps)[-LOOKS:]:
                loss = earlier.steps[number].get("loss")
                if isinstance(loss, float | int) and math.isfinite(loss):
                    losses.append(float(loss))
            # a run may have gone on for a while after the checkpoint
            expected = earlier.steps.get(step or -1, earlier.steps[last])
            known = {
                "last": last,
                "losses": tuple(losses),
                "lr": tuple(expected.get("lr", ())),
                "lr_restarted": self._restarted(earlier, tuple(expected.get("lr", ()))),
                "batch_again": bool(step) and self._batch_again(earlier, step or 0),
            }
        return ResumeFacts(
            step=self._first_step,
            updates=self._state,
            near=near,
            # who has moments by now, and had none before the first step, has begun again
            moments_empty=self._state is None and keeps_moments(context.optimizer),
            optimizer=type(context.optimizer).__name__,
            lr_now=self._first_lr,
            loss_now=self._first.loss,
            **known,
        )

    def _restarted(self, earlier: EarlierRun, expected: tuple[float, ...]) -> bool:
        """Are the rates those that the run before began with, and not those it ended with?"""
        if self._context.run.resumed or any(place > 0 for place in self._schedule):
            return False
        if 0 not in earlier.steps:
            return False
        began = tuple(earlier.steps[0].get("lr", ()))
        now = self._first_lr
        if not len(now) == len(began) == len(expected) or not now:
            return False
        if not all(map(_equal, now, began)) or not any(map(_apart, now, expected)):
            return False
        # a schedule of several cycles comes back to where it began, and may do so right now
        left = False
        for number in sorted(earlier.steps):
            rates = tuple(earlier.steps[number].get("lr", ()))
            if len(rates) == len(began) and any(map(_apart, rates, began)):
                left = True
            elif left:
                return False
        return True

    def _batch_again(self, earlier: EarlierRun, step: int) -> bool:
        """Is the batch of the first probe that of the first probe of the run before?"""
        look = self._look
        if look is None or not look.facts.batch or len(earlier.looks) < 2:
            return False
        began, *later = earlier.looks
        same_place = look.step - self._first_step == began.step
        if not same_place or began.facts.batch != look.facts.batch:
            return False
        if any(one.facts.batch == look.facts.batch for one in later):
            return (
                False  # the data repeats: an epoch as long as the gap of two probes, or one batch
            )
        return _within_an_epoch(self._context, step, look.step)


def updates_counted(optimizer: Optimizer) -> int | None:
    """How many updates the optimizer's state has seen, without reading a device; None: none.

    1 where there is a state that does not count.
    """
    counted = None
    for state in optimizer.state.values():
        if not isinstance(state, dict) or not state:
            continue
        steps = state.get("step", 1)
        if isinstance(steps, Tensor):
            steps = int(steps) if steps.device.type == "cpu" and steps.numel() == 1 else 1
        if isinstance(steps, int | float) and steps > 0:
            counted = max(counted or 0, int(steps))
    return counted


def keeps_moments(optimizer: Optimizer) -> bool:
    """Does the optimizer keep a tensor of a parameter's shape beside it?"""
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict) and isinstance(parameter, Tensor):
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                    return True
    return False


def nearest(now: dict[str, float], earlier: Sequence[Look]) -> int | None:
    """The step of the probe whose weights these are, or nearly so; None: they are new ones."""
    if len(earlier) < 2:
        return None
    began = _distance(now, earlier[0])
    found = min(((_distance(now, one), one.step) for one in earlier[1:]), default=(math.inf, 0))
    return found[1] if found[0] < NEAR * began else None


def _distance(now: dict[str, float], look: Look) -> float:
    """Mean relative difference in the size of parameters; infinite between two models."""
    rows = {row.name: row.weight for row in look.parameters}
    if not rows or not rows.keys() <= now.keys():
        return math.inf
    total = 0.0
    for name, size in rows.items():
        largest = max(size, now[name])
        total += abs(size - now[name]) / largest if largest else 0.0
    return total / len(rows)


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME_RATE)


def _apart(one: float, other: float) -> bool:
    low, high = sorted((abs(one), abs(other)))
    return high > OTHER_RATE * low


def _within_an_epoch(context: Context, step: int, look_step: int) -> bool:
    """Was the run before in the middle of an epoch? Only there is its first batch out of place.

    Asked once in a run at most, and only where the finding would be reported.
    """
    recent = context.data.recent
    batches = len(recent.of_step(look_step)) if recent is not None else 0
    if not batches:
        return False  # not from a DataLoader: nothing says how long an epoch is
    lengths = []
    gc.collect()
    for thing in gc.get_objects():
        # type() and not isinstance: proxies answer isinstance with side effects
        if issubclass(type(thing), DataLoader):
            with suppress(Exception):  # a data set without a length, or of the user's own
                lengths.append(len(thing))
    made = step * batches
    return bool(lengths) and all(length > 1 and made % length for length in lengths)


# --- Weights that a file did not fill, and those that are no longer tied.


def weight_facts(context: Context) -> WeightFacts:
    """What loads and the configuration say. Reads no device."""
    if context.sharded:
        return WeightFacts()  # wrappers have replaced the parameters
    untied: list[tuple[str, str]] = []
    loaded = WeightFacts()
    for prefix, module in named_modules(context.roots):
        ties = getattr(module, "all_tied_weights_keys", None)
        config = getattr(module, "config", None)
        if isinstance(ties, dict) and getattr(config, "tie_word_embeddings", False) is True:
            own = dict(module.named_parameters(remove_duplicate=False))
            known = [(one, other) for one, other in ties.items() if {one, other} <= own.keys()]
            apart = [(one, other) for one, other in known if own[one] is not own[other]]
            untied += [(dotted(prefix, one), dotted(prefix, other)) for one, other in apart]
        unfilled, unused = last_loads.get(module, ((), ()))  # type: ignore[no-untyped-call]
        if unfilled and not loaded.missing:
            loaded = _left_unfilled(prefix, module, unfilled, unused)
    return replace(loaded, untied=tuple(untied))


def _left_unfilled(
    prefix: str, module: nn.Module, unfilled: Sequence[str], unused: Sequence[str]
) -> WeightFacts:
    own = dict(module.named_parameters(remove_duplicate=False))
    renamed = []
    for name in unfilled:
        # the same name behind another prefix
        twins = [one for one in unused if _ends_alike(one, name)]
        renamed += [(dotted(prefix, name), twins[0])] if len(twins) == 1 else []
    frozen = [one for one in unfilled if one in own and not own[one].requires_grad]
    heads = _only_embedded(module, unfilled, own)
    return WeightFacts(
        missing=len(unfilled),
        heads=tuple((dotted(prefix, one), dotted(prefix, name)) for one, name in heads),
        renamed=tuple(renamed),
        frozen=tuple(dotted(prefix, one) for one in frozen),
    )


def _only_embedded(
    module: nn.Module, unfilled: Sequence[str], own: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    """Unfilled weights, each with the embedding that a file written with tied weights has alone."""
    for path, part in module.named_modules():
        name = dotted(path, "weight")
        if isinstance(part, nn.Embedding) and name in own and name not in unfilled:
            for one in unfilled:
                if one in own and own[one].shape == own[name].shape:
                    yield one, name


def _ends_alike(one: str, other: str) -> bool:
    return one.endswith(f".{other}") or other.endswith(f".{one}")


# --- Targets that are end tokens, or padding, in batches of causal language models with `input_ids`
# and `labels`, as transformers and TRL collate them.


IGNORED = -100
BATCHES = 8
"""Batches that are counted."""
MOST_TOKENS = 1 << 20
"""A batch with more tokens is not counted."""
SETTLED = 16
"""Rows that are needed for a judgement."""


class TargetCounts:
    """Counts on the device of the batches; read once, when a health check is made anyway."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counted: list[Tensor] = []
        self._ends: tuple[int, ...] | None = None
        self._pad: int | None = None
        self._facts: TargetFacts | None = None

    def add(self, batch: Any) -> None:
        """Count a batch; others than those of causal language models are left alone."""
        if len(self._counted) >= BATCHES or self._facts is not None:
            return
        for found in _batches(batch):
            ids, labels = found["input_ids"], found["labels"]
            mask = found.get("attention_mask")
            if not _fits(ids, labels) or (mask is not None and not _fits(ids, mask)):
                continue
            if self._ends is None:
                self._ends, self._pad = special_ids(self._context)
            if self._ends:
                self._counted.append(_count(ids, labels, mask, self._ends, self._pad))
            return

    def facts(self) -> TargetFacts | None:
        """The sum of all counts; None while there are too few rows."""
        if self._facts is None and len(self._counted) > 1:
            total = torch.stack(self._counted).sum(0).tolist()
            if total[0] < SETTLED:
                return None
            first, last = (torch.stack([c[i] for c in self._counted]) for i in (-2, -1))
            one_end = int(first.min()) == int(last.max())
            self._facts = TargetFacts(
                **dict(zip(COUNTS, total, strict=False)),
                same_last=one_end,
                end=self._ends[0] if self._ends else 0,
                pad=self._pad,
            )
            self._counted = []
        return self._facts


COUNTS = (
    "rows",
    "targets",
    "unlike",
    "ended",
    "ends",
    "padding",
    "padding_targets",
    "padded_rows",
    "prompted",
    "unended",
)


def _batches(batch: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        if "input_ids" in batch and "labels" in batch:
            yield batch
        return
    for part in batch if isinstance(batch, tuple | list) else ():
        yield from _batches(part)


def _fits(ids: Any, other: Any) -> bool:
    for one in (ids, other):
        if type(one) is not Tensor or one.dim() != 2 or one.is_floating_point():
            return False
    return bool(ids.shape == other.shape) and 0 < ids.numel() <= MOST_TOKENS


def special_ids(context: Context) -> tuple[tuple[int, ...], int | None]:
    """End tokens and the padding token, of the tokenizer and of the model's configuration."""
    processor = context.data.tokenizer
    owners = [getattr(processor, "tokenizer", processor)]
    for root in context.roots.values():
        inner = getattr(root, "module", root)
        owners += [getattr(inner, "config", None), getattr(inner, "generation_config", None)]
    ends: dict[int, None] = {}
    pad = None
    for owner in owners:
        given = getattr(owner, "eos_token_id", None)
        for one in given if isinstance(given, list | tuple) else (given,):
            if type(one) is int:
                ends[one] = None
        found = getattr(owner, "pad_token_id", None)
        if pad is None and type(found) is int:
            pad = found
    return tuple(ends), pad


@torch.no_grad()
def _count(
    ids: Tensor, labels: Tensor, mask: Tensor | None, ends: tuple[int, ...], pad: int | None
) -> Tensor:
    """One number for each of COUNTS, then the lowest and the highest last target of a row."""
    ids, labels = ids.long(), labels.long()
    kept = labels != IGNORED
    end = torch.zeros_like(kept)
    target_end = torch.zeros_like(kept)
    for one in ends:
        end |= ids == one
        target_end |= labels == one
    if mask is not None:
        real = mask != 0
    elif pad is not None and pad not in ends:
        real = ids != pad
    else:
        real = torch.ones_like(kept)  # what pads is not known: every row counts as full
    places = torch.arange(ids.shape[1], device=ids.device)
    last_real = torch.where(real, places, 0).amax(1, keepdim=True)
    first_real = torch.where(real, places, ids.shape[1] - 1).amin(1, keepdim=True)
    last_kept = torch.where(kept, places, 0).amax(1, keepdim=True)
    padded = ~real.all(1)
    # one end token before the padding says nothing of a row whose padding is not known
    known = padded if mask is None and (pad is None or pad in ends) else torch.ones_like(padded)
    ends_so = end.gather(1, last_real).squeeze(1) & known & kept.any(1)
    taught = labels.gather(1, last_kept)
    pads = ~real & kept
    if pad is not None:
        pads = pads & (labels == pad)
    values = [
        kept.any(1).sum(),
        kept.sum(),
        (kept & real & (labels != ids)).sum(),
        ends_so.sum(),
        target_end.sum(),
        (~real).sum(),
        pads.sum(),
        padded.sum(),
        (~kept.gather(1, first_real).squeeze(1) & kept.any(1)).sum(),
        # padding on the left says nothing of where a row ends: it may have been cut
        (~real[:, -1] & ~end.gather(1, last_real).squeeze(1) & kept.any(1)).sum(),
        taught.amin(),
        taught.amax(),
    ]
    return torch.stack(values)
