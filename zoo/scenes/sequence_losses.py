"""Language: missing rewards, tasks without an example, forbidden words, packed rows, scans."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, randn, sgd, tokens
from zoo.scenes.preference_losses import token_log_probs


class NormedLM(nn.Module):
    """Embedding, recurrence, layer norm and head."""

    def __init__(self, vocabulary: int = 12) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocabulary, 8), nn.GRU(8, 8, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.rnn(self.emb(ids))[0]))
        return scores


def group_advantages(reward: Tensor, scored: Tensor, *, least: int) -> Tensor:
    """Rewards standardised within their group, over the answers that have one; 0 in groups below
    `least`.
    """
    advantage = torch.zeros_like(reward)
    for group, (gained, known) in enumerate(zip(reward, scored, strict=True)):
        kept = gained[known]
        if kept.numel() >= least:
            advantage[group, known] = (kept - kept.mean()) / (kept.std() + 1e-4)
    return advantage


@incident(
    "huggingface/trl#5773",
    expected=Expected(step=2, phase="loss", op="aten.std", event="nan", sample=1),
    accepted=("SG205",),
)
def grpo_group_with_one_scored_answer(fixed: bool) -> Scene:
    """Answers that cannot be scored stay out of their group's statistics, and one group keeps a
    single reward.
    """
    torch.manual_seed(0)
    model = NormedLM()

    def batch(step: int) -> Batch:
        scored = torch.ones(3, 4, dtype=torch.bool)
        scored[0, 1] = False
        if step == 2:
            scored[1] = torch.tensor([False, False, True, False])
        ids = tokens(3, 4, 6, seed=step, low=1, high=12)
        return {"ids": ids, "reward": randn(3, 4, seed=step), "scored": scored}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_p = token_log_probs(model, b["ids"].flatten(0, 1))
        ratio = torch.exp(log_p - log_p.detach())
        gain = group_advantages(b["reward"], b["scored"], least=2 if fixed else 1).flatten()[
            :, None
        ]
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3, clip=0.5)


class SmoothedCrossEntropy(nn.Module):
    """A mixture with the mean over the vocabulary; `skips` leaves out a part of weight 0."""

    def __init__(self, share: float, *, skips: bool) -> None:
        super().__init__()
        self.share, self.skips = share, skips

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        log_p = scores.log_softmax(-1)
        own = -log_p.gather(-1, labels[..., None]).mean()
        if self.skips and self.share == 0:
            return own
        return (1 - self.share) * own + self.share * -log_p.mean(-1).mean()


class SlotDecoder(nn.Module):
    """Words that a slot does not allow get a logit of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = NormedLM(10)

    def forward(self, ids: Tensor, allowed: Tensor) -> Tensor:
        scores: Tensor = self.lm(ids)
        return scores.masked_fill(~allowed[:, None, :], -INF)


@incident(
    "facebookresearch/pytext#1698",
    expected=Expected(
        step=2,
        phase="loss",
        module="criterion",
        op="aten.mul",
        event="nan",
        sample=1,
        grads_finite=True,
    ),
    accepted=("SG206",),
)
def label_smoothing_zero_times_inf(fixed: bool) -> Scene:
    """Smoothing is switched off by a weight of 0, which a forbidden word's infinite term turns into
    NaN.
    """
    torch.manual_seed(0)
    model, criterion = SlotDecoder(), SmoothedCrossEntropy(0.0, skips=fixed)

    def batch(step: int) -> Batch:
        ids = tokens(3, 5, seed=step, high=6)
        allowed = torch.ones(3, 10, dtype=torch.bool)
        if step == 2:
            allowed[1, 6:] = False
        return {"ids": ids, "y": ids.roll(-1, 1), "allowed": allowed}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        total: Tensor = criterion(model(b["ids"], b["allowed"]), b["y"])
        return total

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=optimizer, steps=3
    )


