"""The losses that stay finite where the data allows it, and never look finite where it does not.

The report's own options are here too (`loss.eps`, `loss.normalize_latents`, `loss.limit: clamp`),
off where they do harm: a normalised latent loses the scale that a diffusion needs, and a clamp ends
the gradient where the loss is bad.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latentDLM_mmdit.improved_trainer import ImprovedTrainer, Noised, Terms, terms_of, token_losses
from latentDLM_mmdit.pairs import Batch
from stepguard.numerics import latent_mse, masked_cross_entropy, soft_limit


class StableTrainer(ImprovedTrainer):
    """Positions are selected, not multiplied: an Inf under the mask times 0 is NaN."""

    def text_loss(self, logits: Tensor, batch: Batch, noised: Noised) -> Tensor:
        """Cross-entropy of the masked tokens, padding never among them."""
        real, targets = batch["attention_mask"], batch["input_ids"]
        asked = noised.masked & real
        if self.terms.weighting == "mdlm":
            weighted = noised.weight.float()[:, None] * token_losses(logits, targets)
            chosen = torch.where(asked, weighted, torch.zeros_like(weighted))
            loss = chosen.sum() / (self.share(real) + self.terms.eps)
        else:
            number = self.share(asked) + self.terms.eps
            loss = masked_cross_entropy(logits, targets, mask=asked, denominator=number)
        return self._limited(loss, self.terms.text_max)

    def latent_loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        loss = latent_mse(predicted, target, normalize=self.terms.normalize_latents)
        return self._limited(loss, self.terms.latent_max)

    def _limited(self, loss: Tensor, most: float) -> Tensor:
        if self.terms.limit == "clamp":
            return loss.clamp(min=0.0, max=most)
        return soft_limit(loss, most) if self.terms.limit == "soft" else loss


def stable_terms_of(config: Any, dtype: torch.dtype) -> Terms:
    """Those of the stable configuration."""
    loss = config.loss
    return replace(
        terms_of(config, dtype),
        eps=loss.eps,
        normalize_latents=loss.normalize_latents,
        limit=loss.limit,
        text_max=loss.text_loss_max,
        latent_max=loss.latent_loss_max,
    )


def warnings_of(terms: Terms) -> list[str]:
    """What the report's options do, said before the first step."""
    found = []
    if terms.limit == "clamp":
        found.append(
            f"loss.limit=clamp: above {terms.text_max:g} (text) and {terms.latent_max:g} (latent) "
            f"nothing is learned, "
            "and NaN passes; soft keeps the gradient"
        )
    if terms.normalize_latents:
        found.append(
            "loss.normalize_latents=True: the scale of the prediction is free, which a diffusion "
            "needs"
        )
    return found
