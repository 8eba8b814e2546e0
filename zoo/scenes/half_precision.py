"""Half precision: epsilons that vanish, squares and scores that overflow, casts, scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import Attention, Lambda, chain, randn, sgd, tokens

HALF, BRAIN = torch.float16, torch.bfloat16
LABELS = torch.tensor([0, 1, 0, 1])


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]).float(), b["y"])


class RMSNorm(nn.Module):
    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def half_batch(step: int, dtype: torch.dtype, bad: Tensor | None = None, sample: int = 0) -> Batch:
    x = randn(4, 4, seed=step).to(dtype)
    if bad is not None and step == 1:
        x[sample] = bad.to(dtype)
    return {"x": x, "y": LABELS}


@incident(
    "pytorch/pytorch#41527",
    "huggingface/diffusers#13316",
    expected=Expected(
        step=1, phase="forward", module="norm", op="aten.rsqrt", event="inf", sample=2
    ),
    accepted=("SG302",),
)
def rms_norm_epsilon_vanishes_in_half(fixed: bool) -> Scene:
    """eps=1e-8 is 0 in fp16, and a padded token has a mean square of 0: rsqrt(0) is infinite."""
    torch.manual_seed(0)
    model = chain(norm=RMSNorm(eps=1e-4 if fixed else 1e-8), head=nn.Linear(4, 2)).to(HALF)
    return Scene(
        model=model,
        batch=lambda step: half_batch(step, HALF, torch.zeros(4), 2),
        loss=classify,
        optimizer=sgd(model, 1e-3),
    )


@incident(
    "pytorch/pytorch#32137",
    expected=Expected(step=1, phase="forward", module="unit", op="aten.div", event="nan", sample=0),
    accepted=("SG302",),
)
def normalize_epsilon_vanishes_in_half(fixed: bool) -> Scene:
    """F.normalize clamps with 1e-12, which is 0 in fp16: a zero vector becomes 0 / 0."""
    torch.manual_seed(0)
    model = chain(
        inp=nn.Linear(4, 4, bias=False),
        unit=Lambda(lambda x: F.normalize(x, dim=-1, eps=1e-4 if fixed else 1e-12)),
        head=nn.Linear(4, 2),
    ).to(HALF)
    return Scene(
        model=model,
        batch=lambda step: half_batch(step, HALF, torch.zeros(4), 0),
        loss=classify,
        optimizer=sgd(model, 1e-3),
    )


class HalfAttention(nn.Module):
    def __init__(self, *, scale: float) -> None:
        super().__init__()
        self.emb, self.attn, self.head = nn.Embedding(8, 4), Attention(4), nn.Linear(4, 2)
        with torch.no_grad():
            self.attn.q.weight.mul_(scale)
            self.attn.k.weight.mul_(scale)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attn(self.emb(ids), torch.zeros(1)).mean(1))


@incident(
    "huggingface/transformers#9295",
    expected=Expected(
        step=0,
        phase="forward",
        module="attn",
        op="aten.bmm",
        event="inf",
        proof={"then": ("aten._softmax", "attn")},
    ),
    accepted=("SG301",),
)
def attention_scores_overflow_under_autocast(fixed: bool) -> Scene:
    """q.k reaches 1e5 before the division by sqrt(d): +inf in fp16, inf - inf in softmax."""
    torch.manual_seed(0)
    model = HalfAttention(scale=600.0)

    def batch(step: int) -> Batch:
        return {"ids": tokens(2, 4, seed=step), "y": torch.tensor([0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).float(), b["y"])

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd(model, 1e-6),
        steps=1,
        autocast=BRAIN if fixed else HALF,
    )


@incident(
    "facebookresearch/xformers#96",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=3),
    accepted=("SG302",),
)
def log_epsilon_vanishes_in_half(fixed: bool) -> Scene:
    """log(p + 1e-8) in fp16: the epsilon is 0, and a saturated softmax gives the label p = 0."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
    model = model.to(HALF)

    def batch(step: int) -> Batch:
        return half_batch(step, HALF, torch.tensor([30.0, 0.0, 0.0, 0.0]), 3)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        p = torch.softmax(model(b["x"]), -1).gather(1, b["y"][:, None])
        return -torch.log(p + (1e-4 if fixed else 1e-8)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    "kohya-ss/sd-scripts#201",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=1),
    accepted=("SG302",),
)
def one_minus_timestep_vanishes_in_bfloat16(fixed: bool) -> Scene:
    """log(1 - t) of a diffusion time 0.999, which bfloat16 rounds to 1."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(BRAIN)

    def batch(step: int) -> Batch:
        t = torch.tensor([0.1, 0.999 if step == 1 else 0.9, 0.5, 0.3])
        return {"x": randn(4, 4, seed=step).to(BRAIN), "t": t if fixed else t.to(BRAIN)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (torch.log(1 - b["t"])[:, None] * model(b["x"])).float().pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "NVIDIA/apex#240",
    expected=Expected(
        step=1, phase="forward", module="cast", op="aten._to_copy", event="inf", sample=2
    ),
    accepted=("SG301", "SG103"),
)
def feature_cast_to_half_overflows(fixed: bool) -> Scene:
    """Raw 16-bit depth in millimetres: 70000 does not fit fp16."""
    torch.manual_seed(0)
    cast = Lambda(lambda x: (x / 1000.0 if fixed else x).to(HALF))
    model = chain(cast=cast, head=nn.Linear(4, 2).to(HALF))

    def batch(step: int) -> Batch:
        x = torch.full((4, 4), 1200.0)
        if step == 1:
            x[2, 1] = 70000.0
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model, 1e-7))


@incident(
    "huggingface/transformers#25284",
    "pytorch/pytorch#41508",
    expected=Expected(
        step=1, phase="forward", module="attn", op="aten._softmax", event="nan", sample=1
    ),
    accepted=("SG204",),
)
def empty_prompt_under_autocast_and_scaler(fixed: bool) -> Scene:
    """fp16 autocast, GradScaler and an empty prompt: the scaler would skip and shrink, the data is
    at fault.
    """
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.attn, self.head = (
                nn.Embedding(8, 4),
                Attention(4, safe=fixed),
                nn.Linear(4, 2),
            )

        def forward(self, ids: Tensor) -> Tensor:
            mask = torch.zeros(ids.shape).masked_fill(ids.eq(0), -torch.inf)[:, None, :]
            return self.head(self.attn(self.emb(ids), mask).mean(1))

    model = Net()

    def batch(step: int) -> Batch:
        ids = tokens(3, 4, seed=step, low=1)
        if step == 1:
            ids[1] = 0
        return {"ids": ids, "y": torch.tensor([0, 1, 0])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).float(), b["y"])

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd(model),
        steps=3,
        autocast=HALF,
        scaler={"init_scale": 2.0**8},
    )


@incident(
    "deepspeedai/DeepSpeed#8035",
    expected=Expected(
        step=1, phase="backward", op="aten.mul", node="MulBackward0", event="inf", loss_finite=True
    ),
    accepted=("SG301",),
)
def loss_weight_overflows_half_gradient(fixed: bool) -> Scene:
    """A loss weight of 1e5 enters the graph in fp16 at step 1: the gradient exceeds 65504, the loss
    does not.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).to(HALF)
    dial = {"weight": 1.0}

    def before(step: int) -> None:
        dial["weight"] = 3000.0 if step == 1 and not fixed else 1.0

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (model(b["x"] * 1e-3) * dial["weight"] * 1000.0).mean()

    return Scene(
        model=model,
        batch=lambda step: {"x": torch.full((4, 4), 0.01).to(HALF)},
        loss=loss,
        optimizer=sgd(model, 1e-6),
        before_step=before,
    )


