"""The same families as the failing trainings, set up as they should be, and what looks ill in them:
warm-up, curricula, restarts, heavy tails, plateaus.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.parts.failing_trainings import HALF, Block, Recall
from benchmarks.parts.trainings import Kind, Training, examples, rate, symbols, teacher

STEPS = 150


def attention(seed: int) -> Training:
    """Attention in float16 that learns to look at one place."""
    torch.manual_seed(seed)
    model = Recall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast(**HALF):
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())

    return Training(
        model,
        optimizer,
        loss,
        lambda step: symbols(seed, step, 16, 16, 12),
        before_step=lambda step: rate(optimizer, 1e-2 * min(1.0, (step + 1) / 40)),
    )


def half_residual(seed: int) -> Training:
    """A residual network in float16 whose targets are a thousand times its first outputs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), *[Block(16) for _ in range(6)], nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(**HALF):
            out = model(x)
        return F.l1_loss(out.float(), 100.0 * x.square().sum(-1, keepdim=True))

    return Training(model, optimizer, loss, lambda step: examples(seed, step, 32, 8))


def recurrent(seed: int) -> Training:
    """A recurrent network whose sequences become longer: a curriculum."""
    torch.manual_seed(seed)
    rnn = nn.GRU(2, 24, batch_first=True)
    head = nn.Linear(24, 1)
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(head(rnn(x)[0][:, -1]), x.sum((1, 2))[:, None])

    def batch(step: int) -> Tensor:
        return examples(seed, step, 16, 3 * 2 ** (step // 40), 2)

    return Training(model, optimizer, loss, batch)


def critic(seed: int) -> Training:
    """A hinge critic against a generator that learns in turn."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def loss(x: Tensor) -> Tensor:
        real = F.relu(1.0 - net(x + 2.0)).mean()
        return real + F.relu(1.0 + net(generator(x.flip(0)).detach())).mean()

    def other_player(step: int) -> None:
        second.zero_grad()
        (-net(generator(examples(seed, 5000 + step, 32, 4))).mean()).backward()
        second.step()

    return Training(
        net, optimizer, loss, lambda step: examples(seed, step, 32, 4), before_step=other_player
    )


def loss_scale(seed: int) -> Training:
    """A GradScaler that tries a higher scale every ten steps, and finds its own at the start."""
    torch.manual_seed(seed)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10)
    known = teacher(seed, 16, 4)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(**HALF):
            out = model(x)
        return F.mse_loss(out.float(), known(x))

    return Training(model, optimizer, loss, lambda step: examples(seed, step, 64, 16), scaler)


def diffusion(seed: int) -> Training:
    """A denoiser with a warm-up, and noise levels that are drawn at random."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(x: Tensor) -> Tensor:
        sigma = 0.02 + torch.rand(len(x), 1)
        out = model(torch.cat([x + sigma * torch.randn_like(x), sigma], -1))
        return ((out - x).square() / sigma.square()).mean()

    return Training(
        model,
        optimizer,
        loss,
        lambda step: examples(seed, step, 64, 8),
        before_step=lambda step: rate(optimizer, 1e-3 * min(1.0, (step + 1) / 100)),
    )


def restarts(seed: int) -> Training:
    """A deep network with norms, under a rate that starts again three times."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def cosine(step: int) -> None:
        rate(optimizer, 0.005 * (1.0 + math.cos(math.pi * (step % 40) / 40)))

    return Training(
        model,
        optimizer,
        lambda x: F.mse_loss(model(x), x.sum(-1, keepdim=True)),
        lambda step: examples(seed, step, 32, 24),
        before_step=cosine,
    )


def missing_words(seed: int) -> Training:
    """Adam with its epsilon, and words that stop to come."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.9))

    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens), (tokens + 1) % 32)

    def batch(step: int) -> Tensor:
        return symbols(seed, step, 32 if step < 20 else 24, 128)

    return Training(model, optimizer, loss, batch)


def heavy_tails(seed: int) -> Training:
    """Targets whose errors have no variance: single losses are a thousand times the others."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    known = teacher(seed, 8, 1)

    def loss(x: Tensor) -> Tensor:
        noise = torch.distributions.StudentT(1.5).sample((len(x), 1))
        return F.mse_loss(model(x), known(x) + noise)

    return Training(model, optimizer, loss, lambda step: examples(seed, step, 32, 8))


def plateau(seed: int) -> Training:
    """A deep linear network with a small start: the gradient grows by itself, and then falls."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    for layer in model:
        nn.init.normal_(layer.weight, std=0.12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    mixing = torch.randn(8, 8)
    return Training(
        model,
        optimizer,
        lambda x: F.mse_loss(model(x), x @ mixing),
        lambda step: examples(seed, step, 64, 8),
    )


def steep_warm_up(seed: int) -> Training:
    """A rate that doubles every ten steps up to a sound one."""
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
        before_step=lambda step: rate(optimizer, min(0.1, 1e-4 * 2 ** (step / 10))),
    )


def growing_targets(seed: int) -> Training:
    """A curriculum of targets, each ten times the one before."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    known = teacher(seed, 8, 1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = examples(seed, step, 32, 8)
        return x, known(x) * 10.0 ** (step // 40)

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(pair[0]), pair[1])

    return Training(model, optimizer, loss, batch)


KINDS = (
    Kind("attention, float16, warm-up", attention, STEPS),
    Kind("residual network, float16", half_residual, STEPS),
    Kind("recurrent network, curriculum", recurrent, STEPS),
    Kind("critic and generator", critic, STEPS),
    Kind("GradScaler that calibrates", loss_scale, STEPS),
    Kind("diffusion, warm-up", diffusion, STEPS),
    Kind("deep network, restarts", restarts, STEPS),
    Kind("Adam, words that stop to come", missing_words, STEPS),
    Kind("heavy tails", heavy_tails, STEPS),
    Kind("plateau and escape", plateau, STEPS),
    Kind("steep warm-up", steep_warm_up, STEPS),
    Kind("targets that grow", growing_targets, STEPS),
)
