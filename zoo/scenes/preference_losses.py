"""Preferences, contrast with a learned temperature, several tasks, distillation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, chain, randn, sgd, tokens, uniform


class Bigram(nn.Module):
    """The smallest language model: next-token logits from the present token."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.emb(ids))
        return scores

    def memorise(self, first: int, second: int) -> None:
        """The two tokens follow each other with a logit gap of 40."""
        basis = torch.eye(8)
        with torch.no_grad():
            for token, follower in ((first, second), (second, first)):
                self.emb.weight[token] = basis[token] * 8
                self.head.weight[:, token] = basis[follower] * 5


def token_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probability of every token but the first."""
    chosen: Tensor = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return chosen


class OddsRatio(nn.Module):
    """ORPO: the answer's own likelihood and the log odds against the rejected one."""

    def __init__(self, *, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        if self.margin:
            chosen, rejected = chosen.clamp(max=-self.margin), rejected.clamp(max=-self.margin)
        odds = (chosen - rejected) - (
            torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
        )
        return -chosen.mean() - 0.5 * F.logsigmoid(odds).mean()


@incident(
    "huggingface/trl#3237",
    "axolotl-ai-cloud/axolotl#3910",
    "huggingface/optimum-neuron#719",
    expected=Expected(
        step=1,
        phase="loss",
        module="criterion",
        op="aten.log1p",
        event="inf",
        sample=2,
        loss_finite=True,
    ),
    accepted=("SG202",),
)
def orpo_answer_known_by_heart(fixed: bool) -> Scene:
    """log(1 - exp(log p)) of an answer with probability 1 is -inf; the loss stays finite, the
    gradients do not.
    """
    torch.manual_seed(0)
    model, criterion = Bigram(), OddsRatio(margin=1e-5 if fixed else 0.0)
    model.memorise(5, 6)

    def batch(step: int) -> Batch:
        chosen, rejected = tokens(4, 5, seed=step, high=5), tokens(4, 5, seed=step + 70, high=5)
        if step == 1:
            chosen[2] = torch.tensor([5, 6, 5, 6, 5])
        return {"chosen": chosen, "rejected": rejected}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        sides = [token_log_probs(model, b[side]).mean(-1) for side in ("chosen", "rejected")]
        total: Tensor = criterion(*sides)
        return total

    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model, 1e-3)
    )


class RecurrentLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn, self.head = (
            nn.Embedding(9, 6),
            nn.GRU(6, 6, batch_first=True),
            nn.Linear(6, 9),
        )

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.rnn(self.emb(ids))[0])
        return scores


@incident(
    "allenai/open-instruct#1685",
    "allenai/open-instruct#1625",
    "huggingface/trl#5826",
    expected=Expected(step=2, phase="loss", op="aten.div", event="nan", sample=0),
    accepted=("SG102",),
)
def simpo_prompt_fills_the_window(fixed: bool) -> Scene:
    """A length-normalised preference under vmap: the prompt left no room for one answer, so its
    length is 0.
    """
    torch.manual_seed(0)
    model = RecurrentLM()

    def mean_log_prob(logits: Tensor, labels: Tensor) -> Tensor:
        keep = labels.ne(-100)
        log_p = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[:, None])[:, 0]
        count = keep.sum()
        return (log_p * keep).sum() / (count.clamp_min(1) if fixed else count)

    def batch(step: int) -> Batch:
        made: Batch = {}
        for k, side in enumerate(("chosen", "rejected")):
            ids = tokens(4, 6, seed=2 * step + k, high=9)
            labels = ids.roll(-1, 1)
            labels[:, :3], labels[:, -1] = -100, -100
            made[side], made[f"{side}_labels"] = ids, labels
        if step == 2:
            made["rejected_labels"][0] = -100
        return made

    def loss(model: nn.Module, b: Batch) -> Tensor:
        each = torch.vmap(mean_log_prob)
        chosen = each(model(b["chosen"]), b["chosen_labels"])
        rejected = each(model(b["rejected"]), b["rejected_labels"])
        return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3, clip=1.0)


