"""Segments, graphs, routers and sequences: an empty group, a state that cannot be reached."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, Lambda, chain, randn, regression, sgd

LABELS = torch.tensor([0, 1, 0, 1])


class EdgeSoftmax(nn.Module):
    """A softmax over the edges that arrive at each node."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.safe = safe

    def forward(self, score: Tensor, target: Tensor) -> Tensor:
        nodes = int(target.max()) + 1
        peak = score.new_full((nodes,), -INF).scatter_reduce(0, target, score, "amax").detach()
        if self.safe:
            peak = peak.clamp_min(-1e9)
        weight = (score - peak[target]).exp()
        total = score.new_zeros(nodes).index_add(0, target, weight)
        return weight / total.clamp_min(1e-9)[target]


class EdgeAttention(nn.Module):
    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.score, self.softmax = nn.Linear(3, 1), EdgeSoftmax(safe=safe)

    def forward(self, x: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1).masked_fill(hidden, -INF)
        return self.softmax(score, target)[:, None] * x


@incident(
    "fenchri/edge-oriented-graph#21",
    expected=Expected(
        step=1,
        phase="forward",
        module="softmax",
        op="aten.sub",
        event="nan",
        sample=3,
        grads_finite=True,
    ),
    accepted=("SG204", "SG206"),
)
def every_edge_of_a_node_is_hidden(fixed: bool) -> Scene:
    """The only edge of node 2 is masked: its maximum is -inf and -inf - -inf is NaN."""
    torch.manual_seed(0)
    model = EdgeAttention(safe=fixed)

    def batch(step: int) -> Batch:
        hidden = torch.tensor([False, False, False, step == 1])
        return {"x": randn(4, 3, seed=step), "target": torch.tensor([0, 0, 1, 2]), "hidden": hidden}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return model(b["x"], b["target"], b["hidden"]).pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class Segments(nn.Module):
    """The mean of every document's sentences."""

    def __init__(self, *, initial: float | None) -> None:
        super().__init__()
        self.inp, self.initial = nn.Linear(3, 4), initial

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths.clamp_min(1) if self.initial is not None else lengths
        rows = self.inp(x)[: int(lengths.sum())]
        return torch.segment_reduce(rows, "mean", lengths=lengths, axis=0)


@incident(
    "pyg-team/pytorch_geometric#4826",
    expected=Expected(
        step=1, phase="forward", module="", op="aten.segment_reduce", event="nan", grads_finite=True
    ),
    accepted=("SG102", "SG201"),
)
def mean_of_a_segment_without_rows(fixed: bool) -> Scene:
    """segment_reduce gives NaN for a document without sentences."""
    torch.manual_seed(0)
    model = Segments(initial=0.0 if fixed else None)

    def batch(step: int) -> Batch:
        lengths = torch.tensor([2, 3, 0, 1] if step == 1 else [2, 2, 1, 1])
        return {"x": randn(7, 3, seed=step)[None], "lengths": lengths[None]}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return model(b["x"][0], b["lengths"][0]).pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class Spread(nn.Module):
    """The standard deviation of a node's neighbours, as PNA aggregates."""

    def __init__(self, *, soft: float) -> None:
        super().__init__()
        self.soft = soft

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        count = torch.bincount(target).clamp_min(1)[:, None]
        mean = x.new_zeros(len(count), x.shape[1]).index_add(0, target, x) / count
        square = x.new_zeros(len(count), x.shape[1]).index_add(0, target, x * x) / count
        return torch.sqrt((square - mean * mean).clamp_min(0) + self.soft)


class Aggregate(nn.Module):
    def __init__(self, *, soft: float) -> None:
        super().__init__()
        self.inp, self.spread = nn.Linear(3, 4), Spread(soft=soft)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.spread(self.inp(x), target)