class TwoTasks(nn.Module):
    """One encoder for a label per sentence and a tag per word."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.encoder = (
            nn.Embedding(12, 8),
            nn.GRU(8, 8, batch_first=True, bidirectional=True),
        )
        self.label_head, self.tag_head = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.encoder(self.emb(ids))
        return self.label_head(hidden.mean(1)), self.tag_head(hidden)


@incident(
    "JayYip/m3tl#35",
    expected=Expected(
        step=1, phase="loss", op="aten.nll_loss_forward", event="nan", micro=1, grads_finite=True
    ),
    accepted=("SG102",),
)
def multitask_micro_batch_without_task(fixed: bool) -> Scene:
    """One micro-batch has no example of the tagging task; its loss is a mean over nothing."""
    torch.manual_seed(0)
    model = TwoTasks()

    def micro(seed: int, task: Tensor) -> Batch:
        return {
            "ids": tokens(4, 5, seed=seed, high=12),
            "task": task,
            "label": tokens(4, seed=seed + 1, high=3),
            "tag": tokens(4, 5, seed=seed + 2, high=4),
        }

    def batch(step: int) -> list[Batch]:
        mixed, first_only = torch.tensor([0, 1, 0, 1]), torch.zeros(4, dtype=torch.long)
        return [
            micro(10 * step + k, first_only if (step, k) == (1, 1) else mixed) for k in range(2)
        ]

    def loss(model: nn.Module, b: Batch) -> Tensor:
        outputs = model(b["ids"])
        total: Tensor = 0.0 * sum(scores.sum() for scores in outputs)
        for task, (scores, y) in enumerate(zip(outputs, (b["label"], b["tag"]), strict=True)):
            own = b["task"] == task
            if not fixed or own.any():
                total = total + F.cross_entropy(
                    scores[own].reshape(-1, scores.shape[-1]), y[own].reshape(-1)
                )
        return total / 2

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.05))


class Biaffine(nn.Module):
    """A score for every pair of words; `filled` is False where the weight was left as the memory
    happened to be.
    """

    def __init__(self, width: int, labels: int, *, filled: bool) -> None:
        super().__init__()
        self.U = nn.Parameter(torch.zeros(labels, width + 1, width + 1))
        with torch.no_grad():
            if filled:
                nn.init.xavier_normal_(self.U)
            else:
                self.U.copy_(torch.linspace(-1, 1, self.U.numel()).view_as(self.U) * 3e38)

    def forward(self, starts: Tensor, ends: Tensor) -> Tensor:
        one = torch.ones(*starts.shape[:2], 1)
        return torch.einsum(
            "bxi,oij,byj->bxyo", torch.cat([starts, one], -1), self.U, torch.cat([ends, one], -1)
        )


class SpanTagger(nn.Module):
    def __init__(self, *, filled: bool) -> None:
        super().__init__()
        self.emb, self.lstm = (
            nn.Embedding(12, 8),
            nn.LSTM(8, 6, batch_first=True, bidirectional=True),
        )
        self.start, self.end = nn.Linear(12, 5), nn.Linear(12, 5)
        self.biaffine = Biaffine(5, 3, filled=filled)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.emb(ids))
        scores: Tensor = self.biaffine(self.start(hidden).relu() + 1, self.end(hidden).relu() + 1)
        return scores


@incident(
    "suolyer/PyTorch_BERT_Biaffine_NER#3",
    expected=Expected(step=0, phase="forward", module="biaffine", op="aten.bmm", event="inf"),
    accepted=("SG601",),
)
def biaffine_weight_from_torch_tensor(fixed: bool) -> Scene:
    """torch.Tensor(...) took memory nobody fills: finite numbers, but of 1e38, in one factor of an
    einsum.
    """
    torch.manual_seed(0)
    model = SpanTagger(filled=fixed)
    return Scene(
        model=model,
        batch=lambda step: {
            "ids": tokens(3, 5, seed=step, high=12),
            "span": tokens(3, 5, 5, seed=step + 1, high=3),
        },
        loss=lambda model, b: F.cross_entropy(
            model(b["ids"]).reshape(-1, 3), b["span"].reshape(-1)
        ),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    )


class SelectiveScan(nn.Module):
    """A state-space layer whose step size depends on the token; `positive` keeps it above 0."""

    def __init__(self, *, positive: bool) -> None:
        super().__init__()
        self.step_size, self.read_write = nn.Linear(6, 6), nn.Linear(6, 8)
        self.log_decay = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(6, 1))
        self.direct, self.positive = nn.Parameter(torch.ones(6)), positive
        nn.init.constant_(self.step_size.bias, 0.7)
        with torch.no_grad():
            self.step_size.weight.mul_(0.2)
            self.step_size.weight[:, 0] = -2.0

    def forward(self, x: Tensor) -> Tensor:
        delta = F.softplus(self.step_size(x)) if self.positive else self.step_size(x)
        keep = torch.exp(delta[..., None] * -self.log_decay.exp())
        written, read = self.read_write(x).chunk(2, -1)
        memory, outputs = x.new_zeros(len(x), 6, 4), []
        for t in range(x.shape[1]):
            memory = (
                keep[:, t] * memory + (delta[:, t] * x[:, t])[..., None] * written[:, t, None, :]
            )
            outputs.append((memory * read[:, t, None, :]).sum(-1))
        return torch.stack(outputs, 1) + self.direct * x


class ScanBlock(nn.Module):
    def __init__(self, *, positive: bool) -> None:
        super().__init__()
        self.mixer, self.norm = SelectiveScan(positive=positive), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.mixer(x))
        return out


class ScanLM(nn.Module):
    """Token 9 has a feature of 20, which the first layer turns into a step size of -40."""

    def __init__(self, *, positive: bool) -> None:
        super().__init__()
        self.emb, first, second = (
            nn.Embedding(10, 6),
            ScanBlock(positive=positive),
            ScanBlock(positive=positive),
        )
        self.layers, self.head = nn.ModuleList([first, second]), nn.Linear(6, 10)
        with torch.no_grad():
            self.emb.weight[:, 0] *= 0.05
            self.emb.weight[9, 0] = 20.0
            second.mixer.step_size.weight[:, 0] = -0.02

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


@incident(
    "alxndrTL/mamba.py#53",
    "state-spaces/mamba#72",
    expected=Expected(
        step=2, phase="forward", module="layers.0.mixer", op="aten.exp", event="inf", sample=3
    ),
    accepted=("SG203",),
)
def ssm_delta_without_softplus(fixed: bool) -> Scene:
    """A selective scan forgot its softplus: a rare token's step size is negative, and its decay is
    exp of +160.
    """
    torch.manual_seed(0)
    model = ScanLM(positive=fixed)

    def batch(step: int) -> Batch:
        ids = tokens(4, 6, seed=step, high=9)
        if step == 2:
            ids[3, 3] = 9
        return {"ids": ids, "y": ids.roll(-1, 1) % 9}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        steps=3,
        clip=1.0,
    )
