"""Densities, divergences and matrix functions at the edge of their domain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.log_and_root_domains import eye_linear
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd, tokens

LABELS = torch.tensor([0, 1, 0, 1])


@incident(
    "LiuLei95/PyTorch-Learned-Image-Compression-with-GMM-and-Attention#8",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=2),
    accepted=("SG202", "SG201"),
)
def normal_log_prob_with_collapsed_scale(fixed: bool) -> Scene:
    """torch.distributions.Normal with a scale that underflowed to 0."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = torch.tensor([[0.1, 0.2], [0.3, 0.1], [0.2, -200.0 if step == 1 else 0.0]])
        return {"x": x, "y": randn(3, 1, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        mean, raw = model(b["x"]).chunk(2, -1)
        scale = torch.exp(raw.clamp_min(-10) if fixed else raw)
        return -Normal(mean, scale, validate_args=False).log_prob(b["y"]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-5))


@incident(
    "Unity-Technologies/ml-agents#4664",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan", sample=0),
    accepted=("SG201", "SG102"),
)
def renormalised_policy_without_legal_action(fixed: bool) -> Scene:
    """p * legal / sum(p * legal) when no action is legal."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def batch(step: int) -> Batch:
        legal = torch.ones(4, 3)
        legal[2, 1] = 0
        if step == 1:
            legal[0] = 0
        return {"x": randn(4, 3, seed=step), "legal": legal, "a": torch.tensor([0, 1, 0, 2])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        p = torch.softmax(model(b["x"]), -1) * b["legal"]
        total = p.sum(-1, keepdim=True)
        p = p / (total + 1e-7 if fixed else total)
        return -torch.log(p.gather(1, b["a"][:, None]) + 1e-7).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "YunYang1994/TensorFlow2.0-Examples#8",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=1),
    accepted=("SG202",),
)
def log_of_overlap_of_disjoint_boxes(fixed: bool) -> Scene:
    """-log(IoU) of a prediction that does not touch its target."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = torch.tensor([[0.0, 1.0], [0.2, 1.1], [0.1, 0.9]])
        if step == 1:
            x[1] = torch.tensor([5.0, 6.0])
        return {"x": x, "box": torch.tensor([[0.0, 1.0], [0.1, 1.0], [0.0, 1.2]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        got, want = model(b["x"]), b["box"]
        inter = (
            torch.minimum(got[:, 1], want[:, 1]) - torch.maximum(got[:, 0], want[:, 0])
        ).clamp_min(0)
        union = (got[:, 1] - got[:, 0]) + (want[:, 1] - want[:, 0]) - inter
        overlap = inter / union
        return -torch.log(overlap.clamp_min(1e-6) if fixed else overlap).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "unit8co/darts#1438",
    expected=Expected(step=1, phase="loss", op="aten.log1p", event="nan", sample=0),
    accepted=("SG202",),
)
def squared_log_error_of_negative_forecast(fixed: bool) -> Scene:
    """log1p of a forecast below -1."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = torch.full((3, 2), 0.5)
        if step == 1:
            x[0, 1] = -1.4
        return {"x": x, "y": randn(3, 2, seed=step).abs()}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        return F.mse_loss(torch.log1p(out.clamp_min(0) if fixed else out), torch.log1p(b["y"]))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "RasmussenLab/vamb#12",
    expected=Expected(
        step=1, phase="loss", op="aten.lgamma", event="inf", sample=3, grads_finite=True
    ),
    accepted=("SG202",),
)
def dispersion_of_zero(fixed: bool) -> Scene:
    """Negative binomial likelihood: lgamma(theta) with a dispersion that ReLU made exactly 0."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = torch.full((4, 2), 0.7)
        if step == 1:
            x[3, 0] = -1.0
        return {"x": x, "y": torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [1.0, 1.0]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        theta = F.softplus(model(b["x"])) if fixed else F.relu(model(b["x"]))
        return (torch.lgamma(theta) - torch.lgamma(theta + b["y"])).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "hwalsuklee/tensorflow-mnist-VAE#4",
    expected=Expected(
        step=1, phase="forward", module="probit", op="aten.erfinv", event="inf", sample=0
    ),
    accepted=("SG202", "SG207"),
)
def probit_of_certainty(fixed: bool) -> Scene:
    """The inverse normal CDF of a probability that a sigmoid rounded to 1."""
    torch.manual_seed(0)

    def probit(x: Tensor) -> Tensor:
        p = torch.sigmoid(x)
        return 2**0.5 * torch.erfinv(2 * (p.clamp(1e-4, 1 - 1e-4) if fixed else p) - 1)

    model = chain(inp=eye_linear(), probit=Lambda(probit))

    def batch(step: int) -> Batch:
        x = randn(3, 2, seed=step)
        if step == 1:
            x[0, 0] = 50.0
        return {"x": x, "y": randn(3, 2, seed=step + 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.l1_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    "facebookresearch/pytorch_GAN_zoo#89",
    expected=Expected(step=0, phase="loss", op="aten._linalg_slogdet", event="inf"),
    accepted=("SG202",),
)
def log_determinant_of_collapsed_batch(fixed: bool) -> Scene:
    """A diversity loss takes the log determinant of a Gram matrix whose rows are all alike."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)

    def batch(step: int) -> Batch:
        return {"x": torch.zeros(3, 3)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        gram = out @ out.T + (1e-3 * torch.eye(3) if fixed else 0.0)
        return -torch.linalg.slogdet(gram).logabsdet

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)


@incident(
    "SUTDBrainLab/MGP-VAE#2",
    expected=Expected(
        step=1, phase="loss", op="aten.linalg_solve_triangular", event="inf", sample=1
    ),
    accepted=("SG201", "SG401"),
)
def triangular_solve_with_zero_diagonal(fixed: bool) -> Scene:
    """A Gaussian process prior solves with its Cholesky factor; a predicted scale on the diagonal
    is 0.
    """
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = torch.full((3, 2), 0.8)
        if step == 1:
            x[1, 1] = -0.5
        return {"x": x, "y": randn(3, 2, 1, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        diagonal = F.relu(model(b["x"])) + (1e-3 if fixed else 0.0)
        factor = torch.diag_embed(diagonal) + torch.tensor([[0.0, 0.0], [0.3, 0.0]])
        return torch.linalg.solve_triangular(factor, b["y"], upper=False).pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-5))


@incident(
    "brjathu/iTAML#10",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan"),
    accepted=("SG102",),
)
def prototype_of_a_class_without_samples(fixed: bool) -> Scene:
    """Class prototypes are sums over the members divided by their number; one class is not in the
    batch.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Flatten())

    def batch(step: int) -> Batch:
        return {
            "ids": tokens(4, 1, seed=step),
            "y": torch.tensor([0, 1, 2, 0]) if step != 1 else torch.tensor([0, 1, 1, 0]),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["ids"])
        sums = torch.zeros(3, 4).index_add(0, b["y"], out)
        counts = torch.bincount(b["y"], minlength=3)[:, None]
        prototypes = sums / (counts.clamp_min(1) if fixed else counts)
        return (torch.cdist(out, prototypes)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "alibaba/TorchEasyRec#88",
    expected=Expected(step=1, phase="loss", op="aten.div", event="inf"),
    accepted=("SG201", "SG102"),
)
def positive_weight_of_a_negative_batch(fixed: bool) -> Scene:
    """pos_weight = negatives / positives of the batch, and the batch has no positive."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        y = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
        return {"x": randn(4, 3, seed=step), "y": y * float(step != 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        positives = b["y"].sum()
        weight = (1 - b["y"]).sum() / (positives.clamp_min(1) if fixed else positives)
        return F.binary_cross_entropy_with_logits(model(b["x"]), b["y"], pos_weight=weight)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "mihaidusmanu/d2-net#57",
    expected=Expected(
        step=1, phase="forward", module="weigh", op="aten.pow", event="inf", sample=1
    ),
    accepted=("SG201", "SG203"),
)
def inverse_square_of_a_tiny_distance(fixed: bool) -> Scene:
    """Inverse-distance interpolation d ** -2 with a query 1e-25 away from a support point: 1e50."""
    torch.manual_seed(0)

    def weigh(d: Tensor) -> Tensor:
        inverse = (d.clamp_min(1e-6) if fixed else d).pow(-2)
        return inverse / inverse.sum(-1, keepdim=True)

    model = chain(weigh=Lambda(weigh), out=nn.Linear(3, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        data["x"] = data["x"].abs() + 0.1
        if step == 1:
            data["x"][1, 2] = 1e-25
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "cvignac/SMP#3",
    expected=Expected(step=0, phase="forward", module="compound", op="aten.cumprod", event="inf"),
    accepted=("SG203", "SG103", "SG505"),
)
def cumulative_product_of_growth_rates(fixed: bool) -> Scene:
    """Growth factors of about 2 multiplied over 200 time steps leave the range of float32."""
    torch.manual_seed(0)
    compound = Lambda(lambda x: torch.cumprod(x.clamp(max=1.0) if fixed else x, -1))
    model = chain(inp=nn.Linear(1, 200), compound=compound, out=nn.Linear(200, 1))
    with torch.no_grad():
        model.inp.weight.fill_(0.5)
        model.inp.bias.fill_(2.0)

    def batch(step: int) -> Batch:
        return {"x": torch.ones(2, 1), "y": torch.zeros(2, 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.l1_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4), steps=1)


@incident(
    "Project-MONAI/monai-physio#137",
    expected=Expected(step=0, phase="loss", op="aten.sum", event="inf"),
    accepted=("SG301",),
)
def dice_sum_overflows_in_half(fixed: bool) -> Scene:
    """The Dice denominator sums 70000 pixels in fp16: beyond 65504, and inf / inf is NaN."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 1).half()
    with torch.no_grad():
        model.bias.fill_(8.0)

    def batch(step: int) -> Batch:
        return {"x": torch.zeros(1, 1, 280, 250).half(), "y": torch.ones(1, 1, 280, 250).half()}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        p, y = torch.sigmoid(model(b["x"])), b["y"]
        if fixed:
            p, y = p.float(), y.float()
        return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3), steps=1)


@incident(
    "NVIDIA/apex#240",
    expected=Expected(step=0, phase="loss", op="aten.div", event="inf"),
    accepted=("SG301",),
)
def small_temperature_in_half(fixed: bool) -> Scene:
    """Logits of 30 divided by a temperature of 1e-4 exceed fp16."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(30 * torch.eye(4))
    model = model if fixed else model.half()

    def batch(step: int) -> Batch:
        return {"x": torch.eye(4).to(model.weight.dtype), "y": torch.arange(4)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]) / 1e-4, b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-8), steps=1)
