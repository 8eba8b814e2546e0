"""Trainings that fail by themselves: settings that people really choose, and no injected value."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.parts.trainings import Kind, Training, examples, rate, symbols, teacher

HALF = {"device_type": "cpu", "dtype": torch.float16}


class Block(nn.Module):
    """A residual block without a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    """One head, with the product of queries and keys in the precision of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(x.shape[-1])
        return x + logits.softmax(-1) @ self.value(x)


class Recall(nn.Module):
    """Tokens with places, two layers of attention, no norm anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 16)
        self.places = nn.Parameter(torch.randn(12, 16))
        self.layers = nn.Sequential(Attention(16), Attention(16))
        self.head = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.places))


def attention_logits(seed: int) -> Training:
    """Recall of the token before, under a learning rate that is too high, in float16."""
    torch.manual_seed(seed)
    model = Recall()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast(**HALF):
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())

    return Training(model, optimizer, loss, lambda step: symbols(seed, step, 16, 16, 12))


def half_activations(seed: int) -> Training:
    """A residual network without norms that learns large targets, in float16."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), *[Block(16) for _ in range(6)], nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(**HALF):
            out = model(x)
        target = 1e6 * x.square().sum(-1, keepdim=True)
        return F.l1_loss(out.float(), target)

    return Training(model, optimizer, loss, lambda step: examples(seed, step, 32, 8))


def recurrent(seed: int) -> Training:
    """A rectified recurrent network over 40 steps in time, without clipping."""
    torch.manual_seed(seed)
    rnn = nn.RNN(2, 24, nonlinearity="relu", batch_first=True)
    head = nn.Linear(24, 1)
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)

    def loss(x: Tensor) -> Tensor:
        out = head(rnn(x)[0][:, -1])
        return F.mse_loss(out, x.sum((1, 2))[:, None])

    return Training(model, optimizer, loss, lambda step: examples(seed, step, 16, 40, 2))


def critic(seed: int) -> Training:
    """A Wasserstein critic that nothing holds back, in float16."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.9))

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(**HALF):
            real = net(x + 2.0).float().mean()
            fake = net(generator(x)).float().mean()
        return fake - real

    return Training(net, optimizer, loss, lambda step: examples(seed, step, 32, 4))


def loss_scale(seed: int) -> Training:
    """A rate slightly above the stable one: gradients grow, and the GradScaler gives way."""
    torch.manual_seed(seed)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    known = teacher(seed, 16, 4)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(**HALF):
            out = model(x)
        return F.mse_loss(out.float(), known(x))

    return Training(model, optimizer, loss, lambda step: examples(seed, step, 64, 16), scaler)


def diffusion(seed: int) -> Training:
    """A denoiser with losses divided by the variance of the noise, under momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def loss(x: Tensor) -> Tensor:
        sigma = torch.linspace(0.02, 1.0, len(x))[:, None]
        noise = torch.randn_like(x)
        out = model(torch.cat([x + sigma * noise, sigma], -1))
        return ((out - x).square() / sigma.square()).mean()

    return Training(
        model,
        optimizer,
        loss,
        lambda step: examples(seed, step, 64, 8),
        None,
        lambda step: rate(optimizer, 5e-3 * step / 300),
    )


def deep_without_norms(seed: int) -> Training:
    """Twelve rectified layers without norms, under plain gradient descent."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(24, 24), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight)
    model = nn.Sequential(*layers, nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x.sum(-1, keepdim=True))

    return Training(
        model,
        optimizer,
        loss,
        lambda step: examples(seed, step, 32, 24),
        None,
        lambda step: rate(optimizer, 0.2 * step / 300),
    )


def forgetful_adam(seed: int) -> Training:
    """Adam that forgets (beta2 0.5) and adds no epsilon; some tokens stop to come."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.7, 0.5), eps=0.0)

    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens), (tokens + 1) % 32)

    def batch(step: int) -> Tensor:
        # the second part of the data does not have all words
        if step < 20:
            return torch.arange(32).repeat(4)
        return symbols(seed, step, 24, 128)

    return Training(model, optimizer, loss, batch)


def lost_updates(seed: int) -> Training:
    """Weights in bfloat16 while the rate decays: updates become too small to be stored."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    known = teacher(seed, 8, 1)
    weights = [p.detach().clone() for p in model.parameters()]
    lost = [0.0]

    def before(step: int) -> None:
        moved = 0
        count = 0
        for old, new in zip(weights, model.parameters(), strict=True):
            moved += int((old != new).sum())
            count += old.numel()
            old.copy_(new.detach())
        lost[0] = 1.0 - moved / count if step else 0.0
        rate(optimizer, 1e-2 * 0.97**step)

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(model(x.bfloat16()).float(), known(x))

    def broken() -> str:
        return "95 % of the updates are lost" if lost[0] > 0.95 else ""

    return Training(
        model, optimizer, loss, lambda step: examples(seed, step, 32, 8), None, before, broken
    )


def range_test(seed: int) -> Training:
    """A learning rate that is raised by 5 % with every step, and nobody who stops it."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    known = teacher(seed, 8, 1)
    return Training(
        model,
        optimizer,
        lambda x: F.mse_loss(model(x), known(x)),
        lambda step: examples(seed, step, 32, 8),
        None,
        lambda step: rate(optimizer, 1e-4 * 1.05**step),
    )


def vanishing_variance(seed: int) -> Training:
    """A Gaussian likelihood with a learned variance, on data without noise."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    mixing = torch.randn(4, 1)

    def loss(x: Tensor) -> Tensor:
        mean, log_variance = model(x).unbind(-1)
        error = (mean - (x @ mixing)[:, 0]).square()
        return 0.5 * (log_variance + error * torch.exp(-log_variance)).mean()

    return Training(model, optimizer, loss, lambda step: examples(seed, step, 64, 4))


KINDS = (
    Kind("attention logits at a high rate, float16", attention_logits),
    Kind("activations outgrow float16", half_activations),
    Kind("recurrent network", recurrent),
    Kind("critic of a GAN, float16", critic),
    Kind("loss scale collapses", loss_scale),
    Kind("diffusion, weighted by 1/variance", diffusion),
    Kind("deep network without norms", deep_without_norms),
    Kind("Adam, beta2 0.5 and no epsilon", forgetful_adam),
    Kind("updates lost in bfloat16", lost_updates),
    Kind("learning rate raised without end", range_test, steps=400),
    Kind("likelihood with a vanishing variance", vanishing_variance),
)
