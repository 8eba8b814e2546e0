"""What the look notes of attention, normalisation, activations and classification losses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.calls import aten
from stepguard.locate.operators import Operator
from stepguard.look.statistics import Numbers, root_mean_square, sampled
from stepguard.records.look import AttentionLook, NormLook, StepFacts, UnitLook

SOFTMAX = aten("_softmax _safe_softmax")
FUSED_ATTENTION = aten(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
)
NORMS = aten(
    "native_layer_norm native_batch_norm _native_batch_norm_legit native_group_norm "
    "_native_batch_norm_legit_functional cudnn_batch_norm miopen_batch_norm _fused_rms_norm"
)
RECTIFIERS = aten("relu relu_ threshold clamp_min hardtanh hardtanh_")
SATURATING = {"aten.sigmoid": (0.01, 0.99), "aten.tanh": (-0.99, 0.99)}
LOG_SOFTMAX = aten("_log_softmax")
TARGETS = aten("nll_loss_forward nll_loss2d_forward")
MOST_ROWS = 2048
"""Rows of an attention that are looked at."""
MOST_QUERIES = 64
MOST_KEYS = 4096
MASKED_BELOW = -1e4
"""Logits below are taken for masked positions."""
SURE_OF_A_SUM = 4e-3
"""Probabilities that were rounded to bfloat16 sum to 1 within half of this."""


@dataclass(slots=True)
class LayerFacts:
    """Numbers on the device, and what each stands for."""

    numbers: Numbers
    _attention: list[tuple[str, int, int]] = field(default_factory=list)
    _norms: list[tuple[str, str, int]] = field(default_factory=list)
    _units: list[tuple[str, str, int, int, int]] = field(default_factory=list)
    _targets: list[int] = field(default_factory=list)
    _probabilities: list[int] = field(default_factory=list)

    def before(self, operator: Operator, args: Any, kwargs: Any, module: str) -> None:
        """Note what goes in, where the operation may overwrite it."""
        name = operator.name
        if name in LOG_SOFTMAX:
            self._note_probabilities(args[0], args[1])
        elif name in TARGETS:
            self._note_targets(args)

    def after(
        self, operator: Operator, args: Any, kwargs: Any, results: list[Tensor], module: str
    ) -> None:
        """Note what came out of a forward operation."""
        name = operator.name
        if name in SOFTMAX and module:
            self._note_softmax(module, args[0], args[1])
        elif name in FUSED_ATTENTION:
            self._note_fused(module, args, kwargs)
        elif name in NORMS:
            self._note_norm(module, args[0], results[0])
        elif name in RECTIFIERS or name in SATURATING:
            self._note_units(module, name, results[0])

    # --- attention ------------------------------------------------------------------------------

    def _note_softmax(self, module: str, logits: Tensor, dim: int) -> None:
        if logits.dim() < 3 or dim not in (-1, logits.dim() - 1):
            return
        self._add_rows(module, _some_rows(logits.detach().reshape(-1, logits.shape[-1])))

    def _note_fused(self, module: str, args: Any, kwargs: Any) -> None:
        """A fused attention keeps its logits to itself: compute some of them again."""
        query, key = args[0].detach()[:1], args[1].detach()[:1]
        if query.shape[1] != key.shape[1] or key.shape[-2] > MOST_KEYS:
            return  # grouped heads; too many keys to be cheap
        stride = max(1, query.shape[-2] // MOST_QUERIES)
        positions = torch.arange(0, query.shape[-2], stride, device=query.device)
        scale = kwargs.get("scale") or 1.0 / math.sqrt(query.shape[-1])
        rows = query[:, :, positions].float() @ key.float().transpose(-2, -1) * scale
        mask = kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            # a mask may have one row for all queries, and one for all heads or samples
            shown = mask.detach()[:1] if mask.dim() == 4 else mask.detach()
            rows = rows + shown.expand(*rows.shape[:2], query.shape[-2], -1)[:, :, positions]
        if _is_causal(args, kwargs):
            keys = torch.arange(key.shape[-2], device=query.device)
            rows = rows.masked_fill(keys[None, :] > positions[:, None], -torch.inf)
        self._add_rows(module, _some_rows(rows.reshape(-1, rows.shape[-1])))

    def _add_rows(self, module: str, logits: Tensor) -> None:
        wide = logits.float()
        seen = wide > MASKED_BELOW
        keys = seen.sum(-1)
        several = keys > 1
        weights = torch.softmax(wide, -1)
        entropy = -(weights * torch.log(weights.clamp_min(1e-30))).sum(-1)
        relative = entropy / torch.log(keys.clamp_min(2).float())
        count = several.sum().clamp_min(1)
        parts = (
            torch.where(seen, wide, -torch.inf).amax(),
            torch.where(several, relative, 0.0).sum() / count,
            (several & (weights.amax(-1) > 0.99)).sum() / count,
            (several & (relative > 0.999)).sum() / count,
        )
        vector = torch.cat([part.to(torch.float64).reshape(1) for part in parts])
        self._attention.append((module, self.numbers.add(vector), logits.shape[-1]))

    # --- the rest -------------------------------------------------------------------------------

    def _note_norm(self, module: str, given: Tensor, result: Tensor) -> None:
        scale = root_mean_square(given.detach())
        zeros = (sampled(result.detach()) == 0).to(torch.float64).mean().reshape(1)
        number = self.numbers.add(torch.cat([scale, zeros]))
        self._norms.append((module, str(given.dtype).removeprefix("torch."), number))

    def _note_units(self, module: str, op: str, result: Tensor) -> None:
        values = result.detach()
        if values.dim() < 2:
            return
        axis = 1 if values.dim() == 4 else values.dim() - 1
        units = values.shape[axis]
        positions = values.numel() // max(units, 1)
        if op in SATURATING:
            low, high = SATURATING[op]
            sample = sampled(values)
            share = ((sample < low) | (sample > high)).to(torch.float64).mean()
        else:
            others = [dim for dim in range(values.dim()) if dim != axis]
            share = (values.amax(others) <= 0).to(torch.float64).mean()
        self._units.append((module, op, units, positions, self.numbers.add(share.reshape(1))))

    def _note_probabilities(self, logits: Tensor, dim: int) -> None:
        """Rows that are between 0 and 1 and sum to 1 have been through a softmax."""
        values = logits.detach()
        if values.dim() < 2 or values.shape[dim] < 2:
            return
        sums = values.float().sum(dim)
        off = torch.maximum((sums - 1.0).abs().amax(), (-values.float()).amax())
        self._probabilities.append(self.numbers.add(off.to(torch.float64).reshape(1)))

    def _note_targets(self, args: Any) -> None:
        target = args[1]
        ignored = (target == args[4]).sum().to(torch.float64).reshape(1)
        count = ignored.new_tensor([float(target.numel())])
        self._targets.append(self.numbers.add(torch.cat([ignored, count])))

    # --- on the host ----------------------------------------------------------------------------

    def attention(self, values: list[list[float]]) -> list[AttentionLook]:
        found = []
        for module, number, keys in self._attention:
            logit, entropy, collapsed, uniform = values[number]
            found.append(
                AttentionLook(
                    module=module,
                    largest_logit=logit,
                    entropy=entropy,
                    collapsed=collapsed,
                    uniform=uniform,
                    keys=keys,
                )
            )
        return found

    def norms(self, values: list[list[float]]) -> list[NormLook]:
        found = []
        for module, dtype, number in self._norms:
            scale, zeros = values[number]
            found.append(NormLook(module=module, dtype=dtype, scale=scale, output_zeros=zeros))
        return found

    def units(self, values: list[list[float]]) -> list[UnitLook]:
        found = []
        for module, op, units, positions, number in self._units:
            share = values[number][0]
            flat = op in SATURATING
            found.append(
                UnitLook(
                    module=module,
                    op=op,
                    units=units,
                    positions=positions,
                    saturated=share if flat else 0.0,
                    dead=0.0 if flat else share,
                )
            )
        return found

    def facts(self, values: list[list[float]]) -> StepFacts:
        ignored = sum(values[number][0] for number in self._targets)
        labels = sum(values[number][1] for number in self._targets)
        twice = any(values[number][0] < SURE_OF_A_SUM for number in self._probabilities)
        return StepFacts(labels=int(labels), ignored=int(ignored), softmax_twice=twice)


def _some_rows(rows: Tensor) -> Tensor:
    stride = max(1, math.ceil(rows.shape[0] / MOST_ROWS))
    return rows[::stride]


def _is_causal(args: Any, kwargs: Any) -> bool:
    """`is_causal` stands behind the dropout in every fused attention, or is a keyword."""
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    return any(argument is True for argument in args[3:])
