"""Everything of a run but its loop: model, losses, optimizer, learning rate, data, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from latentDLM_mmdit.improved_trainer import ImprovedTrainer, Terms
from latentDLM_mmdit.improved_trainer_stable import StableTrainer
from latentDLM_mmdit.mmdit import MMDiT
from latentDLM_mmdit.noise import LatentNoise
from latentDLM_mmdit.pairs import Batch, Batches, loss_types, open_pairs
from latentDLM_mmdit.ranks import Ranks
from latentDLM_mmdit.settings import DTYPES, Settings

EVALUATION_SEED = 9
NETWORKS = {"mmdit": MMDiT}
NOISES = {("mdlm", "continuous"): LatentNoise}
"""Text noise and latent noise, by name; the text's own is a function of the time alone."""


class Session:
    """The same for the original and the stable loop; they differ in losses and in what they do
    about a bad step.
    """

    def __init__(
        self,
        config: Settings,
        ranks: Ranks,
        trainer: type[ImprovedTrainer],
        terms_of: Callable[[Settings, torch.dtype], Terms],
    ) -> None:
        self.config, self.ranks = config, ranks
        training, model = config.training, config.model
        self.dtype, self.parts = DTYPES[training.dtype], int(training.gradient_accumulation_steps)
        self.mixed = training.precision == "mixed" and self.dtype != torch.float32
        torch.manual_seed(training.seed)
        network = NETWORKS[model.type](model).to(ranks.device)
        if training.precision == "pure":
            network = network.to(self.dtype)
        if training.compile_model:
            network.compile()
        noise = NOISES[model.diffusion_process, model.latent_diffusion_process](
            model.latent_timesteps,
            model.latent_beta_schedule,
            model.latent_beta_min,
            model.latent_beta_max,
            model.latent_parameterization,
        )
        self.terms = terms_of(config, self.dtype)
        self.trainer = trainer(network, noise, self.terms, model.vocab_size)
        self.module: nn.Module = self.trainer
        if ranks.world > 1:
            partly = (
                config.loss.loss_type != "unconditional"
            )  # some parameters then have no gradient
            self.module = DistributedDataParallel(self.trainer, find_unused_parameters=partly)
        self.pairs, self.held_out = open_pairs(config, first=ranks.first, wait=ranks.wait)
        self.batches = Batches(
            self.pairs,
            training.train_batch_size,
            seed=training.seed,
            ranks=(ranks.rank, ranks.world),
            types=loss_types(config),
        )
        self.total_steps = self._total_steps()
        self.warmup = min(int(training.warmup_steps), int(training.warmup_share * self.total_steps))
        self.optimizer = _optimizer(self.trainer, config.optimizer)
        self.schedule = LambdaLR(self.optimizer, self.rate_factor)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.trainer.parameters())

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _total_steps(self) -> int:
        training = self.config.training
        if training.num_epochs is None:
            return int(training.num_train_steps)
        return min(
            int(training.num_train_steps),
            int(training.num_epochs) * self.batches.per_epoch // self.parts,
        )

    def rate_factor(self, step: int) -> float:
        """Linear warm-up, then 0.1 + 0.9 cosine."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.config.training.lr_schedule == "constant":
            return warm
        done = min(1.0, step / max(1, self.total_steps))
        return warm * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))

    def set_rate(self, step: int) -> None:
        """By hand, as the original does at every step: whatever a checkpoint brought, the
        configuration counts.
        """
        self.schedule.last_epoch = step
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * self.rate_factor(step)

    def context(self) -> AbstractContextManager[Any]:
        """What the network really runs in."""
        return torch.autocast(self.ranks.device.type, self.dtype) if self.mixed else nullcontext()

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The named losses of a micro-batch, as its share of the step."""
        with self.context():
            losses: dict[str, Tensor] = self.module(self.on_device(batch))
        return {name: value / self.parts for name, value in losses.items()}

    def on_device(self, batch: Batch) -> Batch:
        device = self.ranks.device
        return {
            key: value.to(device) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def seen(self) -> dict[str, float]:
        """Norms, accuracy, weights and times of the last micro-batch."""
        return {name: float(value) for name, value in self.trainer.seen.items()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """ELBO of the text and squared error of the latent on held-out pairs, whatever was trained
        on.

        Times, noise and schedule are the same for every run, so that runs can be compared.
        `l2t_accuracy`: share of the tokens that are right when all are masked and only the latent
        is known.
        """
        config, network = self.config, self.trainer.model
        trained = config.loss.loss_type
        kind = trained if trained in ("l2t", "t2l") else "unconditional"
        measure = StableTrainer(
            network,
            self.trainer.noise,
            replace(Terms(), t_eps=self.terms.t_eps),
            self.trainer.mask_id,
        )
        size = min(int(config.training.eval_batch_size), len(self.held_out))
        was_training = network.training
        network.eval()
        sums: dict[str, float] = {}
        for number in range(config.logging.num_eval_batches):
            for asked in dict.fromkeys((kind, "l2t")):
                batches = Batches(
                    self.held_out, size, seed=EVALUATION_SEED, types=lambda _, asked=asked: asked
                )
                with self.context():
                    losses = measure(self.on_device(batches.at(number)))
                if asked == kind:
                    for name, value in losses.items():
                        sums[name] = sums.get(name, 0.0) + float(value)
                if asked == "l2t":
                    sums["l2t_accuracy"] = sums.get("l2t_accuracy", 0.0) + float(
                        measure.seen["text_accuracy"]
                    )
        network.train(was_training)
        means = {name: total / config.logging.num_eval_batches for name, total in sums.items()}
        return {"eval_loss": sum(v for name, v in means.items() if name.endswith("_loss")), **means}


def _optimizer(trainer: nn.Module, optimizer: Any) -> Optimizer:
    made = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer.name]
    return made(
        trainer.parameters(),
        lr=float(optimizer.lr),
        betas=(optimizer.beta1, optimizer.beta2),
        eps=float(optimizer.eps),
        weight_decay=optimizer.weight_decay,
        fused=bool(optimizer.use_fused),
    )
