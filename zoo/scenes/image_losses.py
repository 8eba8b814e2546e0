"""Images: opposite structure, pictures without a label, a batch of one, diverging heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import randn, sgd, tokens, uniform


class MultiScaleSSIM(nn.Module):
    """A product of contrast terms, each to the power of its scale's weight; `least` keeps them
    above it.
    """

    def __init__(self, *, least: float | None) -> None:
        super().__init__()
        self.weights, self.least = (0.3, 0.7), least

    def terms(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Luminance and contrast of every image at one scale."""
        mean_x, mean_y = F.avg_pool2d(x, 3, 1), F.avg_pool2d(y, 3, 1)
        spread = F.avg_pool2d(x * x + y * y, 3, 1) - mean_x.square() - mean_y.square()
        shared = F.avg_pool2d(x * y, 3, 1) - mean_x * mean_y
        light = (2 * mean_x * mean_y + 1e-4) / (mean_x.square() + mean_y.square() + 1e-4)
        contrast = ((2 * shared + 9e-4) / (spread + 9e-4)).mean((1, 2, 3))
        return light.mean((1, 2, 3)), contrast if self.least is None else contrast.clamp(
            min=self.least
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = torch.ones(len(x))
        for weight in self.weights:
            light, contrast = self.terms(x, y)
            total = total * contrast**weight
            x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
        return 1 - (total * light).mean()


class Restorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.up(self.down(x).relu())
        return (x + 0.1 * residual).clamp(0, 1)


@incident(
    "VainF/pytorch-msssim#7",
    "VainF/pytorch-msssim#11",
    "jorge-pessoa/pytorch-msssim#2",
    expected=Expected(
        step=2, phase="loss", module="criterion", op="aten.pow", event="nan", sample=0
    ),
    accepted=("SG207",),
)
def msssim_anticorrelated(fixed: bool) -> Scene:
    """One input is the negative of its target: the contrast term is below 0, and its weight is a
    fraction.
    """
    torch.manual_seed(0)
    model, criterion = Restorer(), MultiScaleSSIM(least=1e-4 if fixed else None)

    def batch(step: int) -> Batch:
        clean = uniform(3, 1, 12, 12, seed=step)
        noisy = (clean + 0.05 * randn(3, 1, 12, 12, seed=step + 7)).clamp(0, 1)
        if step == 2:
            noisy[0] = 1 - clean[0]
        return {"noisy": noisy, "clean": clean}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        restored = model(b["noisy"])
        structure: Tensor = criterion(restored, b["clean"])
        return 0.84 * structure + 0.16 * F.l1_loss(restored, b["clean"])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=optimizer, steps=3
    )


class SmallUNet(nn.Module):
    """Down, up, and a shortcut past both."""

    def __init__(self, classes: int = 1) -> None:
        super().__init__()
        self.fine, self.coarse = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
        )
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.fine(image).relu()
        coarse = self.norm(self.coarse(fine)).relu()
        scores: Tensor = self.head(torch.cat([fine, self.up(coarse)], 1))
        return scores


def dice(predicted: Tensor, truth: Tensor, *, smooth: float) -> Tensor:
    """One minus twice the overlap over both areas, image by image."""
    both = 2 * (predicted * truth).flatten(1).sum(1)
    areas = (predicted + truth).flatten(1).sum(1)
    return (1 - (both + smooth) / (areas + smooth)).mean()


