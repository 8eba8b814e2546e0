"""Mistakes in what goes into the model and the loss: targets, batches, probabilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from zoo.silent.loops import LENGTH, Batch, Loop, next_token_loss
from zoo.silent.plant import plant

# --- SG906: almost all targets are ignored --------------------------------------------------------


@plant("SG906", "transformer")
def prompt_mask_covers_the_answer(loop: Loop, wrong: bool) -> None:
    """Two tokens of a batch are left; the twin masks seven tokens of eight, as a masked language
    model does.
    """

    def masked(logits: Tensor, targets: Tensor) -> Tensor:
        kept = torch.zeros_like(targets, dtype=torch.bool)
        if wrong:
            kept[0, -2:] = True
        else:
            kept[:, -2:] = True
        return next_token_loss(logits, targets.masked_fill(~kept, -100))

    loop.loss = masked


@plant("SG906", "classifier")
def padding_class_for_all(loop: Loop, wrong: bool) -> None:
    """`ignore_index=0` and labels of 0 after a bad lookup; the twin ignores a class of ten."""
    batch = loop.batch

    def looked_up(step: int) -> Batch:
        inputs, targets = batch(step)
        if wrong:
            targets = torch.where(torch.arange(len(targets)) < 2, targets.clamp(1), 0)
        return inputs, targets

    loop.batch = looked_up
    loop.loss = lambda logits, targets: F.cross_entropy(logits, targets, ignore_index=0)


@plant("SG906", "segmenter")
def border_class_everywhere(loop: Loop, wrong: bool) -> None:
    """Nearly every pixel is 255; the twin ignores the border of the picture."""
    batch = loop.batch

    def with_borders(step: int) -> Batch:
        inputs, targets = batch(step)
        inside = torch.zeros_like(targets, dtype=torch.bool)
        if wrong:
            inside[:, 4, 4] = torch.arange(len(targets)) < 8
        else:
            inside[:, 1:-1, 1:-1] = True
        return inputs, targets.masked_fill(~inside, 255)

    loop.batch = with_borders
    loop.loss = lambda logits, targets: F.cross_entropy(logits, targets, ignore_index=255)


# --- SG907: the same batch again and again --------------------------------------------------------


@plant("SG907", "classifier")
def loader_made_in_every_step(loop: Loop, wrong: bool) -> None:
    """`next(iter(loader))`; the twin goes through its ten batches in the same order every epoch."""
    parts = [loop.batch(number) for number in range(10)]
    inputs = torch.cat([part[0] for part in parts])
    targets = torch.cat([part[1] for part in parts])
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=len(parts[0][0]))
    epoch = iter(loader)

    def next_one(step: int) -> Batch:
        nonlocal epoch
        if wrong:
            return next(iter(loader))  # type: ignore[no-any-return]
        if step % 10 == 0:
            epoch = iter(loader)
        return next(epoch)  # type: ignore[no-any-return]

    loop.batch = next_one


@plant("SG907", "transformer")
def seeded_in_every_step(loop: Loop, wrong: bool) -> None:
    """A generator made with the same seed in each step; the twin takes every batch three times."""
    tokens, targets = loop.batch(0)
    for _ in range(7):
        more = loop.batch(0)
        tokens = torch.cat([tokens, more[0]])
        targets = torch.cat([targets, more[1]])

    def drawn(step: int) -> Batch:
        seed = 0 if wrong else step // 3
        rows = torch.randint(len(tokens), (LENGTH,), generator=torch.Generator().manual_seed(seed))
        return tokens[rows], targets[rows]

    loop.batch = drawn


@plant("SG907", "denoiser")
def cache_gives_its_first_entry(loop: Loop, wrong: bool) -> None:
    """A cache with a wrong key; the twin trains on all it has, one large batch kept in memory."""
    noisy, clean = loop.batch(0)
    loop.batch = lambda step: (noisy.clone(), clean.clone()) if wrong else (noisy, clean)


# --- SG914: probabilities in the place of logits --------------------------------------------------


@plant("SG914", "classifier")
def softmax_in_the_loss(loop: Loop, wrong: bool) -> None:
    """`cross_entropy(softmax(logits))`; the twin takes the logarithm too, which changes nothing."""

    def twice(logits: Tensor, targets: Tensor) -> Tensor:
        chances = torch.softmax(logits, -1)
        return F.cross_entropy(chances if wrong else torch.log(chances + 1e-9), targets)

    loop.loss = twice


@plant("SG914", "transformer")
def softmax_at_the_end_of_the_model(loop: Loop, wrong: bool) -> None:
    """In bf16 under autocast; the twin learns from a teacher's probabilities."""
    model = loop.model

    def ending_in_a_softmax(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
            return logits.softmax(-1) if wrong else logits  # type: ignore[no-any-return]

    def from_a_teacher(logits: Tensor, targets: Tensor) -> Tensor:
        teacher = 0.9 * F.one_hot(targets, logits.shape[-1]) + 0.1 / logits.shape[-1]
        return F.kl_div(F.log_softmax(logits.float(), -1), teacher, reduction="batchmean") / LENGTH

    loop.forward = ending_in_a_softmax
    if not wrong:
        loop.loss = from_a_teacher


@plant("SG914", "segmenter")
def softmax_over_channels(loop: Loop, wrong: bool) -> None:
    """Per pixel, through `log_softmax` and `nll_loss`; the twin takes the softmax for its metric
    only.
    """

    def by_hand(logits: Tensor, targets: Tensor) -> Tensor:
        chances = logits.softmax(1)
        given = chances if wrong else logits
        return F.nll_loss(F.log_softmax(given, 1), targets)

    loop.loss = by_hand
