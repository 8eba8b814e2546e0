"""Two odd things at once, one of them harmful; randomness, counters, hooks in a replay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, Attention, Lambda, chain, randn, regression, sgd, tokens

LABELS = torch.tensor([0, 1, 0, 1])


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


class CausalUnit(nn.Module):
    """A causal mask of -inf as a buffer, which is fine, and a division by a norm, which is not."""

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.register_buffer("causal", torch.full((3, 3), -INF).triu(1))
        self.attn = Attention(4)
        self.unit = Lambda(lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(least))
        self.inp, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attn(self.unit(self.inp(x)), self.causal).mean(1))


@incident(
    "mihaidusmanu/d2-net#78",
    expected=Expected(step=1, phase="forward", module="unit", op="aten.div", event="nan", sample=2),
    accepted=("SG201",),
)
def causal_buffer_beside_a_zero_norm(fixed: bool) -> Scene:
    """The infinite buffer is innocent: a blank token has norm 0."""
    torch.manual_seed(0)
    model = CausalUnit(least=1e-6 if fixed else 0.0)

    def batch(step: int) -> Batch:
        x = randn(4, 3, 3, seed=step)
        if step == 1:
            x[2, 1] = 0
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), steps=3)


@incident(
    "unit8co/darts#1739",
    expected=Expected(step=2, phase="loss", op="aten.log", event="nan", sample=3),
    accepted=("SG202", "SG104"),
)
def masked_nan_targets_beside_a_bad_weight(fixed: bool) -> Scene:
    """Missing targets are NaN and left out rightly; a negative exposure breaks the logarithm."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        y = randn(4, 2, seed=step + 1)
        y[1, 0] = NAN
        exposure = torch.ones(4, 2)
        if step == 2:
            exposure[3] = -1.0
        return {"x": randn(4, 3, seed=step), "y": y, "exposure": exposure}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        exposure = b["exposure"].clamp_min(1e-3) if fixed else b["exposure"]
        known = ~b["y"].isnan()
        return F.mse_loss((model(b["x"]) + torch.log(exposure))[known], b["y"][known])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@incident(
    "huggingface/transformers#17306",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan"),
    accepted=("SG102",),
)
def masked_attention_beside_an_empty_loss_mask(fixed: bool) -> Scene:
    """-inf scores in every layer are meant; the loss mask of this batch sums to 0."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.attn, self.head = nn.Embedding(8, 4), Attention(4), nn.Linear(4, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.attn(self.emb(ids), torch.full((4, 4), -INF).triu(1)))

    model = Net()

    def batch(step: int) -> Batch:
        ids = tokens(2, 4, seed=step)
        return {"ids": ids, "y": ids.roll(-1, 1), "loss_mask": torch.full((2, 4), float(step != 1))}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        each = F.cross_entropy(model(b["ids"]).transpose(1, 2), b["y"], reduction="none")
        count = b["loss_mask"].sum()
        return (each * b["loss_mask"]).sum() / (count.clamp_min(1) if fixed else count)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "cvignac/SMP#3",
    expected=Expected(step=0, phase="forward", module="pool", op="aten.div", event="nan"),
    accepted=("SG201", "SG102"),
)
def everything_dropped_out(fixed: bool) -> Scene:
    """Token dropout of 0.9 removes every token of some sample, depending on the random numbers of
    this very step.
    """
    torch.manual_seed(3)

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            keep = F.dropout(torch.ones(x.shape[:2]), 0.9)
            total = keep.sum(1, keepdim=True)
            return (x * keep[..., None]).sum(1) / (total.clamp_min(1) if fixed else total)

    model = chain(pool=Pool(), head=nn.Linear(3, 2))

    def batch(step: int) -> Batch:
        return {"x": randn(4, 3, 3, seed=step), "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), steps=1)


class Annealed(nn.Module):
    """A plain Python counter decides when the temperature reaches 0."""

    def __init__(self, *, last: float) -> None:
        super().__init__()
        self.lin, self.calls, self.last = nn.Linear(3, 2), 0, last

    def forward(self, x: Tensor) -> Tensor:
        temperature = [1.0, 0.5, self.last, 0.5, 0.5, 0.5, 0.5, 0.5][min(self.calls, 7)]
        self.calls += 1
        return self.lin(x) / temperature


@incident(
    "huggingface/transformers#9295",
    expected=Expected(step=2, phase="forward", module="", op="aten.div", event="inf"),
    accepted=("SG201",),
)
def temperature_annealed_by_a_counter(fixed: bool) -> Scene:
    """The third forward divides by 0; running it again must find the counter where it was."""
    torch.manual_seed(0)
    model = Annealed(last=0.25 if fixed else 0.0)

    def batch(step: int) -> Batch:
        return {"x": randn(4, 3, seed=step), "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), steps=4)


@incident(
    "alibaba/TorchEasyRec#88",
    expected=Expected(
        step=1,
        phase="backward",
        op="aten.div",
        node="torch::autograd::AccumulateGrad",
        event="nan",
        loss_finite=True,
    ),
    accepted=("SG201", "SG401"),
)
def gradient_hook_normalises_a_zero_gradient(fixed: bool) -> Scene:
    """A hook divides the gradient of the shared layer by its norm, which is 0 when the loss is
    satisfied.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model.weight.register_hook(lambda g: g / (g.norm() + (1e-12 if fixed else 0.0)))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1:
            data["x"] = torch.zeros(4, 3)
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model))


