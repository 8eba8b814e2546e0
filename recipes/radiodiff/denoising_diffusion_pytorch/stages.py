"""What stands around the diffusion: maps, the frozen first stage, latents, and sampled maps back in
pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from denoising_diffusion_pytorch.autoencoder import AutoencoderKL, train_first_stage
from denoising_diffusion_pytorch.cities import Stored, Toy
from denoising_diffusion_pytorch.cond_unet import CondUNet
from denoising_diffusion_pytorch.ddm_const_sde import LatentDiffusion


@dataclass(slots=True)
class Stages:
    """Maps and first stage of one run, and the generator that its noise and times come from."""

    maps: Toy | Stored
    first_stage: AutoencoderKL
    scale: float
    draws: torch.Generator

    def diffusion(self, config: Any, say: Callable[[str], None]) -> LatentDiffusion:
        """A fresh model; the same for the same settings."""
        model = config.model
        torch.manual_seed(0)
        unet = CondUNet(
            model.first_stage.embed_dim, model.unet.dim, fourier_scale=model.unet.fourier_scale
        )
        return LatentDiffusion(
            unet,
            eps=model.eps,
            time_grid=model.timesteps,
            weighting_loss=model.weighting_loss,
            use_l1=model.use_l1,
            weight_limit=model.weight_limit,
            vlb_weight=model.vlb_weight,
            treatment=config.trainer.treatment,
            say=say,
        )

    @torch.no_grad()
    def batch(self, model: LatentDiffusion) -> dict[str, Tensor]:
        maps = self.maps.draw()
        latent = self.scale * self.first_stage.draw(maps.image, self.draws)
        noise = torch.randn(latent.shape, generator=self.draws)
        return {
            "x_start": latent,
            "noise": noise,
            "t": model.times(len(latent), self.draws),
            "condition": maps.condition,
        }

    @torch.no_grad()
    def nmse(self, model: LatentDiffusion, steps: int, number: int = 32) -> float:
        """Squared error of sampled maps over the energy of the true ones."""
        maps = self.maps.held_out(number)
        shape = self.first_stage.encode(maps.image)[0].shape
        was_training = model.training
        latent = model.eval().sample(
            maps.condition, tuple(shape), torch.Generator().manual_seed(77), steps
        )
        model.train(was_training)
        image = self.first_stage.decoder(latent / self.scale)
        return float((image - maps.image).square().sum() / (maps.image + 1.0).square().sum())

    def random_state(self) -> dict[str, Tensor]:
        return {"maps": self.maps.generator.get_state(), "draws": self.draws.get_state()}

    def set_random_state(self, state: dict[str, Tensor]) -> None:
        self.maps.generator.set_state(state["maps"])
        self.draws.set_state(state["draws"])


def build_stages(config: Any, rank: int = 0) -> Stages:
    """Maps of this rank, and the first stage, which is the same on every rank."""
    model, data = config.model, config.data
    if (model.model_type, model.model_name) != ("const_sde", "cond_unet"):
        raise SystemExit(
            f"model {model.model_type}/{model.model_name} is not built here; use "
            f"const_sde/cond_unet."
        )
    first = train_first_stage(
        _maps(config, data.seed), model.first_stage.steps, model.first_stage.embed_dim
    )
    scale = float(model.default_scale)
    if model.scale_by_std:
        with torch.no_grad():
            scale = float(1.0 / first.encode(_maps(config, data.seed).held_out(64).image)[0].std())
    draws = torch.Generator().manual_seed(data.seed + rank)
    return Stages(_maps(config, data.seed + rank), first, scale, draws)


def _maps(config: Any, seed: int) -> Toy | Stored:
    data = config.data
    if data.name == "real":
        return Stored(Path(data.folder), data.batch_size, seed)
    if data.name != "toy":
        raise SystemExit(f"data.name={data.name!r} is not known; use toy or real.")
    return Toy(data.batch_size, seed, config.model.image_size)
