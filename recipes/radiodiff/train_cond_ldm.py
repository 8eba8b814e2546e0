"""Train the conditional latent diffusion.

    accelerate launch train_cond_ldm.py --cfg configs/radio_train_m.yaml python train_cond_ldm.py
    --cfg configs/radio_train_m.yaml trainer.train_num_steps=100 model.eps=0

`trainer.guard: original` runs the loop as it was; `stable` checks the settings first and lets
stepguard watch the loop. Ctrl+C saves the state if it is good. Not covered: the original's
discriminator, Swin condition net and 256x256 maps.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from denoising_diffusion_pytorch.ddm_const_sde import PARTS, LatentDiffusion
from denoising_diffusion_pytorch.settings import (
    Settings,
    accelerator_for,
    changed_since,
    load_config,
    precision_report,
)
from denoising_diffusion_pytorch.stages import Stages, build_stages
from stepguard import GuardConfig
from stepguard.check.settings import plain
from stepguard.numerics import events

Batch = dict[str, Tensor]


@dataclass(slots=True)
class History:
    """What a run leaves behind in memory."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Trainer:
    """Model, data, optimizer and loop of one run."""

    def __init__(
        self, config: Settings, accelerator: Accelerator, *, stages: Stages | None = None
    ) -> None:
        self.config, self.accelerator = config, accelerator
        trainer = config.trainer
        self.stages = stages or build_stages(config, accelerator.process_index)
        self.folder = Path(trainer.results_folder) if trainer.results_folder else None
        diffusion = self.stages.diffusion(config, say=tqdm.write)
        optimizer = torch.optim.AdamW(
            diffusion.parameters(), lr=trainer.lr, weight_decay=trainer.weight_decay
        )
        schedule = LambdaLR(optimizer, _decay(trainer.train_num_steps, trainer.min_lr / trainer.lr))
        self.ema = AveragedModel(diffusion, multi_avg_fn=get_ema_multi_avg_fn(trainer.ema_decay))
        self.model, self.optimizer, self.schedule = accelerator.prepare(
            diffusion, optimizer, schedule
        )
        self.step = 0
        self.history = History()
        self.losses: dict[str, float] = {}
        """Of the last step, by name, and their sum."""
        self.rate = float(trainer.lr)
        """Of the last step."""
        self._parts: Batch = {}
        self.guard = self._guarded() if guard_settings(config) else None

    def _guarded(self) -> Any:
        from stepguard.integrations.accelerate import guard

        made = guard(self.accelerator, guard_settings(self.config))
        made.guards[0].on_commit(self._average)
        return made

    def train(self, *, bar: bool = True) -> History:
        """All steps that are left."""
        total = self.config.trainer.train_num_steps
        try:
            with tqdm(total=total, initial=self.step, disable=not bar) as shown:
                while self.step < total:
                    loss = self.one_step()
                    shown.update()
                    shown.set_postfix(loss=f"{loss:.3f}")
                    self._after_step()
        except KeyboardInterrupt:
            tqdm.write(f"stopped by Ctrl+C; {self.save('interrupted')}")
            raise
        finally:
            self.close()
        return self.history

    def close(self) -> None:
        """Undo the guard's hooks; a second time does nothing."""
        if self.guard is not None:
            self.guard.close()

    def one_step(self) -> float:
        """One optimizer step over `gradient_accumulate_every` batches."""
        trainer = self.config.trainer
        total = dict.fromkeys(PARTS, 0.0)
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()
        for _ in range(trainer.gradient_accumulate_every):
            loss = self._loss(self.next_batch())
            for name, part in self._parts.items():  # before a replay can overwrite them
                total[name] += float(part)
            self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), trainer.grad_clip)
        self.optimizer.step()
        self.schedule.step()
        if self.guard is None:
            self._average()
        self.step += 1
        self.losses = {**total, "total_loss": sum(total.values())}
        self.history.losses.append(self.losses["total_loss"])
        self.history.norms.append(float(norm))
        return self.losses["total_loss"]

    def _average(self) -> None:
        """Guarded, only after an update that really happened: a poisoned average never heals."""
        trainer = self.config.trainer
        if self.step >= trainer.ema_update_after_step and self.step % trainer.ema_update_every == 0:
            self.ema.update_parameters(self._bare())

    def _after_step(self) -> None:
        trainer = self.config.trainer
        if self.step % trainer.log_freq == 0:
            parts = ", ".join(f"{name}: {value:.5f}" for name, value in self.losses.items())
            tqdm.write(
                f"[Train Step] {self.step}/{trainer.train_num_steps}: {parts}, lr: {self.rate:.2e}"
            )
        milestone = self.step % trainer.save_and_sample_every == 0 and self.folder is not None
        if milestone and self.accelerator.is_main_process:
            saved = self.save(str(self.step // trainer.save_and_sample_every))
            tqdm.write(f"{saved}; NMSE of sampled maps {self.nmse():.4f}")

    def next_batch(self) -> Batch:
        """Latents of the next maps, with their noise and times: everything random of a step is in
        its batch.
        """
        return self.stages.batch(self._bare())

    def _loss(self, batch: Batch) -> Tensor:
        parts = self.config.trainer.gradient_accumulate_every

        def compute(given: Batch) -> dict[str, Tensor]:
            with self.accelerator.autocast():
                losses = {name: value / parts for name, value in self.model(given).items()}
            self._parts = {name: value.detach() for name, value in losses.items()}
            if self.guard is not None:
                self.guard.guards[0].follow("weight", self._bare().largest_weight)
            return losses

        if self.guard is not None:
            guarded: Tensor = self.guard.loss(compute, batch)
            return guarded
        return torch.stack(list(compute(batch).values())).sum()

    def _bare(self) -> LatentDiffusion:
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, LatentDiffusion)
        return model

    def save(self, name: str) -> str:
        """Write `model-<name>.pt` atomically; guarded, only if it is good. Return what to say."""
        if self.folder is None or not self.accelerator.is_main_process:
            return "nothing is saved"
        bad = self.guard.guards[0].port.trouble() if self.guard is not None else ()
        if bad:
            return (
                f"model-{name}.pt NOT saved: {bad[0]} is not finite; the checkpoint before it stays"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "model": self._bare().state_dict(),
            "opt": self.optimizer.state_dict(),
            "lr_scheduler": self.schedule.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "random": self.stages.random_state(),
            "config": plain(self.config),
        }
        temporary = self.folder / f".model-{name}.tmp"
        torch.save(state, temporary)
        temporary.replace(self.folder / f"model-{name}.pt")
        return f"saved model-{name}.pt"

    def load(self, milestone: int) -> str:
        """Go on from `model-<milestone>.pt`. Return what is configured otherwise since then."""
        path = (self.folder or Path()) / f"model-{milestone}.pt"
        if not path.is_file():
            raise SystemExit(
                f"trainer.resume_milestone={milestone}: {path} does not exist; enable_resume=False "
                f"starts anew."
            )
        state = torch.load(path, weights_only=True)
        self._bare().load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["opt"])
        self.schedule.load_state_dict(state["lr_scheduler"])
        self.ema.load_state_dict(state["ema"])
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.stages.set_random_state(state["random"])
        self._use_configured_rate()
        self.step = state["step"]
        if self.guard is not None:
            self.guard.guards[0].port.start_at(self.step)
        return f"{path.name}: step {self.step}; {changed_since(path, self.config)}"

    def _use_configured_rate(self) -> None:
        """Optimizer and schedule bring the rate back that they were saved with."""
        schedule, rate = self.schedule.scheduler, self.config.trainer.lr
        schedule.base_lrs = [rate] * len(schedule.base_lrs)
        for group, factor in zip(self.optimizer.param_groups, schedule.lr_lambdas, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * factor(schedule.last_epoch)

    def nmse(self) -> float:
        """Normalised error of sampled maps of places never trained on, by the averaged weights."""
        averaged = int(self.ema.n_averaged) > 0
        model = self.ema.module if averaged else self._bare()
        assert isinstance(model, LatentDiffusion)
        return self.stages.nmse(model, self.config.model.sampling_timesteps)


def _decay(steps: int, floor: float) -> Any:
    """(1 - i/N)^0.96, not below `floor`, and not a complex number one step past the end."""
    return lambda i: max(floor, max(0.0, 1.0 - i / steps) ** 0.96)


def guard_settings(config: Settings) -> GuardConfig | None:
    folder = config.trainer.results_folder
    if config.trainer.guard != "stable":
        return None
    return GuardConfig(run_dir=Path(folder) / "run" if folder else None)


def build(config: Settings) -> dict[str, Any]:
    """For `stepguard check train_cond_ldm:build --config configs/radio_train_m.yaml`."""
    guard = guard_settings(config)
    config.trainer["guard"] = "original"  # nothing must be hooked for a look
    trainer = Trainer(config, accelerator_for(config))
    return {
        "model": trainer.model,
        "optimizer": trainer.optimizer.optimizer,
        "scheduler": trainer.schedule.scheduler,
        "scaler": trainer.accelerator.scaler,
        "autocast": trainer.accelerator,
        "loss_fn": trainer._loss,
        "batch": trainer.next_batch(),
        "config": config,
        "guard": guard,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cfg", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args(arguments)
    start(load_config(options.cfg, options.overrides))
    # the wrapped model holds the process group; threads of gloo that end after Python abort the
    # process
    gc.collect()


def start(config: Settings) -> Trainer:
    """The whole run: check the settings, load a checkpoint if one is wanted, train."""
    accelerator = accelerator_for(config)
    trainer = Trainer(config, accelerator)
    try:
        report, aligned = precision_report(trainer)
        if accelerator.is_main_process:
            print(report)
        if trainer.guard is not None and not aligned:
            raise SystemExit(5)  # the exit code of stepguard check
        if config.trainer.enable_resume:
            said = trainer.load(config.trainer.resume_milestone)
            if accelerator.is_main_process:
                print(said)
        events.clear()
        began = time.perf_counter()
        trainer.train(bar=accelerator.is_main_process)
        seconds = time.perf_counter() - began
        if accelerator.is_main_process:
            print(
                f"{trainer.step} steps in {seconds:.0f} s, NMSE of sampled maps "
                f"{trainer.nmse():.4f}"
            )
            if limited := events.counts().get("ddm_weights.limited"):
                print(
                    f"model.weight_limit={config.model.weight_limit:g} acted on {limited} samples"
                )
    finally:
        trainer.close()
    accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
