"""The ways in through transformers' Trainer and Lightning: whole fits, guarded and bare."""

from __future__ import annotations

import logging
import tempfile
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard import GuardConfig, TrainingHalted
from zoo.healthy.adversarial import Pair, Real, fooling, saturating
from zoo.healthy.data import ROWS, Clouds, converged, mlp
from zoo.healthy.drive import Left, Outcome, seed_all, tally
from zoo.healthy.same import frozen, state_of
from zoo.healthy.training import Calls, Learner, Training, register

GROUP = "frameworks"
QUIET = GuardConfig(terminal="quiet")


class Classifier(nn.Module):
    """A converged classifier with the signature that the Trainer wants."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = mlp(hidden=32)
        self.net.load_state_dict(converged(seed))

    def forward(self, x: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(clouds: Clouds, count: int) -> list[dict[str, Tensor]]:
    x, y = clouds.batch(count)
    return [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]


def seen(model: nn.Module, optimizer: Any, scheduler: Any, calls: Calls) -> Left:
    """What a fit left behind, read as the loops' state is."""
    learner = Learner(
        model=model, optimizer=optimizer, loss=lambda batch: torch.zeros(()), scheduler=scheduler
    )
    left = state_of(Training(learners={"only": learner}, updates=lambda step: iter(())))
    return (calls.loss, calls.forward), left


# --- transformers
# --------------------------------------------------------------------------------------------------


def trainer(
    other_data: bool, settings: dict[str, Any], seed: int, steps: int, outcome: Outcome | None
) -> Left:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from stepguard.integrations.transformers import guard

    logging.getLogger("transformers").setLevel(logging.ERROR)
    seed_all(seed)
    model, calls = Classifier(seed), Calls()
    handle = model.register_forward_pre_hook(calls.seen)
    clouds = Clouds(seed + 1 if other_data else seed)
    clouds.generator.manual_seed(seed + 1000)
    with tempfile.TemporaryDirectory(prefix="stepguard-harmless-") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            logging_steps=1000,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
            **settings,
        )
        fit = Trainer(model=model, args=arguments, train_dataset=rows(clouds, 20 * ROWS))
        fit.remove_callback(PrinterCallback)
        watching = guard(fit, QUIET) if outcome is not None else nullcontext()
        with watching:
            _fit(fit.train, outcome)
        if outcome is not None:
            tally(outcome, [watching])
    handle.remove()
    return seen(model, fit.optimizer, fit.lr_scheduler, calls)


def _fit(train: Any, outcome: Outcome | None) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train()
    except TrainingHalted:
        if outcome is None:
            raise
        outcome.interventions["halt"] = 1


PLAIN = {
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "optim": "adamw_torch",
}
FULL = {
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
}
register("trainer_from_converged", GROUP, "trainer", partial(trainer, False, PLAIN))
register("trainer_new_data_accumulation", GROUP, "trainer", partial(trainer, True, FULL))


# --- Lightning
# --------------------------------------------------------------------------------------------------


def lightning(kind: str, seed: int, steps: int, outcome: Outcome | None) -> Left:
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from stepguard.integrations.lightning import GuardCallback

    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    seed_all(seed)
    made = {"finetune": _finetuning, "gan": _gan}[kind](seed)
    calls, callback = Calls(), GuardCallback(QUIET)
    handle = made.counted().register_forward_pre_hook(calls.seen)
    updates = steps * made.updates_a_batch
    with tempfile.TemporaryDirectory(prefix="stepguard-harmless-") as folder:
        fit = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=updates,
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=made.clip,
            callbacks=[callback] if outcome is not None else [],
        )
        data = DataLoader(made.rows(), batch_size=ROWS, shuffle=True)
        _fit(partial(fit.fit, made, data), outcome)
    if outcome is not None:
        tally(outcome, callback.guards)
    callback.close()
    handle.remove()
    optimizers = made.optimizers()
    first, *others = optimizers if isinstance(optimizers, list) else [optimizers]
    counted, left = seen(made.net, getattr(first, "optimizer", first), None, calls)
    left["others"] = [frozen(getattr(one, "optimizer", one).state_dict()) for one in others]
    return counted, left


def _finetuning(seed: int) -> Any:
    from lightning.pytorch import LightningModule

    class Finetuning(LightningModule):
        """From converged, with clipping and a stepwise schedule."""

        updates_a_batch, clip = 1, 1.0

        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier(seed)

        def counted(self) -> nn.Module:
            return self.net

        def rows(self) -> list[dict[str, Tensor]]:
            clouds = Clouds(seed)
            clouds.generator.manual_seed(seed + 1000)
            return rows(clouds, 20 * ROWS)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    return Finetuning()


def _gan(seed: int) -> Any:
    from lightning.pytorch import LightningModule

    class Adversaries(LightningModule):
        """Manual optimization, two optimizers."""

        updates_a_batch, clip = 2, None

        def __init__(self) -> None:
            super().__init__()
            self.net = Pair()
            self.automatic_optimization = False

        def counted(self) -> nn.Module:
            return self.net.critic

        def rows(self) -> list[Tensor]:
            real = Real(seed)
            return list(torch.cat([real.points() for _ in range(20)]))

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            pair = self.net
            for_critic, for_generator = self.optimizers()
            fake = pair.generator(torch.randn(len(batch), 4))
            for_critic.zero_grad()
            self.manual_backward(saturating(pair.critic(batch), pair.critic(fake.detach())))
            for_critic.step()
            for_generator.zero_grad()
            self.manual_backward(fooling(pair.critic(fake)))
            for_generator.step()

        def configure_optimizers(self) -> Any:
            betas = (0.5, 0.999)
            parts = (self.net.critic, self.net.generator)
            return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=betas) for part in parts], []

    return Adversaries()


register("lightning_from_converged", GROUP, "lightning", partial(lightning, "finetune"))
register("lightning_gan_manual", GROUP, "lightning", partial(lightning, "gan"))