@incident(
    "afiaka87/glide-finetune#5",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.addcdiv_",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "emb.weight"},
    ),
    accepted=("SG502",),
)
def rmsprop_without_epsilon(fixed: bool) -> Scene:
    """eps=0 copied from a paper: embedding rows without gradient are 0 / 0 in the first update."""
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(6, 4), flat=nn.Flatten(), head=nn.Linear(4, 2))

    def batch(step: int) -> Batch:
        return {"x": torch.tensor([[1], [2], [3], [1]]), "y": LABELS}

    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-8 if fixed else 0.0)
    return Scene(model=model, batch=batch, loss=classify, optimizer=optimizer)


@incident(
    "NVIDIA/apex#240",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.addcdiv_",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "emb.weight"},
    ),
    accepted=("SG502",),
)
def adagrad_without_epsilon(fixed: bool) -> Scene:
    """Adagrad with eps=0 on an embedding: unused rows divide 0 by sqrt(0)."""
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(6, 4), flat=nn.Flatten(), head=nn.Linear(4, 2))

    def batch(step: int) -> Batch:
        return {"x": torch.tensor([[1], [2], [3], [1]]), "y": LABELS}

    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-10 if fixed else 0.0)
    return Scene(model=model, batch=batch, loss=classify, optimizer=optimizer)
