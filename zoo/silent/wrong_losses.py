"""Mistakes in what the loss is given, what of it counts, and what becomes of its gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.silent.loops import (
    CLASSES,
    TOKENS,
    WIDTH,
    Batch,
    Loop,
    next_token_loss,
)
from zoo.silent.plant import plant

# --- SG902: gradients zeroed at the wrong time ----------------------------------------------------


@plant("SG902", "segmenter")
def zeroed_before_every_micro_batch(loop: Loop, wrong: bool) -> None:
    """Of four micro-batches one counts; the twin zeroes before the first of them."""
    optimizer, batch = loop.optimizer, loop.batch
    loop.micro_batches = 4

    def zeroing(step: int) -> Batch:
        if wrong:
            optimizer.zero_grad()
        return batch(step)

    loop.batch = zeroing


# --- SG903: tensors beside the model --------------------------------------------------------------


@plant("SG903", "segmenter")
def temperature_beside_the_model(loop: Loop, wrong: bool) -> None:
    """A learned temperature that no optimizer has; the twin gives it to the optimizer."""
    temperature = nn.Parameter(torch.ones(1))
    if not wrong:
        trained = [*loop.model.parameters(), temperature]
        loop.train_with(torch.optim.Adam(trained, lr=3e-3))
    loop.loss = lambda logits, targets: F.cross_entropy(logits * temperature, targets)


# --- SG904: no gradient for a part of the model ---------------------------------------------------


@plant("SG904", "segmenter")
def detached_skip_connection(loop: Loop, wrong: bool) -> None:
    """A branch beside the body is detached; the twin adds it as it is."""
    model = loop.model
    model.branch = nn.Conv2d(1, 16, 1)
    loop.train_with(torch.optim.Adam(model.parameters(), lr=3e-3))

    def branched(pictures: Tensor) -> Tensor:
        side = model.branch(pictures)
        features = model.body(pictures) + (side.detach() if wrong else side)
        return model.head(features)  # type: ignore[no-any-return]

    model.forward = branched


# --- SG908: a part of the loss that nothing is learned from ---------------------------------------


@plant("SG908", "transformer")
def penalty_without_gradient(loop: Loop, wrong: bool) -> None:
    """The size of the logits is punished under no_grad; the twin punishes it."""

    def punished(logits: Tensor, targets: Tensor) -> Tensor:
        with torch.set_grad_enabled(not wrong):
            size = 1e-3 * logits.square().mean()
        return next_token_loss(logits, targets) + size

    loop.loss = punished


# --- SG912: a schedule that is over too soon ------------------------------------------------------


@plant("SG912", "segmenter")
def stepped_with_every_batch(loop: Loop, wrong: bool) -> None:
    """A decay for epochs is stepped with every batch; the twin steps it every fifty."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.8)

    def after(step: int) -> None:
        if wrong or step % 50 == 49:
            schedule.step()

    loop.after = after


# --- SG914: other losses that are given the wrong thing -------------------------------------------


@plant("SG914", "denoiser")
def sigmoid_before_logits_loss(loop: Loop, wrong: bool) -> None:
    """`binary_cross_entropy_with_logits(sigmoid(x))`; the twin uses the loss of probabilities."""

    def twice(outputs: Tensor, targets: Tensor) -> Tensor:
        chances = torch.sigmoid(outputs)
        if wrong:
            return F.binary_cross_entropy_with_logits(chances, targets)
        return F.binary_cross_entropy(chances, targets)

    loop.loss = twice


@plant("SG914", "classifier")
def probabilities_for_kl_div(loop: Loop, wrong: bool) -> None:
    """`kl_div` without the logarithm of its input; the twin takes it."""

    def divergence(logits: Tensor, targets: Tensor) -> Tensor:
        smooth = 0.9 * F.one_hot(targets, CLASSES) + 0.1 / CLASSES
        given = logits.softmax(-1) if wrong else logits.log_softmax(-1)
        return F.kl_div(given, smooth, reduction="batchmean")

    loop.loss = divergence


@plant("SG914", "classifier")
def logits_for_nll_loss(loop: Loop, wrong: bool) -> None:
    """`nll_loss` of logits; the twin ends in a mixture of two log-softmaxes, made by hand."""

    def likelihood(logits: Tensor, targets: Tensor) -> Tensor:
        mixed = torch.logaddexp(logits.log_softmax(-1), (0.5 * logits).log_softmax(-1))
        return F.nll_loss(0.01 * logits if wrong else mixed - torch.log(torch.tensor(2.0)), targets)

    loop.loss = likelihood


# --- SG915: shapes that are spread over each other ------------------------------------------------


def first_feature(loop: Loop) -> None:
    """Make a classifier a regression of the first feature, which has one output."""
    batch = loop.batch

    def values(step: int) -> Batch:
        inputs, _ = batch(step)
        return inputs, inputs[:, 0]

    loop.batch = values
    loop.model.head = nn.Linear(WIDTH, 1)
    loop.train_with(torch.optim.AdamW(loop.model.parameters(), lr=3e-3))