@incident(
    "open-mmlab/mmsegmentation#1088",
    "neuronets/nobrainer#8",
    expected=Expected(step=2, phase="loss", op="aten.div", event="nan", sample=0, micro=1),
    accepted=("SG102", "SG201"),
)
def dice_fully_ignored_image(fixed: bool) -> Scene:
    """In the second micro-batch one image carries the ignore label everywhere: nothing over
    nothing.
    """
    torch.manual_seed(0)
    model = SmallUNet()

    def batch(step: int) -> list[Batch]:
        masks = [tokens(3, 8, 8, seed=10 * step + k, high=2) for k in range(2)]
        for mask in masks:
            mask[:, :1] = 255
        if step == 2:
            masks[1][0] = 255
        return [
            {"image": randn(3, 1, 8, 8, seed=10 * step + k), "mask": mask}
            for k, mask in enumerate(masks)
        ]

    def loss(model: nn.Module, b: Batch) -> Tensor:
        logit = model(b["image"])[:, 0]
        known, truth = b["mask"].ne(255).float(), b["mask"].eq(1).float()
        pixels = F.binary_cross_entropy_with_logits(logit, truth, weight=known)
        return (pixels + dice(logit.sigmoid() * known, truth * known, smooth=float(fixed))) / 2

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd(model, 0.05, momentum=0.9),
        steps=3,
        clip=1.0,
    )


class MinibatchDeviation(nn.Module):
    """Adds a channel that says how much the images of the batch differ."""

    def __init__(self, *, unbiased: bool) -> None:
        super().__init__()
        self.unbiased = unbiased

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.std(0, unbiased=self.unbiased).mean()
        return torch.cat([x, deviation.expand(x.shape[0], 1, *x.shape[2:])], 1)


class Discriminator(nn.Module):
    def __init__(self, *, unbiased: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.AvgPool2d(2)
        )
        self.deviation = MinibatchDeviation(unbiased=unbiased)
        self.final = nn.Sequential(
            nn.Conv2d(5, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(36, 1)
        )

    def forward(self, image: Tensor) -> Tensor:
        score: Tensor = self.final(self.deviation(self.stem(image)))
        return score


class Adversaries(nn.Module):
    def __init__(self, *, unbiased: bool) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 36), Discriminator(unbiased=unbiased)

    def forward(self, image: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(latent).view(-1, 1, 6, 6).tanh()
        return self.discriminator(image), self.discriminator(made)


@incident(
    "ziwei-jiang/PGGAN-PyTorch#1",
    expected=Expected(
        step=2, phase="forward", module="discriminator.deviation", op="aten.std", event="nan"
    ),
    accepted=("SG205",),
)
def pggan_minibatch_std_of_one(fixed: bool) -> Scene:
    """A discriminator looks at how the images of a batch differ, and the last batch of the epoch is
    one image.
    """
    torch.manual_seed(0)
    model = Adversaries(unbiased=not fixed)

    def batch(step: int) -> Batch:
        count = 1 if step == 2 else 4
        return {"image": randn(count, 1, 6, 6, seed=step), "latent": randn(count, 4, seed=step + 5)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        real, made = model(b["image"], b["latent"])
        return F.softplus(-real).mean() + F.softplus(made).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.99))
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)


class PoseMaps(nn.Module):
    """Two kinds of maps on a frozen trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU()
        )
        self.trunk.requires_grad_(False)
        self.belief, self.affinity = nn.Conv2d(12, 3, 1), nn.Conv2d(12, 4, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(image)
        return self.belief(features), self.affinity(features)


@incident(
    "NVlabs/Deep_Object_Pose#74",
    "rtqichen/torchdiffeq#58",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.add_",
        event="spike",
        loss_finite=True,
        grads_finite=True,
        slack=6,
    ),
    accepted=("SG505",),
)
def belief_maps_diverge(fixed: bool) -> Scene:
    """Errors are summed over pixels and the rate does not allow for that: both heads overshoot more
    with every step.
    """
    torch.manual_seed(0)
    model = PoseMaps()

    def batch(step: int) -> Batch:
        return {
            "image": randn(4, 1, 6, 6, seed=step),
            "belief": uniform(4, 3, 6, 6, seed=step + 5),
            "affinity": randn(4, 4, 6, 6, seed=step + 6),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        belief, affinity = model(b["image"])
        return sum_of_squares(belief, b["belief"]) + sum_of_squares(affinity, b["affinity"])

    return Scene(
        model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3 if fixed else 0.05), steps=14
    )


def sum_of_squares(predicted: Tensor, truth: Tensor) -> Tensor:
    return (predicted - truth).square().sum((1, 2, 3)).mean()
