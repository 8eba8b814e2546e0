"""Images: critics, custom backward functions, local statistics, detectors, missing pixels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import NAN, randn, sgd, tokens, uniform


class Adversaries(nn.Module):
    """A generator and a critic whose units are all off for a blank image."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Sigmoid())
        first = nn.Linear(6, 8)
        self.critic = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 1))
        with torch.no_grad():
            first.weight.abs_().add_(0.1)
            first.bias.fill_(-0.1)


class GradientPenalty(nn.Module):
    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, critic: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (torch.sqrt(slope.pow(2).sum(1) + self.floor) - 1).pow(2).mean()


@incident(
    "pytorch/pytorch#2534",
    "keras-team/keras-io#910",
    "tdeboissiere/DeepLearningImplementations#68",
    expected=Expected(
        step=2,
        phase="backward",
        module="criterion",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        sample=2,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def gradient_penalty_on_blank_image(fixed: bool) -> Scene:
    """Every unit of the critic is off for one blank image: its input gradient is 0, where the root
    has no slope.
    """
    torch.manual_seed(0)
    model, criterion = Adversaries(), GradientPenalty(floor=1e-12 if fixed else 0.0)

    def batch(step: int) -> Batch:
        real = uniform(4, 6, seed=step) + 0.5
        if step == 2:
            real[2] = 0
        return {"real": real, "z": randn(4, 3, seed=step)}

    def loss(_: nn.Module, b: Batch) -> Tensor:
        fake = model.generator(b["z"]).detach()
        gap = torch.mean(model.critic(fake)) - torch.mean(model.critic(b["real"]))
        penalty: Tensor = criterion(model.critic, b["real"])
        return gap + 10 * penalty

    optimizer = torch.optim.Adam(model.critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=optimizer, steps=3
    )


class MishFunction(torch.autograd.Function):
    """Mish that saves memory with a closed-form derivative, which is e^x w / d^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stable: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stable = stable
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.stable:
            gate = torch.tanh(F.softplus(x))
            return grad * (gate + x * torch.sigmoid(x) * (1 - gate * gate)), None
        once, twice, thrice = torch.exp(x), torch.exp(2 * x), torch.exp(3 * x)
        w = 4 * (x + 1) + 4 * twice + thrice + once * (4 * x + 6)
        d = 2 * once + twice + 2
        return grad * once * w / (d * d), None


class Mish(nn.Module):
    def __init__(self, *, stable: bool) -> None:
        super().__init__()
        self.stable = stable

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = MishFunction.apply(x, self.stable)  # type: ignore[no-untyped-call]
        return out


class Backbone(nn.Module):
    def __init__(self, *, stable: bool) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3, padding=1), Mish(stable=stable)
        with torch.no_grad():
            self.conv.weight.abs_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.conv(x))
        return out


class BoxRegressor(nn.Module):
    def __init__(self, *, stable: bool) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(stable=stable), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.head(self.backbone(x)), (2, 3))


@incident(
    "AlexeyAB/darknet#5452",
    "hunglc007/tensorflow-yolov4-tflite#138",
    "explosion/thinc#578",
    expected=Expected(
        step=4,
        phase="backward",
        module="backbone.act",
        op="aten.exp",
        node="MishFunctionBackward",
        event="inf",
        sample=0,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG203",),
)
def mish_closed_form_backward(fixed: bool) -> Scene:
    """The forward is stable; the hand-written derivative takes exp(3x) of an image that was not
    divided by 255.
    """
    torch.manual_seed(0)
    model = BoxRegressor(stable=fixed)

    def batch(step: int) -> Batch:
        image = uniform(3, 3, 5, 5, seed=step)
        if step == 4:
            image[0] = 20.0
        return {"image": image, "box": randn(3, 5, seed=step + 2)}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.smooth_l1_loss(model(b["image"]), b["box"]),
        optimizer=sgd(model, 1e-3, momentum=0.9),
        steps=5,
    )


class LocalNorm(nn.Module):
    """Variance of a neighbourhood as E[x^2] - E[x]^2; `safe` keeps it from falling below 0."""

    def __init__(self, channels: int, *, safe: bool) -> None:
        super().__init__()
        self.gamma, self.safe = nn.Parameter(torch.ones(1, channels, 1, 1)), safe

    def forward(self, x: Tensor) -> Tensor:
        def pool(values: Tensor) -> Tensor:
            return F.avg_pool2d(values, 3, 1, 1, count_include_pad=False)

        mean = pool(x)
        variance = pool(x * x) - mean * mean
        if self.safe:
            variance = variance.clamp_min(0)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.gamma


class NormedBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, safe: bool) -> None:
        super().__init__()
        self.norm, self.conv = (
            LocalNorm(inputs, safe=safe),
            nn.Conv2d(inputs, outputs, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.conv(self.norm(x)), 0.1)


class Segmenter(nn.Module):
    """Blocks that are run again in the backward pass."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NormedBlock(1, 4, safe=safe), NormedBlock(4, 4, safe=safe)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


@incident(
    "megvii-research/TLC#3",
    "anthonymlortiz/lcn#4",
    "Project-MONAI/MONAI#1868",
    expected=Expected(
        step=2, phase="forward", module="blocks.0.norm", op="aten.sqrt", event="nan", sample=3
    ),
    accepted=("SG207",),
)
def local_norm_negative_variance(fixed: bool) -> Scene:
    """A saturated 12-bit tile: the variance cancels to a negative number, inside a checkpointed
    block.
    """
    torch.manual_seed(0)
    model = Segmenter(safe=fixed)

    def batch(step: int) -> Batch:
        x = 300 + 80 * randn(4, 1, 6, 6, seed=step)
        if step == 2:
            x[3] = 4095.3
        return {"x": x, "y": tokens(4, 6, 6, seed=step, high=2)}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["x"]), b["y"]),
        optimizer=sgd(model, 1e-3),
        steps=3,
    )