@plant("SG915", "classifier")
def column_beside_a_row(loop: Loop, wrong: bool) -> None:
    """Differences of (n, 1) and (n,) by hand; the twin compares all pairs, and writes the axes."""
    first_feature(loop)

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        if wrong:
            return (outputs - targets).square().mean()
        ours, theirs = outputs.squeeze(1), targets
        gaps = (ours[:, None] - ours[None]) - (theirs[:, None] - theirs[None])
        return gaps.square().mean() + (ours - theirs).mean().square()

    loop.loss = squared


@plant("SG915", "transformer")
def weights_beside_losses(loop: Loop, wrong: bool) -> None:
    """One loss per sequence, (n, 1), times one weight per sequence, (n,); the twin's is (n, 1)."""

    def weighted(logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        weights = 0.5 + torch.rand(len(targets))
        return (losses.mean(1, keepdim=True) * (weights if wrong else weights[:, None])).mean()

    loop.loss = weighted


@plant("SG915", "denoiser")
def mean_brightness(loop: Loop, wrong: bool) -> None:
    """huber_loss of (n, 1) and (n,); the twin spreads one target over the outputs of a sample."""

    def brightness(outputs: Tensor, targets: Tensor) -> Tensor:
        shown = outputs.mean((2, 3))
        wanted = targets.mean((1, 2, 3))
        if wrong:
            shown, wanted = torch.broadcast_tensors(shown, wanted)
            return F.huber_loss(shown, wanted)
        return F.huber_loss(outputs.flatten(1), wanted[:, None].expand(-1, outputs[0].numel()))

    loop.loss = brightness


# --- SG916: targets that the output cannot reach --------------------------------------------------


@plant("SG916", "classifier")
def rectified_regression(loop: Loop, wrong: bool) -> None:
    """A ReLU at the end and negative targets; the twin's are distances."""
    first_feature(loop)

    def rectified(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(F.relu(outputs.squeeze(1)), targets if wrong else targets.abs())

    loop.loss = rectified


@plant("SG916", "denoiser")
def pixels_up_to_255(loop: Loop, wrong: bool) -> None:
    """A sigmoid and pictures from 0 to 255; the twin's are from 0 to 1."""
    loop.train_with(torch.optim.Adam(loop.model.parameters(), lr=3e-3))
    scale = 255.0 if wrong else 1.0
    loop.loss = lambda outputs, targets: F.smooth_l1_loss(outputs.sigmoid(), scale * targets)


@plant("SG916", "segmenter")
def rectified_logits(loop: Loop, wrong: bool) -> None:
    """Logits behind a ReLU never say no; the twin has a leaky one."""

    def yes_or_no(logits: Tensor, targets: Tensor) -> Tensor:
        wanted = F.one_hot(targets, logits.shape[1]).permute(0, 3, 1, 2).float()
        given = F.relu(logits) if wrong else F.leaky_relu(logits)
        return F.binary_cross_entropy_with_logits(given, wanted)

    loop.loss = yes_or_no


# --- SG917: gradients that float16 rounds to 0 ----------------------------------------------------


def small_half(loop: Loop, wrong: bool, size: float) -> None:
    """A small loss of a model in float16; the twin computes in bfloat16."""
    model, loss = loop.model, loop.loss
    kind = torch.float16 if wrong else torch.bfloat16

    def half(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", kind):
            return model(inputs).float()  # type: ignore[no-any-return]

    loop.forward = half
    loop.loss = lambda outputs, targets: size * loss(outputs, targets)


@plant("SG917", "classifier")
def half_without_a_scaler(loop: Loop, wrong: bool) -> None:
    small_half(loop, wrong, 1e-6)


@plant("SG917", "transformer")
def half_with_a_small_weight(loop: Loop, wrong: bool) -> None:
    small_half(loop, wrong, 1e-5)


@plant("SG917", "segmenter")
def half_with_a_mean_over_pixels(loop: Loop, wrong: bool) -> None:
    small_half(loop, wrong, 3e-5)


# --- SG918: clipping that leaves next to nothing --------------------------------------------------


def scaled(loop: Loop, wrong: bool, limit: float) -> None:
    """Clip with a GradScaler; the twin unscales first."""
    scaler = torch.amp.GradScaler("cpu")
    loss, model, optimizer = loop.loss, loop.model, loop.optimizer
    loop.loss = lambda outputs, targets: scaler.scale(loss(outputs, targets))

    def update() -> None:
        if not wrong:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()

    loop.update = update


@plant("SG918", "classifier")
def clipped_before_unscaling(loop: Loop, wrong: bool) -> None:
    scaled(loop, wrong, 1.0)


@plant("SG918", "denoiser")
def clipped_before_unscaling_with_momentum(loop: Loop, wrong: bool) -> None:
    scaled(loop, wrong, 0.1)


@plant("SG918", "transformer")
def limit_for_another_loss(loop: Loop, wrong: bool) -> None:
    """A sum over all tokens and a limit for their mean; the twin clips the gradient of the mean."""
    model, optimizer, loss = loop.model, loop.optimizer, loop.loss
    tokens = 256 if wrong else 1
    loop.loss = lambda outputs, targets: tokens * loss(outputs, targets)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    loop.update = update


# --- SG919: units or outputs that are all alike ---------------------------------------------------


def constant_weights(loop: Loop, wrong: bool, *layers: nn.Module) -> None:
    """Every layer begins as one number; the twin's last layer begins with zeros."""
    for layer in layers if wrong else [loop.model.head]:
        nn.init.constant_(layer.weight, 0.05 if wrong else 0.0)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


@plant("SG919", "classifier")
def constant_layers(loop: Loop, wrong: bool) -> None:
    body = loop.model.body
    constant_weights(loop, wrong, body[0], body[4], loop.model.head)


@plant("SG919", "denoiser")
def constant_convolutions(loop: Loop, wrong: bool) -> None:
    body = loop.model.body
    loop.train_with(torch.optim.Adam(loop.model.parameters(), lr=1e-3))
    constant_weights(loop, wrong, body[0], body[3], loop.model.head)


@plant("SG919", "segmenter")
def constant_first_convolution(loop: Loop, wrong: bool) -> None:
    body = loop.model.body
    constant_weights(loop, wrong, body[0], body[3])


# --- SG920: weight decay that erases what is learned ----------------------------------------------


@plant("SG920", "classifier")
def decay_of_another_optimizer(loop: Loop, wrong: bool) -> None:
    """AdamW with the decay 100; the twin's Adam divides the same decay by the gradient."""
    kind = torch.optim.AdamW if wrong else torch.optim.Adam
    decay = 100.0 if wrong else 1e-2
    loop.train_with(kind(loop.model.parameters(), lr=3e-3, weight_decay=decay))


@plant("SG920", "denoiser")
def decay_and_rate_swapped(loop: Loop, wrong: bool) -> None:
    rate, decay = (0.05, 3.0) if wrong else (0.05, 0.005)
    parameters = loop.model.parameters()
    loop.train_with(torch.optim.SGD(parameters, lr=rate, weight_decay=decay))


@plant("SG920", "transformer")
def decay_of_one_group(loop: Loop, wrong: bool) -> None:
    """A group for the embeddings with a decay of 50; the twin's is 0.1."""
    model = loop.model
    embeddings = [*model.tokens.parameters(), *model.places.parameters()]
    rest = [*model.body.parameters(), *model.head.parameters()]
    groups = [{"params": embeddings, "weight_decay": 50.0 if wrong else 0.1}, {"params": rest}]
    loop.train_with(torch.optim.AdamW(groups, lr=3e-3))


# --- SG921: a classifier that knows the label frequencies only ------------------------------------


@plant("SG921", "classifier")
def labels_shuffled_apart(loop: Loop, wrong: bool) -> None:
    """Labels in another order than inputs; the twin shuffles both."""
    batch = loop.batch
    loop.train_with(torch.optim.AdamW(loop.model.parameters(), lr=3e-4))

    def shuffled(step: int) -> Batch:
        inputs, targets = batch(step)
        order = torch.randperm(len(targets))
        return (inputs if wrong else inputs[order]), targets[order]

    loop.batch = shuffled


@plant("SG921", "transformer")
def sequences_joined_wrongly(loop: Loop, wrong: bool) -> None:
    """Targets of other sequences, place by place; the twin has random tokens, one in four."""
    batch = loop.batch
    loop.train_with(torch.optim.AdamW(loop.model.parameters(), lr=3e-3))

    def joined(step: int) -> Batch:
        tokens, targets = batch(step)
        if wrong:
            return torch.randint(TOKENS, tokens.shape), targets
        noise = torch.rand(targets.shape) < 0.25
        return tokens, torch.where(noise, torch.randint(TOKENS, targets.shape), targets)

    loop.batch = joined
    loop.loss = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@plant("SG921", "segmenter")
def nearly_all_background(loop: Loop, wrong: bool) -> None:
    """19 of 20 pixels of the lost masks are background; the twin's rare pixels can be seen."""
    batch = loop.batch

    def masked(step: int) -> Batch:
        pictures, targets = batch(step)
        rare = torch.rand(targets.shape) < 0.05 if wrong else pictures[:, 0] > 1.0
        return pictures, torch.where(rare, targets.clamp_min(1), 0)

    loop.batch = masked

    def flat(logits: Tensor, targets: Tensor) -> Tensor:
        rows = logits.permute(0, 2, 3, 1).flatten(0, 2)
        return F.cross_entropy(rows, targets.flatten())

    loop.loss = flat
