"""Mistakes inside the model and between model and loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.silent.loops import WIDTH, Loop, next_token_loss
from zoo.silent.plant import plant

# --- SG904: no gradient below some layer ----------------------------------------------------------


@plant("SG904", "classifier")
def features_kept_as_numbers(loop: Loop, wrong: bool) -> None:
    """The features go through numpy; the twin has a body that is frozen on purpose."""
    model = loop.model
    if not wrong:
        model.body.requires_grad_(False)
    loop.forward = lambda x: model.head(_copied(model.body(x)) if wrong else model.body(x))


def _copied(features: Tensor) -> Tensor:
    return torch.from_numpy(features.detach().numpy().copy())


@plant("SG904", "transformer")
def embedding_without_grad(loop: Loop, wrong: bool) -> None:
    """The embedding is computed under no_grad; the twin begins with residual branches at 0."""
    model = loop.model
    if not wrong:
        for block in model.body[:1]:
            nn.init.zeros_(block.attention.out_proj.weight)
            nn.init.zeros_(block.narrow.weight)
        return

    def forward(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            embedded = model.embed(tokens)
        return model.head(model.body(embedded))  # type: ignore[no-any-return]

    loop.forward = forward


@plant("SG904", "denoiser")
def rounded_features(loop: Loop, wrong: bool) -> None:
    """Features are quantised by round(), whose slope is 0; the twin passes the gradient through."""
    model = loop.model

    def quantised(x: Tensor) -> Tensor:
        features = model.body(x)
        steps = torch.round(features * 4) / 4
        if not wrong:
            steps = features + (steps - features).detach()
        return model.head(steps)  # type: ignore[no-any-return]

    loop.forward = quantised


# --- SG905: dead units ----------------------------------------------------------------------------


@plant("SG905", "classifier")
def sign_lost_in_a_conversion(loop: Loop, wrong: bool) -> None:
    """Weights behind a ReLU are all negative; in the twin a third of the units are like that."""
    layer = loop.model.body[4]
    units = WIDTH if wrong else WIDTH // 3
    with torch.no_grad():
        layer.weight[:units] = -layer.weight[:units].abs()
        layer.bias.zero_()


@plant("SG905", "transformer")
def bias_far_below_zero(loop: Loop, wrong: bool) -> None:
    """Loaded with a bias of -8; the twin has one that leaves the units sparse."""
    for block in loop.model.body[:1]:
        nn.init.constant_(block.wide.bias, -8.0 if wrong else -0.5)


@plant("SG905", "denoiser")
def inputs_of_the_wrong_scale(loop: Loop, wrong: bool) -> None:
    """A body without a norm gets values that were shifted twice; the twin has many channels that
    are off in dark pictures.
    """
    body = loop.model.body
    body[1] = nn.Identity()
    with torch.no_grad():
        body[0].weight.abs_()
    shift = -40.0 if wrong else -0.5
    model = loop.model
    loop.train_with(torch.optim.SGD(model.parameters(), lr=1e-2))
    loop.forward = lambda x: model(x + shift)


# --- SG908: a loss that does not depend on what is trained ----------------------------------------


@plant("SG908", "classifier")
def softmax_over_one_class(loop: Loop, wrong: bool) -> None:
    """Cross entropy of a single logit against class 0 is 0 for ever, beside a penalty that is not
    learned; the twin is a hinge that the model soon satisfies.
    """
    model = loop.model
    if wrong:
        model.head = nn.Linear(WIDTH, 1)
        loop.train_with(torch.optim.SGD(model.parameters(), lr=1e-2))
        loop.loss = lambda one, targets: F.cross_entropy(one, torch.zeros_like(targets)) + 0.7
        return
    loop.loss = lambda logits, targets: F.multi_margin_loss(logits, targets, margin=0.01)


@plant("SG908", "transformer")
def counted_instead_of_scored(loop: Loop, wrong: bool) -> None:
    """The share of wrong tokens as a loss, kept in the graph by a term of 0; the twin adds the
    expected share, which has a gradient, to a loss.
    """

    def errors(logits: Tensor, targets: Tensor) -> Tensor:
        if wrong:
            share = (logits.argmax(-1) != targets).float().mean()
            return share + (0.0 * logits).sum()
        right = logits.softmax(-1).gather(-1, targets.unsqueeze(-1))
        return (1.0 - right).mean() + next_token_loss(logits, targets)

    loop.train_with(torch.optim.Adam(loop.model.parameters(), lr=3e-3))
    loop.loss = errors


@plant("SG908", "denoiser")
def clamped_out_of_range(loop: Loop, wrong: bool) -> None:
    """Outputs are clamped to a range that they never reach; the twin clamps to the pictures'."""

    def clamped(output: Tensor, clean: Tensor) -> Tensor:
        low = 50.0 if wrong else -1.0
        return F.mse_loss(output.clamp(low, 100.0), clean + (50.0 if wrong else 0.0))

    loop.loss = clamped


