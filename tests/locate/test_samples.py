"""Samples are named only when leaving them out, and keeping them, proves it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate.samples import suspects_from_rows

from .cases import Case, find, mse, noise


def log_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).pow(2).mean() + batch["w"].log().mean()


def test_several_guilty_samples_are_all_named() -> None:
    w = torch.ones(8)
    w[[2, 5]] = 0.0
    origin = find(
        Case(nn.Linear(3, 1), {"x": noise(8, 3), "w": w}, log_loss, "loss", None, "aten.log")
    )
    assert origin.samples == (2, 5)


def test_all_samples_guilty_names_none() -> None:
    origin = find(
        Case(
            nn.Linear(3, 1),
            {"x": noise(4, 3), "w": torch.zeros(4)},
            log_loss,
            "loss",
            None,
            "aten.log",
        )
    )
    assert origin.samples == () and origin.evidence.confounded_samples


@pytest.mark.parametrize("guilty", [0, 5, 12])
def test_bisection_finds_a_sample_whose_row_is_lost_in_a_reduction(guilty: int) -> None:
    x = noise(13, 3)
    x[guilty] = 1e25

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).t().contiguous().pow(2).sum(0).mean().float()

    origin = find(Case(nn.Linear(3, 2), {"x": x}, loss, "loss", None, "aten.pow"))
    assert origin.samples == (guilty,)


def test_batch_norm_does_not_hide_the_guilty_sample() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = noise(6, 3)
    x[4, 0] = math.nan
    origin = find(Case(model, {"x": x, "y": noise(6, 1)}, mse, "input", "0", "aten.addmm"))
    assert origin.samples == (4,)


def test_a_single_sample_cannot_be_confirmed() -> None:
    x = noise(1, 3)
    x[0, 0] = math.nan
    origin = find(Case(nn.Linear(3, 1), {"x": x, "y": noise(1, 1)}, mse, "input", "", "aten.addmm"))
    assert origin.samples == () and origin.inputs[0].index == (0, 0)


def test_batch_statistics_that_any_sample_breaks_name_none() -> None:
    def strict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model(batch["x"])
        return (h.pow(2).sum() / torch.tensor(float(h.shape[0] - 4))).abs()

    origin = find(Case(nn.Linear(3, 1), {"x": noise(4, 3)}, strict, "loss", None, "aten.div"))
    assert origin.samples == ()


def test_code_that_cannot_take_a_smaller_batch_names_none() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert len(batch["x"]) == 4, "fixed batch size"
        return model(batch["x"]).pow(2).mean()

    x = noise(4, 3)
    x[1, 1] = math.inf
    origin = find(Case(nn.Linear(3, 1), {"x": x}, loss, "input", "", "aten.addmm"))
    assert origin.samples == () and origin.tensor == "batch:x"


def test_rows_of_heads_and_tokens_lead_to_samples() -> None:
    assert suspects_from_rows([2, 3], 8, 4) == [1]
    assert suspects_from_rows([0, 1], 3, 4) == []
    assert suspects_from_rows([], 0, 4) == []


def test_sample_of_a_list_of_images_is_the_image_and_not_its_channel() -> None:
    images = [noise(3, 4 + k, 4) for k in range(5)]
    images[4][1, 2, 2] = math.nan

    def loss(model: nn.Module, batch: tuple[list[Tensor], Tensor]) -> Tensor:
        seen, target = batch
        return (model(torch.stack([image.mean((1, 2)) for image in seen])) - target).pow(2).mean()

    origin = find(Case(nn.Linear(3, 1), (images, noise(5, 1)), loss, "forward", None, "aten.mean"))
    assert origin.samples == (4,)
