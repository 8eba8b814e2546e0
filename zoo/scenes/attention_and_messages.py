"""Attention and messages: no maximum, atoms in one place, a negative scale, unseen values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, randn, tokens, uniform

RING = torch.tensor(
    [[0, 1, 2, 3, 4, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
)
"""Five nodes, joined to both neighbours and to themselves: sources and targets."""


def softmax_over_edges(score: Tensor, target: Tensor, nodes: int, *, shifted: bool) -> Tensor:
    """Weights of the edges that meet in a node; `shifted` subtracts the node's largest score."""
    if shifted:
        largest = torch.full((len(score), nodes), -INF)
        largest = largest.scatter_reduce(1, target.expand_as(score), score.detach(), "amax")
        score = score - largest[:, target]
    weight = score.exp()
    total = torch.zeros(len(score), nodes).index_add(1, target, weight)
    return weight / (total[:, target] + 1e-16)


class GraphAttention(nn.Module):
    def __init__(self, features: int, *, shifted: bool) -> None:
        super().__init__()
        self.lin, self.att = nn.Linear(features, 8, bias=False), nn.Parameter(randn(16, seed=5))
        self.shifted = shifted

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lin(x)
        source, target = RING
        score = F.leaky_relu(torch.cat([hidden[:, source], hidden[:, target]], -1) @ self.att, 0.2)
        weight = softmax_over_edges(score, target, x.shape[1], shifted=self.shifted)
        return torch.zeros_like(hidden).index_add(1, target, weight[..., None] * hidden[:, source])


class GraphClassifier(nn.Module):
    def __init__(self, *, shifted: bool) -> None:
        super().__init__()
        self.first, self.second = (
            GraphAttention(4, shifted=shifted),
            GraphAttention(8, shifted=shifted),
        )
        self.readout = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.readout(self.second(F.elu(self.first(x))).mean(1))
        return scores


@incident(
    "pyg-team/pytorch_geometric#53",
    "JuliaGraphs/GraphNeuralNetworks.jl#246",
    expected=Expected(
        step=1, phase="forward", module="first", op="aten.exp", event="inf", sample=0
    ),
    accepted=("SG203",),
)
def gat_softmax_without_max(fixed: bool) -> Scene:
    """Scores of edges go into exp as they are, and one graph comes with features nobody scaled."""
    torch.manual_seed(0)
    model = GraphClassifier(shifted=fixed)

    def batch(step: int) -> Batch:
        x = uniform(3, 5, 4, seed=step)
        if step == 1:
            x[0] *= 300.0
        return {"x": x, "y": torch.tensor([0, 1, 1])}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["x"]), b["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4),
    )