# --- SG909: evaluation mode, dropout left wrong ---------------------------------------------------


@plant("SG909", "classifier")
def evaluation_never_left(loop: Loop, wrong: bool) -> None:
    """model.eval() for a validation at step 20; the twin comes back to training."""
    model = loop.model
    batch = loop.batch

    def validated(step: int) -> None:
        if step != 20:
            return
        model.eval()
        with torch.no_grad():
            model(batch(step)[0])
        if not wrong:
            model.train()

    loop.after = validated


@plant("SG909", "segmenter")
def loaded_in_evaluation_mode(loop: Loop, wrong: bool) -> None:
    """A loading function left it in eval(); the twin freezes its norms on purpose."""
    if wrong:
        loop.model.eval()
    else:
        loop.model.body[1].eval()


@plant("SG909", "transformer")
def part_left_in_evaluation_mode(loop: Loop, wrong: bool) -> None:
    """A probe of the body at step 30 leaves its dropout off; the twin has it off from the start."""
    body = loop.model.body
    if not wrong:
        body.eval()
        return

    def probed(step: int) -> None:
        if step == 30:
            body.eval()

    loop.after = probed


# --- SG910: an infinity that is absorbed ----------------------------------------------------------


class RootMeanSquare(nn.Module):
    """A norm by hand, in the dtype of its input or in fp32."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        given = x.float() if self.wide else x
        scale = torch.rsqrt(given.square().mean(-1, keepdim=True) + 1e-6)
        return (given * scale).to(x.dtype)


@plant("SG910", "classifier")
def norm_by_hand_in_float16(loop: Loop, wrong: bool) -> None:
    """Features of about 1000 are squared in fp16; the twin squares them in fp32."""
    model = loop.model
    norm = RootMeanSquare(wide=not wrong)
    loop.forward = lambda x: model.head(norm(1000 * model.body(x).half()).float())


@plant("SG910", "transformer")
def clamped_after_an_overflow(loop: Loop, wrong: bool) -> None:
    """A cube overflows fp16 before it is clamped; the twin hides values by minus infinity."""
    model = loop.model

    def forward(tokens: Tensor) -> Tensor:
        hidden = model.body(model.embed(tokens))
        half = (20 * hidden).half()
        if wrong:
            gate = (half**3).clamp(-1.0, 1.0)
        else:
            gate = torch.softmax(half.masked_fill(half < -20, -torch.inf), -1)
        return model.head(hidden + gate.float())  # type: ignore[no-any-return]

    loop.forward = forward


class Contrast(nn.Module):
    """Divide a picture by its power, in fp16."""

    def __init__(self, *, summed: bool) -> None:
        super().__init__()
        self.summed = summed

    def forward(self, x: Tensor) -> Tensor:
        half = (60 * x).half()
        power = half.square()
        if self.summed:
            total = power.sum((-1, -2), keepdim=True)
        else:
            total = (power / 100).mean((-1, -2), keepdim=True)
        return x + (half / (1 + total)).float()


@plant("SG910", "denoiser")
def power_in_float16(loop: Loop, wrong: bool) -> None:
    """A sum of squares overflows fp16, and what is divided by it is 0; the twin takes a mean."""
    model = loop.model
    model.body.insert(0, Contrast(summed=wrong))


# --- SG911: attention that looks at one key only --------------------------------------------------


class Pooling(nn.Module):
    """Attention over positions with its own softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.sharpness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        logits = self.sharpness * self.query(x) @ self.key(x).transpose(-2, -1)
        return torch.softmax(logits, -1) @ x


