"""The first stage: a small KL autoencoder, factor 4, frozen once it is trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denoising_diffusion_pytorch.cities import Stored, Toy


class AutoencoderKL(nn.Module):
    """Images [n, 1, s, s] to latents [n, z, s/4, s/4] and back."""

    def __init__(self, embed_dim: int = 3, channels: int = 16, kl_weight: float = 1e-6) -> None:
        super().__init__()
        self.kl_weight = kl_weight
        self.encoder = nn.Sequential(
            nn.Conv2d(1, channels, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(2 * channels, 2 * embed_dim, 3, 1, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(embed_dim, 2 * channels, 3, 1, 1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * channels, channels, 3, 1, 1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(channels, 1, 3, 1, 1),
        )

    def encode(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the posterior."""
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0)

    def draw(self, image: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A sample of the posterior."""
        mean, log_variance = self.encode(image)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + noise * (0.5 * log_variance).exp()

    def loss(self, image: Tensor) -> Tensor:
        mean, log_variance = self.encode(image)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = (mean.square() + log_variance.exp() - log_variance - 1.0).sum((1, 2, 3)).mean()
        return F.mse_loss(self.decoder(latent), image) + self.kl_weight * divergence


def train_first_stage(maps: Toy | Stored, steps: int, embed_dim: int) -> AutoencoderKL:
    """Trained and frozen; the same for the same maps. Draws from `maps`."""
    torch.manual_seed(0)
    model = AutoencoderKL(embed_dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(maps.draw().image).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)