class Detector(nn.Module):
    """A class and a box for each anchor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.classes, self.boxes = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.classes(hidden).flatten(2).transpose(1, 2), self.boxes(hidden).flatten(
            2
        ).transpose(1, 2)


class MultiBox(nn.Module):
    """Sum over all anchors, divided by the number of those that match an object."""

    def __init__(self, *, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, classes: Tensor, boxes: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        positive = target > 0
        count = positive.sum()
        if self.least:
            count = count.clamp_min(self.least)
        place = F.smooth_l1_loss(boxes[positive], wanted[positive], reduction="sum")
        return (
            place + F.cross_entropy(classes.flatten(0, 1), target.flatten(), reduction="sum")
        ) / count


@incident(
    "kuangliu/torchcv#35",
    "HotaekHan/SSTDNet#9",
    "kuangliu/pytorch-retinanet#14",
    expected=Expected(
        step=1, phase="loss", module="criterion", op="aten.div", event="inf", micro=1
    ),
    accepted=("SG201", "SG102"),
)
def ssd_microbatch_without_objects(fixed: bool) -> Scene:
    """No anchor of the second micro-batch matches an object, and the loss is divided by their
    number.
    """
    torch.manual_seed(0)
    model, criterion = Detector(), MultiBox(least=1 if fixed else 0)

    def micro(step: int, k: int) -> Batch:
        target = tokens(2, 9, seed=10 * step + k, high=3)
        target[:, 0] = 1
        if (step, k) == (1, 1):
            target.zero_()
        return {
            "image": randn(2, 3, 6, 6, seed=10 * step + k),
            "target": target,
            "box": randn(2, 9, 4, seed=k),
        }

    return Scene(
        model=model,
        criterion=criterion,
        batch=lambda step: [micro(step, k) for k in range(3)],
        loss=lambda model, b: criterion(*model(b["image"]), b["target"], b["box"]) / 3,
        optimizer=sgd(model, 1e-3, momentum=0.9),
        clip=10.0,
    )


class LandCover(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encode(x))
        return out


@incident(
    "NRCan/geo-deep-learning#68",
    "chengtan9907/OpenSTL#137",
    expected=Expected(
        step=2,
        phase="input",
        module="encode.0",
        op="aten.convolution",
        event="batch:image",
        micro=1,
        sample=2,
    ),
    accepted=("SG101",),
)
def satellite_tile_with_nan_pixels(fixed: bool) -> Scene:
    """Missing pixels are stored as NaN in one tile of the second micro-batch; BatchNorm spreads
    them over all.
    """
    torch.manual_seed(0)
    model = LandCover()

    def micro(step: int, k: int) -> Batch:
        image = uniform(3, 4, 5, 5, seed=10 * step + k)
        if (step, k) == (2, 1) and not fixed:
            image[2, 3, 1, 4] = NAN
            image[2, 3, 2, 0] = NAN
        return {"image": image, "mask": tokens(3, 5, 5, seed=10 * step + k, high=3)}

    return Scene(
        model=model,
        batch=lambda step: [micro(step, k) for k in range(2)],
        loss=lambda model, b: F.cross_entropy(model(b["image"]), b["mask"]) / 2,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=3,
    )