class EquivariantLayer(nn.Module):
    """Messages from distances, moves along directions; `eps` is under the root."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(13, 6), nn.SiLU())
        self.coord, self.node, self.eps = nn.Linear(6, 1, bias=False), nn.Linear(12, 6), eps

    def forward(self, hidden: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        source, target = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 0, 3, 0, 3, 1, 2]])
        apart = x[:, source] - x[:, target]
        square = apart.pow(2).sum(-1, keepdim=True)
        message = self.edge(torch.cat([hidden[:, source], hidden[:, target], square], -1))
        direction = apart / (torch.sqrt(square + self.eps if self.eps else square) + 1e-3)
        x = x + torch.zeros_like(x).index_add(1, target, direction * self.coord(message))
        gathered = torch.zeros_like(hidden).index_add(1, target, message)
        return hidden + self.node(torch.cat([hidden, gathered], -1)), x


class MoleculeNet(nn.Module):
    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleList([EquivariantLayer(eps=eps) for _ in range(3)])
        self.energy = nn.Linear(6, 1)

    def forward(self, atom: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        hidden, x = self.embed(atom), position
        for layer in self.layers:
            hidden, x = layer(hidden, x)
        return self.energy(hidden).sum((1, 2)), x


@incident(
    "dmlc/dgl#7271",
    expected=Expected(
        step=2,
        phase="backward",
        module="layers.2",
        op="aten.div",
        node="SqrtBackward0",
        event="nan",
        sample=1,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def egnn_coincident_atoms(fixed: bool) -> Scene:
    """All atoms of one molecule lie at the origin: the 1e-3 beside the root saves the quotient, not
    its slope.
    """
    torch.manual_seed(0)
    model = MoleculeNet(eps=1e-8 if fixed else 0.0)

    def batch(step: int) -> Batch:
        position = randn(3, 4, 3, seed=step)
        if step == 2:
            position[1] = 0.0
        atom = tokens(3, 4, seed=step, high=5)
        return {
            "atom": atom,
            "position": position,
            "energy": randn(3, seed=step + 2),
            "relaxed": position + 0.1,
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        energy, position = model(b["atom"], b["position"])
        return F.mse_loss(energy, b["energy"]) + F.mse_loss(position, b["relaxed"])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)


class CosineAttention(nn.Module):
    """Queries and keys of unit length, each times the root of a learned scale; `folded` takes its
    absolute value.
    """

    def __init__(self, *, folded: bool) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(8, 24, bias=False), nn.Parameter(torch.full((2,), 0.05))
        self.folded = folded

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        root = torch.sqrt(self.scale.abs() + 1e-6 if self.folded else self.scale)[:, None, None]
        q, k = F.normalize(q, dim=-1) * root, F.normalize(k, dim=-1) * root
        mixed: Tensor = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2)


class CosineBlock(nn.Module):
    def __init__(self, *, folded: bool) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), CosineAttention(folded=folded)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        added: Tensor = self.mlp(x)
        return x + added


class PatchDenoiser(nn.Module):
    def __init__(self, *, folded: bool) -> None:
        super().__init__()
        self.patch, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([CosineBlock(folded=folded), CosineBlock(folded=folded)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(x)
        return out


@incident(
    "crowsonkb/k-diffusion#111",
    expected=Expected(step=2, phase="forward", module="blocks.0.attn", op="aten.sqrt", event="nan"),
    accepted=("SG207",),
)
def cosine_attention_scale_turns_negative(fixed: bool) -> Scene:
    """The scale of cosine attention is learned as it is, at a rate of its own: two updates later it
    is negative.
    """
    torch.manual_seed(0)
    model = PatchDenoiser(folded=fixed)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if not name.endswith("scale")], "lr": 1e-3},
        {"params": [p for name, p in named if name.endswith("scale")], "lr": 0.03},
    ]
    return Scene(
        model=model,
        batch=lambda step: {
            "x": randn(3, 5, 4, seed=step),
            "noise": randn(3, 5, 4, seed=step + 60),
        },
        loss=lambda model, b: F.mse_loss(model(b["x"] + b["noise"]), b["noise"]),
        optimizer=torch.optim.Adam(groups),
        steps=5,
    )


class ObservedNorm(nn.Module):
    """Standardises every variable of a series over what was observed of it; `least` is the smallest
    count.
    """

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = seen.sum(1, keepdim=True).clamp(min=self.least)
        mean = (x * seen).sum(1, keepdim=True) / count
        centred = (x - mean) * seen
        deviation = torch.sqrt(centred.pow(2).sum(1, keepdim=True) / count + 1e-5)
        return centred / deviation, mean, deviation


class Imputer(nn.Module):
    """Fills the gaps of a series and gives them back in its own units."""

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.norm, self.inner = ObservedNorm(least=least), nn.Linear(6, 12)
        self.mix, self.outer = nn.Conv1d(12, 12, 3, padding=1), nn.Linear(12, 3)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        normed, mean, deviation = self.norm(x, seen)
        hidden = self.inner(torch.cat([normed, seen], -1)).relu()
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        filled: Tensor = self.outer(hidden) * deviation + mean
        return filled


@incident(
    "WenjieDu/PyPOTS#265",
    expected=Expected(step=2, phase="forward", module="norm", op="aten.div", event="nan", sample=0),
    accepted=("SG102", "SG201"),
)
def masked_instance_norm_all_missing(fixed: bool) -> Scene:
    """One series has a variable that was never observed, so that its mean is over nothing."""
    torch.manual_seed(0)
    model = Imputer(least=1.0 if fixed else 0.0)

    def batch(step: int) -> Batch:
        seen = (uniform(4, 8, 3, seed=step + 3) > 0.3).float()
        seen[:, 0] = 1
        if step == 2:
            seen[0, :, 2] = 0
        held = (1 - seen) * (uniform(4, 8, 3, seed=step + 6) > 0.5)
        return {"x": randn(4, 8, 3, seed=step) * seen, "seen": seen, "held": held}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        error: Tensor = (model(b["x"], b["seen"]) - b["x"]).abs()
        known: Tensor = (error * b["seen"]).sum() / b["seen"].sum()
        hidden: Tensor = (error * b["held"]).sum() / b["held"].sum().clamp(min=1)
        return known + hidden

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)