class BetaHead(nn.Module):
    """Both concentrations of a Beta distribution, above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shape = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.shape(self.body(x))) + 1.1


@incident(
    "pytorch/pytorch#92260",
    "scverse/scvi-tools#4006",
    "pytorch/pytorch#65811",
    expected=Expected(step=2, phase="loss", op="aten.xlogy", event="inf", sample=3),
    accepted=("SG104", "SG202"),
)
def soft_preference_label_exactly_one(fixed: bool) -> Scene:
    """A Beta likelihood of soft labels, and one answer was preferred unanimously."""
    torch.manual_seed(0)
    model = BetaHead()

    def batch(step: int) -> Batch:
        label = uniform(5, seed=step) * 0.8 + 0.1
        if step == 2:
            label[3] = 1.0
        return {"x": randn(5, 5, seed=step), "label": label}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        first, second = model(b["x"]).unbind(-1)
        label = b["label"].clamp(1e-4, 1 - 1e-4) if fixed else b["label"]
        return -torch.mean(Beta(first, second).log_prob(label))  # type: ignore[no-untyped-call]

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-2), steps=3)


class Lion(torch.optim.Optimizer):
    """The sign of a momentum: the step does not shrink with the gradient."""

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(torch.sign(fast * momentum + (1 - fast) * p.grad), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - slow)


class TwoEncoders(nn.Module):
    """Images and texts of one space, compared under a learned scale."""

    def __init__(self, *, most: float | None) -> None:
        super().__init__()
        self.image, self.text, self.decode = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 6)
        self.text.load_state_dict(self.image.state_dict())
        self.logit_scale, self.most = nn.Parameter(torch.tensor(math.log(1 / 0.07))), most

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        image, text = F.normalize(self.image(x), dim=-1), F.normalize(self.text(words), dim=-1)
        scale = self.logit_scale if self.most is None else self.logit_scale.clamp(max=self.most)
        return scale.exp() * image @ text.T, self.decode(image)


@incident(
    "openai/CLIP#530",
    "kornia/kornia#3481",
    expected=Expected(step=5, phase="forward", module="", op="aten.exp", event="inf"),
    accepted=("SG203",),
)
def clip_logit_scale_runs_away(fixed: bool) -> Scene:
    """Nothing bounds the log temperature, and Lion's step never shrinks, until its exponential
    overflows.
    """
    torch.manual_seed(0)
    model = TwoEncoders(most=math.log(100) if fixed else None)
    towers = [p for name, p in model.named_parameters() if name != "logit_scale"]
    optimizer = Lion([{"params": towers, "lr": 1e-4}, {"params": [model.logit_scale], "lr": 20.0}])

    def batch(step: int) -> Batch:
        x = randn(5, 6, seed=step)
        return {"x": x, "words": x.clone()}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores, back = model(b["x"], b["words"])
        pair = torch.arange(len(scores))
        contrast = (F.cross_entropy(scores, pair) + F.cross_entropy(scores.T, pair)) / 2
        return contrast + 0.1 * F.mse_loss(back, b["x"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=6)


class TaskWeights(nn.Module):
    """Uncertainty weighting by sigma itself, or by its logarithm."""

    def __init__(self, *, logarithmic: bool) -> None:
        super().__init__()
        start = torch.tensor([1.0, 0.4])
        self.sigma, self.log_variance = nn.Parameter(start), nn.Parameter(2 * start.log())
        self.logarithmic = logarithmic

    def forward(self, losses: Tensor) -> Tensor:
        if self.logarithmic:
            return (0.5 * torch.exp(-self.log_variance) * losses + 0.5 * self.log_variance).sum()
        return (losses / (2 * self.sigma**2) + torch.log(self.sigma)).sum()


class TwoTasks(nn.Module):
    def __init__(self, *, logarithmic: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.topic, self.length = nn.Linear(8, 3), nn.Linear(8, 1)
        self.weighting = TaskWeights(logarithmic=logarithmic)
        nn.init.zeros_(self.length.weight)
        nn.init.zeros_(self.length.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.topic(hidden), self.length(hidden)[:, 0]


@incident(
    "QunBB/DeepLearning#1",
    "Mikoto10032/AutomaticWeightedLoss#2",
    expected=Expected(
        step=3, phase="forward", module="weighting", op="aten.log", event="nan", grads_finite=True
    ),
    accepted=("SG202",),
)
def task_sigma_trained_below_zero(fixed: bool) -> Scene:
    """An easy task pushes its own sigma through 0, and the logarithm of sigma is NaN."""
    torch.manual_seed(0)
    model = TwoTasks(logarithmic=fixed)

    def batch(step: int) -> Batch:
        return {
            "x": randn(6, 4, seed=step),
            "topic": tokens(6, seed=step, high=3),
            "length": 0.005 * randn(6, seed=step + 1),
        }

    def loss(_: nn.Module, b: Batch) -> Tensor:
        topic, length = model(b["x"])
        tasks = torch.stack([F.cross_entropy(topic, b["topic"]), F.mse_loss(length, b["length"])])
        total: Tensor = model.weighting(tasks)
        return total

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.05), steps=4)


@incident(
    "OpenBMB/ModelCenter#14",
    "google-deepmind/optax#896",
    "NovaSky-AI/SkyRL#2259",
    expected=Expected(step=2, phase="loss", op="aten.mul", event="nan", grads_finite=True),
    accepted=("SG206",),
)
def distillation_over_padded_vocabulary(fixed: bool) -> Scene:
    """Teacher and student both give the padding of the vocabulary -inf, and p * log p is 0 * -inf
    there.
    """
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(12, 6), drop=nn.Dropout(0.1), head=nn.Linear(6, 12))
    padding = torch.arange(12) >= 10

    def batch(step: int) -> Batch:
        ids = tokens(3, 4, seed=step, high=10)
        made = {"ids": ids, "y": ids.roll(-1, 1)}
        return made | ({"teacher": randn(3, 4, 10, seed=step)} if step >= 2 else {})

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores = model(b["ids"]).masked_fill(padding, -INF)
        total = F.cross_entropy(scores.flatten(0, 1), b["y"].flatten())
        if "teacher" not in b:  # distillation begins after a warm-up
            return total
        teacher = F.pad(b["teacher"], (0, 2), value=-INF).softmax(-1)
        log_p = scores.log_softmax(-1)
        cross: Tensor = teacher * (log_p.masked_fill(padding, 0.0) if fixed else log_p)
        return total - cross.sum(-1).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)
