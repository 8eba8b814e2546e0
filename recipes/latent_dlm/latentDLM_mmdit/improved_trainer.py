"""The losses as the original has them: masks are multiplied, schedules run in the model's dtype,
nothing is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latentDLM_mmdit.noise import LatentNoise, masking
from latentDLM_mmdit.pairs import Batch

LATENT_PARTS, TEXT_PARTS = ("latent_proj", "latent_head"), ("text_embed", "text_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the losses are made of."""

    weighting: str = "mdlm"
    reduction: str = "token"
    """The text loss of a token, or of a sequence: the sum over its tokens."""
    text_weight: float = 1.0
    latent_weight: float = 1.0
    t_eps: float = 1e-4
    schedule_dtype: torch.dtype | None = None
    """Times are cast to it before the schedule; None computes the schedule in float32."""
    freeze_unused: bool = False
    eps: float = 0.0
    normalize_latents: bool = False
    limit: str = "none"
    text_max: float = 100.0
    latent_max: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """What goes into the network, and what its answers are compared with."""

    tokens: Tensor
    masked: Tensor
    weight: Tensor
    latent: Tensor
    target: Tensor
    t_text: Tensor
    t_latent: Tensor


class ImprovedTrainer(nn.Module):
    """Noises a batch, asks the network, and returns the weighted losses by name."""

    def __init__(self, model: nn.Module, noise: LatentNoise, terms: Terms, mask_id: int) -> None:
        super().__init__()
        self.model, self.noise, self.terms, self.mask_id = model, noise, terms, mask_id
        self.seen: dict[str, Tensor] = {}
        """Numbers of the last forward pass that are no loss: norms, accuracy, weights, times."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        kind = batch["loss_type"]
        if torch.is_grad_enabled() and self.terms.freeze_unused:
            self._freeze(kind)
        noised = self.noised(batch, kind)
        logits, predicted = self.model(noised.tokens, noised.latent, noised.t_text, noised.t_latent)
        losses = {}
        if kind != "t2l":
            losses["text_loss"] = self.terms.text_weight * self.text_loss(logits, batch, noised)
        if kind != "l2t":
            losses["latent_loss"] = self.terms.latent_weight * self.latent_loss(
                predicted, noised.target
            )
        self._look(batch, noised, logits.detach(), predicted.detach())
        return losses

    def noised(self, batch: Batch, kind: str) -> Noised:
        """unconditional: both. l2t: all text masked, the latent clean. t2l: the text clean, the
        latent all noise.
        """
        tokens, t, t_latent = batch["input_ids"], batch["t"], batch["t_latent"]
        if kind == "unconditional":
            weight, share = masking(t, eps=self.terms.t_eps, dtype=self.terms.schedule_dtype)
            masked = batch["mask_draw"] < share.float()[:, None]
        else:
            t = torch.full_like(t, 1.0 if kind == "l2t" else 0.0)
            t_latent = 1.0 - t
            weight, masked = torch.ones_like(t), (t > 0)[:, None].expand_as(tokens)
        latent, target = batch["latent"], batch["noise"]
        if kind != "l2t":
            latent, target = self.noise.add(latent, batch["noise"], t_latent)
        hidden = torch.where(masked, self.mask_id, tokens)
        return Noised(
            tokens=hidden,
            masked=masked,
            weight=weight,
            latent=latent,
            target=target,
            t_text=t,
            t_latent=t_latent,
        )

    def text_loss(self, logits: Tensor, batch: Batch, noised: Noised) -> Tensor:
        """Cross-entropy of the masked tokens; l2t counts every position, padding too."""
        each = token_losses(logits, batch["input_ids"])
        text_mask = (
            noised.masked
            if batch["loss_type"] == "l2t"
            else noised.masked & batch["attention_mask"]
        )
        if self.terms.weighting == "mdlm":
            weighted = noised.weight.float()[:, None] * each * text_mask
            return weighted.sum() / self.share(batch["attention_mask"])
        return (each * text_mask).sum() / self.share(text_mask)

    def share(self, mask: Tensor) -> Tensor:
        """What a sum over the positions in `mask` is divided by."""
        return (
            mask.sum().clamp(min=1) if self.terms.reduction == "token" else torch.tensor(len(mask))
        )

    def latent_loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(predicted.float(), target)

    def _freeze(self, kind: str) -> None:
        """Parameters of the modality that has no loss, by name; at every step, for the loss type
        may change.
        """
        unused = {"l2t": LATENT_PARTS, "t2l": TEXT_PARTS}.get(kind, ())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in unused))

    @torch.no_grad()
    def _look(self, batch: Batch, noised: Noised, logits: Tensor, predicted: Tensor) -> None:
        asked = noised.masked & batch["attention_mask"]
        right = (logits.argmax(dim=-1) == batch["input_ids"]) & asked
        self.seen = {
            "text_accuracy": right.sum() / asked.sum().clamp(min=1),
            "latent_norm": batch["latent"].norm(dim=-1).mean(),
            "predicted_norm": predicted.float().norm(dim=-1).mean(),
            "weight_min": noised.weight.min().float(),
            "weight_max": noised.weight.max().float(),
            "t_max": noised.t_text.max(),
        }


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every position in float32."""
    flat = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view_as(targets)


def terms_of(config: Any, dtype: torch.dtype) -> Terms:
    """Those of the original configuration."""
    loss, model = config.loss, config.model
    return Terms(
        weighting=loss.weighting,
        reduction=loss.reduction,
        text_weight=loss.text_loss_weight,
        latent_weight=loss.latent_loss_weight,
        t_eps=model.t_eps,
        schedule_dtype=dtype if model.schedule_dtype == "model" else None,
        freeze_unused=config.training.freeze_unused,
    )