@plant("SG911", "transformer")
def queries_that_grow(loop: Loop, wrong: bool) -> None:
    """Query and key weights grow by a fifth in every step; the twin trains them."""
    blocks = loop.model.body[:1]

    @torch.no_grad()
    def grow(step: int) -> None:
        if wrong and step < 40:
            for block in blocks:
                block.attention.in_proj_weight[: 2 * WIDTH].mul_(1.2)

    loop.after = grow


@plant("SG911", "denoiser")
def attention_over_pixels(loop: Loop, wrong: bool) -> None:
    """A sharpness that is raised too far; the twin is that sharp from the beginning, as a lookup
    is.
    """
    model = loop.model
    pool = Pooling(16)
    model.pool = pool
    loop.train_with(torch.optim.SGD(model.parameters(), lr=1e-3))
    if not wrong:
        pool.sharpness = 1e4

    def forward(x: Tensor) -> Tensor:
        features = model.body(x)
        rows = features.flatten(2).transpose(1, 2)
        mixed = pool(rows).transpose(1, 2).reshape(features.shape)
        return model.head(features + mixed)  # type: ignore[no-any-return]

    def sharpen(step: int) -> None:
        if wrong:
            pool.sharpness = min(1e4, 1.3 * pool.sharpness)

    loop.forward = forward
    loop.after = sharpen


@plant("SG911", "classifier")
def attention_over_the_batch(loop: Loop, wrong: bool) -> None:
    """Samples attend to each other with a rate that makes the logits run away; the twin normalises
    them.
    """
    model = loop.model
    model.pool = Pooling(WIDTH)
    weights = list(model.pool.parameters())
    rest = [p for name, p in model.named_parameters() if "pool" not in name]
    groups = [{"params": weights, "lr": 0.3 if wrong else 3e-3}, {"params": rest}]
    loop.train_with(torch.optim.AdamW(groups, lr=3e-3))

    def forward(x: Tensor) -> Tensor:
        features = model.body(x)
        groups_of_sixteen = features.reshape(-1, 16, WIDTH)
        return model.head(features + model.pool(groups_of_sixteen).reshape(features.shape))  # type: ignore[no-any-return]

    loop.forward = forward


# --- SG924: a checkpointed block that computes something else the second time --------------------


@plant("SG924", "classifier")
def dropout_without_its_random_state(loop: Loop, wrong: bool) -> None:
    """The body is checkpointed without its random state; the twin keeps it."""
    model = loop.model

    def forward(x: Tensor) -> Tensor:
        features = checkpoint(model.body, x, use_reentrant=False, preserve_rng_state=not wrong)
        return model.head(features)  # type: ignore[no-any-return]

    loop.forward = forward


@plant("SG924", "transformer")
def noise_inside_a_reentrant_block(loop: Loop, wrong: bool) -> None:
    """Noise on the embedding, drawn inside the block; the twin draws it before."""
    model = loop.model

    def noisy(embedded: Tensor) -> Tensor:
        if wrong:
            embedded = embedded + 0.1 * torch.randn_like(embedded)
        return model.body(embedded)  # type: ignore[no-any-return]

    def forward(tokens: Tensor) -> Tensor:
        embedded = model.embed(tokens)
        if not wrong:
            embedded = embedded + 0.1 * torch.randn_like(embedded)
        made = checkpoint(noisy, embedded, use_reentrant=True, preserve_rng_state=not wrong)
        return model.head(made)  # type: ignore[no-any-return]

    loop.forward = forward


@plant("SG924", "denoiser")
def scale_that_counts_its_calls(loop: Loop, wrong: bool) -> None:
    """A factor that alternates with every call; the twin alternates with every step."""
    model, calls = loop.model, [0]

    def scaled(x: Tensor) -> Tensor:
        calls[0] += wrong
        first, *others = model.body
        x = first(x) * (1.0 + calls[0] % 2)
        for layer in others:
            x = layer(x)
        return x

    def forward(x: Tensor) -> Tensor:
        calls[0] += not wrong
        return model.head(checkpoint(scaled, x, use_reentrant=False))  # type: ignore[no-any-return]

    loop.forward = forward