@incident(
    "google-research/vmoe#218",
    expected=Expected(
        step=1,
        phase="backward",
        module="spread",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def spread_of_a_single_neighbour(fixed: bool) -> Scene:
    """A node with one neighbour has spread 0, and the root has no slope there."""
    torch.manual_seed(0)
    model = Aggregate(soft=1e-6 if fixed else 0.0)

    def batch(step: int) -> Batch:
        target = torch.tensor([0, 0, 1, 2] if step == 1 else [0, 0, 1, 1])
        return {"x": randn(4, 3, seed=step), "target": target}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return model(b["x"], b["target"]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class Router(nn.Module):
    """The two best experts of a token, their gates made to sum to one after full experts are
    closed.
    """

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.gate, self.floor = nn.Linear(3, 4, bias=False), floor

    def forward(self, x: Tensor, full: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1) * ~full
        best = gates.topk(2, dim=-1).values
        return best / (best.sum(-1, keepdim=True) + self.floor)


@incident(
    expected=Expected(step=1, phase="forward", module="", op="aten.div", event="nan", sample=2),
    accepted=("SG201",),
)
def token_whose_experts_are_all_full(fixed: bool) -> Scene:
    """Every expert of one token is over capacity: its gates sum to 0."""
    torch.manual_seed(0)
    model = Router(floor=1e-6 if fixed else 0.0)

    def batch(step: int) -> Batch:
        full = torch.zeros(4, 4, dtype=torch.bool)
        if step == 1:
            full[2] = True
        return {"x": randn(4, 3, seed=step), "full": full}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return model(b["x"], b["full"]).pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "HobbitLong/SupContrast#141",
    "BorealisAI/ConR#2",
    expected=Expected(
        step=1, phase="loss", module="criterion", op="aten.div", event="nan", sample=3
    ),
    accepted=("SG102", "SG201"),
)
def anchor_without_a_positive(fixed: bool) -> Scene:
    """Supervised contrast divides by the number of positives, and one class has a single member."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(3, 4), SupervisedContrast(least=1.0 if fixed else 0.0)

    def batch(step: int) -> Batch:
        return {
            "x": randn(5, 3, seed=step),
            "y": torch.tensor([0, 0, 1, 2, 1] if step == 1 else [0, 0, 1, 1, 1]),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion(model(b["x"]), b["y"])

    return Scene(model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model))


class SupervisedContrast(nn.Module):
    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(z)
        others = 1 - torch.eye(len(y))
        positive = (y[:, None] == y[None]).float() * others
        logits = z @ z.T
        log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))
        return -((positive * log_prob).sum(1) / positive.sum(1).clamp_min(self.least)).mean()


class HiddenMarkov(nn.Module):
    """The forward algorithm with a normalisation in every step."""

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.emission = nn.Parameter(torch.tensor([[60.0, 0.0, -60.0], [60.0, 0.0, -60.0]]))
        self.register_buffer("move", torch.tensor([[0.7, 0.3], [0.4, 0.6]]))
        self.floor = floor

    def forward(self, seen: Tensor) -> Tensor:
        table = self.emission.softmax(-1)
        belief, total = torch.full((len(seen), 2), 0.5), torch.zeros(len(seen))
        for symbol in seen.unbind(1):
            joint = (belief @ self.move) * table[:, symbol].T
            scale = joint.sum(-1, keepdim=True) + self.floor
            belief, total = joint / scale, total + scale.squeeze(-1)
        return total


@incident(
    expected=Expected(step=1, phase="forward", module="", op="aten.div", event="nan", sample=1),
    accepted=("SG201", "SG102"),
)
def observation_that_cannot_happen(fixed: bool) -> Scene:
    """A symbol whose emission has underflowed: the filtered belief is 0 / 0."""
    model = HiddenMarkov(floor=1e-12 if fixed else 0.0)

    def batch(step: int) -> Batch:
        seen = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0]])
        if step == 1:
            seen[1, 1] = 2
        return {"seen": seen}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return -model(b["seen"]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    expected=Expected(step=0, phase="forward", module="rnn", op="aten.addmm", event="inf"),
    accepted=("SG505", "SG103", "SG203", "SG601"),
)
def recurrence_with_relu_explodes(fixed: bool) -> Scene:
    """nn.RNN with ReLU and recurrent weights far above one, over a long sequence."""
    torch.manual_seed(0)
    model = chain(
        rnn=nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
        last=Lambda(lambda o: o[0][:, -1]),
        head=nn.Linear(4, 1),
    )
    with torch.no_grad():
        model.rnn.weight_hh_l0.fill_(0.1 if fixed else 6.0)
        model.rnn.weight_ih_l0.abs_()

    def batch(step: int) -> Batch:
        return {"x": randn(4, 40, 3, seed=step).abs(), "y": randn(4, 1, seed=step + 1)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=1)


class Denoiser(nn.Module):
    """A diffusion loss weighted by the precision of the posterior, taken from a table of log
    variances.
    """

    def __init__(self, *, clipped: bool) -> None:
        super().__init__()
        variance = torch.tensor([0.0, 0.1, 0.2, 0.4])
        self.register_buffer(
            "log_variance", torch.log(variance.clamp_min(1e-4) if clipped else variance)
        )
        self.net = nn.Linear(3, 1)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.log_variance[t]


@incident(
    "TiankaiHang/Min-SNR-Diffusion-Training#4",
    expected=Expected(
        step=1, phase="state", module="", op="aten.index", event="buffer:log_variance"
    ),
    accepted=("SG602", "SG202"),
)
def posterior_variance_of_the_first_timestep(fixed: bool) -> Scene:
    """The posterior variance at t = 0 is 0 and its log -inf; t = 0 had not been drawn so far."""
    torch.manual_seed(0)
    model = Denoiser(clipped=fixed)

    def batch(step: int) -> Batch:
        return {**regression(step), "t": torch.tensor([1, 3, 0 if step == 1 else 2, 2])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out, log_variance = model(b["x"], b["t"])
        return ((out - b["y"]).pow(2).squeeze(-1) * torch.exp(-log_variance)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    "huggingface/trl#5594",
    expected=Expected(
        step=1, phase="input", op="aten.sub", event="batch:teacher", sample=0, grads_finite=True
    ),
    accepted=("SG101", "SG206"),
)
def distillation_from_a_masked_vocabulary(fixed: bool) -> Scene:
    """The teacher's log-probabilities hold -inf; kl_div with log targets multiplies 0 by it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def batch(step: int) -> Batch:
        logits = randn(4, 4, seed=step + 1)
        if step == 1:
            logits[0, 2] = -INF
        return {"x": randn(4, 3, seed=step), "teacher": logits.log_softmax(-1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        teacher = b["teacher"].clamp_min(-100.0) if fixed else b["teacher"]
        return F.kl_div(
            model(b["x"]).log_softmax(-1), teacher, log_target=True, reduction="batchmean"
        )

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))