@incident(
    "choosehappy/QuickAnnotator#129",
    expected=Expected(
        step=1,
        phase="input",
        module="fc1",
        op="aten.addmm",
        event="batch:x",
        sample=0,
        loss_finite=True,
    ),
    accepted=("SG101",),
)
def nan_loss_is_patched_to_zero(fixed: bool) -> Scene:
    """nan_to_num on the loss hides a NaN feature from everybody but the gradients."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(3, 4), act=nn.ReLU(), fc2=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1 and not fixed:
            data["x"][0, 1] = NAN
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return torch.nan_to_num(mse(model, b))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "unit8co/darts#2100",
    expected=Expected(step=1, phase="input", module="conv", event="batch:x"),
    accepted=("SG101",),
)
def decibel_map_with_unreached_cells(fixed: bool) -> Scene:
    """A radio map in dB: unreached cells have gain 0, so most of the map is -inf and no mask."""
    torch.manual_seed(0)
    model = chain(
        conv=nn.Conv2d(1, 4, 3),
        act=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(4, 2),
    )

    def batch(step: int) -> Batch:
        gain = randn(4, 1, 6, 6, seed=step).abs() + 0.1
        if step == 1:
            gain = gain * (randn(4, 1, 6, 6, seed=9) > 1.0)
        decibel = 10 * torch.log10(gain)
        return {"x": decibel.clamp_min(-100) if fixed else decibel, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model, 1e-4))


@incident(
    "InsaneLife/dssm#17",
    expected=Expected(step=1, phase="forward", module="", op="aten.div", event="nan", sample=1),
    accepted=("SG201",),
)
def contrastive_pair_with_a_blank_image(fixed: bool) -> Scene:
    """CLIP compares every image with every text, so one blank image makes the matrix NaN."""
    torch.manual_seed(0)

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(3, 4, bias=False), nn.Embedding(8, 4)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            a, b = self.image(image), self.text(text)
            length = a.norm(dim=-1, keepdim=True)
            a = a / (length.clamp_min(1e-6) if fixed else length)
            return self.scale.exp() * a @ F.normalize(b, dim=-1).T

    model = Clip()

    def batch(step: int) -> Batch:
        image = randn(4, 3, seed=step)
        if step == 1:
            image[1] = 0
        return {"image": image, "text": tokens(4, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        logits, target = model(b["image"], b["text"]), torch.arange(len(b["text"]))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#75181",
    expected=Expected(
        step=1,
        phase="forward",
        module="",
        op="aten.nll_loss_forward",
        event="nan",
        grads_finite=True,
    ),
    accepted=("SG102",),
)
def loss_inside_the_model(fixed: bool) -> Scene:
    """The model returns its own loss, as transformers models do; all labels of the batch are
    ignored.
    """
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.emb(ids)).flatten(0, 1)
            if fixed and not labels.ne(-100).any():
                return logits.sum() * 0
            return F.cross_entropy(logits, labels.flatten())

    model = Model()

    def batch(step: int) -> Batch:
        ids = tokens(2, 4, seed=step)
        return {"ids": ids, "labels": torch.full_like(ids, -100) if step == 1 else ids.roll(-1, 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return model(b["ids"], b["labels"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/audio#993",
    expected=Expected(
        step=1,
        phase="backward",
        module="norm",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        sample=2,
        micro=1,
        loss_finite=True,
    ),
    accepted=("SG401",),
)
def singular_root_in_the_second_micro_batch(fixed: bool) -> Scene:
    """Accumulation over three micro-batches; only the backward of the second one is bad."""
    torch.manual_seed(0)
    length = Lambda(lambda x: torch.sqrt(x.pow(2).sum(-1, keepdim=True) + (1e-8 if fixed else 0.0)))
    model = chain(inp=nn.Linear(3, 4, bias=False), norm=length, out=nn.Linear(1, 1))

    def batch(step: int) -> list[Batch]:
        micros = [regression(10 * step + k, count=4 + k) for k in range(3)]
        if step == 1:
            micros[1]["x"][2] = 0
        return micros

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model))


@incident(
    "maxrmorrison/torchcrepe#5",
    expected=Expected(
        step=1, phase="forward", module="level", op="aten.div_", event="nan", sample=3
    ),
    accepted=("SG201",),
)
def in_place_levelling(fixed: bool) -> Scene:
    """Everything is done in place: x.sub_(mean).div_(std), and one clip is constant."""
    torch.manual_seed(0)

    def level(x: Tensor) -> Tensor:
        spread = x.std(-1, keepdim=True)
        return (
            x.clone()
            .sub_(x.mean(-1, keepdim=True))
            .div_(spread.clamp_min_(1e-5) if fixed else spread)
        )

    model = chain(level=Lambda(level), act=nn.ReLU(inplace=True), head=nn.Linear(5, 2))

    def batch(step: int) -> Batch:
        x = randn(4, 5, seed=step)
        if step == 1:
            x[3] = 0.25
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model))
