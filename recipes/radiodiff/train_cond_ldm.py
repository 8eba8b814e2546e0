"""Train the conditional latent diffusion.

    accelerate launch train_cond_ldm.py --cfg configs/radio_train_m.yaml
    python train_cond_ldm.py --cfg configs/radio_train_m.yaml trainer.train_num_steps=100 model.eps=0

`trainer.guard: original` runs the loop as it was; `stable` lets stepguard watch it. Ctrl+C saves the state if it is good.
Not covered: the original's discriminator, Swin condition net and 256x256 maps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from denoising_diffusion_pytorch.autoencoder import AutoencoderKL, train_first_stage
from denoising_diffusion_pytorch.cities import Maps, stored_batches, toy_batches
from denoising_diffusion_pytorch.cond_unet import CondUNet
from denoising_diffusion_pytorch.ddm_const_sde import LatentDiffusion

Batch = dict[str, Tensor]


def load_config(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The file, with `key.sub=value` on top. OmegaConf reads 1e-5 as a number, PyYAML alone as text."""
    config = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(config, DictConfig)
    return config


@dataclass(slots=True)
class History:
    """What a run leaves behind in memory."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Trainer:
    """Model, data, optimizer and loop of one run."""

    def __init__(self, config: DictConfig, accelerator: Accelerator, *, run_dir: Path | None = None) -> None:
        self.config, self.accelerator, self.run_dir = config, accelerator, run_dir
        model, data, trainer = config.model, config.data, config.trainer
        if (model.model_type, model.model_name) != ("const_sde", "cond_unet"):
            raise ValueError(f"model {model.model_type}/{model.model_name} is not built here; use const_sde/cond_unet.")
        self.batches = _batches(config)
        self.first_stage = train_first_stage(_batches(config), model.first_stage.steps, model.first_stage.embed_dim)
        self.scale = _latent_scale(config, self.first_stage)
        torch.manual_seed(0)
        unet = CondUNet(model.first_stage.embed_dim, model.unet.dim, fourier_scale=model.unet.fourier_scale)
        diffusion = LatentDiffusion(
            unet,
            eps=model.eps,
            time_grid=model.timesteps,
            weighting_loss=model.weighting_loss,
            use_l1=model.use_l1,
            weight_limit=model.weight_limit,
            treatment=trainer.treatment,
            say=tqdm.write,
        )
        optimizer = torch.optim.AdamW(diffusion.parameters(), lr=trainer.lr, weight_decay=trainer.weight_decay)
        schedule = LambdaLR(optimizer, _decay(trainer.train_num_steps, trainer.min_lr / trainer.lr))
        self.ema = AveragedModel(diffusion, multi_avg_fn=get_ema_multi_avg_fn(trainer.ema_decay))
        self.model, self.optimizer, self.schedule = accelerator.prepare(diffusion, optimizer, schedule)
        self.draws = torch.Generator().manual_seed(data.seed + accelerator.process_index)
        self.step = 0
        self.history = History()
        self.guard = self._guard() if trainer.guard == "stable" else None

    def _guard(self) -> Any:
        from stepguard import GuardConfig
        from stepguard.integrations.accelerate import guard

        return guard(self.accelerator, GuardConfig(run_dir=self.run_dir))

    def train(self, *, bar: bool = True) -> History:
        """All steps that are left."""
        trainer = self.config.trainer
        shown = tqdm(range(self.step, trainer.train_num_steps), disable=not bar, initial=self.step)
        try:
            for _ in shown:
                self.one_step(shown)
        except KeyboardInterrupt:
            tqdm.write("stopped by Ctrl+C; " + self.save("interrupted"))
            raise
        finally:
            if self.guard is not None:
                self.guard.close()
        return self.history

    def one_step(self, shown: Any) -> None:
        """One optimizer step over `gradient_accumulate_every` batches."""
        trainer = self.config.trainer
        total = 0.0
        self.optimizer.zero_grad()
        for _ in range(trainer.gradient_accumulate_every):
            loss = self._loss(self.next_batch()) / trainer.gradient_accumulate_every
            self.accelerator.backward(loss)
            total += float(loss.detach())
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), trainer.grad_clip)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.history.losses.append(total)
        self.history.norms.append(float(norm))
        if self.step >= trainer.ema_start and not self._vetoed():
            self.ema.update_parameters(self._bare())
        if self.step % trainer.log_every == 0:
            rate = self.optimizer.param_groups[0]["lr"]
            tqdm.write(
                f"[Train Step] {self.step}/{trainer.train_num_steps}: loss_simple: {total:.5f}, loss_vlb: 0.00000, "
                f"total_loss: {total:.5f}, lr: {rate:.5f}"
            )
        if self.step % trainer.save_every == 0:
            tqdm.write(self.save(str(self.step // trainer.save_every)))
        shown.set_postfix(loss=f"{total:.3f}")

    def next_batch(self) -> Batch:
        """Latents of the next maps, with their noise and times: everything random of a step is in its batch."""
        maps = next(self.batches)
        with torch.no_grad():
            latent = self.scale * self.first_stage.draw(maps.image, self.draws)
        noise = torch.randn(latent.shape, generator=self.draws)
        t = self._bare().times(len(latent), self.draws)
        return {"x_start": latent, "noise": noise, "t": t, "condition": maps.condition}

    def _loss(self, batch: Batch) -> Tensor:
        def compute(given: Batch) -> Tensor:
            with self.accelerator.autocast():
                loss: Tensor = self.model(given)["loss_simple"]
            return loss

        return compute(batch) if self.guard is None else self.guard.loss(compute, batch)

    def _bare(self) -> LatentDiffusion:
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, LatentDiffusion)
        return model

    def _vetoed(self) -> bool:
        """A weight average after a refused update would count the old weights twice."""
        return self.guard is not None and bool(self.optimizer.step_was_skipped)

    def save(self, name: str) -> str:
        """`model-<name>.pt` in one step, and only if it is good. Returns what to say."""
        if self.config.trainer.results_folder is None or not self.accelerator.is_main_process:
            return ""
        bad = self.guard.guards[0].trouble() if self.guard is not None else ()
        if bad:
            return f"model-{name}.pt NOT saved: {bad[0]} is not finite; the checkpoint before it stays"
        folder = Path(self.config.trainer.results_folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "model": self._bare().state_dict(),
            "opt": self.optimizer.state_dict(),
            "lr_scheduler": self.schedule.state_dict(),
            "ema": self.ema.state_dict(),
            "draws": self.draws.get_state(),
        }
        temporary = folder / f".model-{name}.tmp"
        torch.save(state, temporary)
        os.replace(temporary, folder / f"model-{name}.pt")
        return f"saved model-{name}.pt"

    def load(self, milestone: int) -> None:
        """Go on from `model-<milestone>.pt`."""
        path = Path(self.config.trainer.results_folder) / f"model-{milestone}.pt"
        if not path.is_file():
            raise SystemExit(f"trainer.resume_milestone={milestone}: {path} does not exist; 0 starts anew.")
        state = torch.load(path, weights_only=True)
        self._bare().load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["opt"])
        self.schedule.load_state_dict(state["lr_scheduler"])
        self.ema.load_state_dict(state["ema"])
        self.draws.set_state(state["draws"])
        self.step = state["step"]
        for _ in range(self.step * self.config.trainer.gradient_accumulate_every):
            next(self.batches)

    @torch.no_grad()
    def nmse(self, number: int = 32, seed: int = 77) -> float:
        """Normalised error of sampled maps of new cities."""
        generator = torch.Generator().manual_seed(seed)
        maps = next(toy_batches(number, seed, self.config.model.image_size))
        shape = self.first_stage.encode(maps.image)[0].shape
        model = self._bare().eval()
        latent = model.sample(maps.condition, tuple(shape), generator, self.config.model.sampling_timesteps)
        model.train()
        image = self.first_stage.decoder(latent / self.scale)
        return float((image - maps.image).square().sum() / (maps.image + 1.0).square().sum())


def _batches(config: DictConfig) -> Iterator[Maps]:
    data = config.data
    if data.name == "real":
        return stored_batches(Path(data.folder), data.batch_size, data.seed)
    if data.name != "toy":
        raise SystemExit(f"data.name={data.name!r} is not known; use toy or real.")
    return toy_batches(data.batch_size, data.seed, config.model.image_size)


def _latent_scale(config: DictConfig, first_stage: AutoencoderKL) -> float:
    if not config.model.scale_by_std:
        return float(config.model.default_scale)
    sample = next(toy_batches(64, 5, config.model.image_size))
    with torch.no_grad():
        return float(1.0 / first_stage.encode(sample.image)[0].std())


def _decay(steps: int, floor: float) -> Any:
    """(1 - i/N)^0.96, not below `floor`, and not a complex number one step past the end."""
    return lambda i: max(floor, max(0.0, 1.0 - i / steps) ** 0.96)


def precision(config: DictConfig) -> str:
    """What `amp` and `fp16` mean here: bf16 autocast, fp16 with a scaler, or neither. One place decides."""
    if config.trainer.fp16:
        return "fp16"
    return "bf16" if config.trainer.amp else "no"


def status(trainer: Trainer) -> str:
    """The state of the run from its live objects; `aligned` only if the probe agrees."""
    accelerator, settings = trainer.accelerator, trainer.config.trainer
    layer = nn.Linear(2, 2)
    with torch.no_grad(), accelerator.autocast():
        real = str(layer(torch.zeros(1, 2)).dtype).removeprefix("torch.")
    wanted = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision(trainer.config)]
    aligned = real == wanted and (wanted != "float16" or accelerator.scaler is not None)
    verdict = "Configuration is properly aligned" if aligned else f"NOT aligned: {wanted} is configured, {real} runs"
    return "\n".join(
        [
            "=== Current Configuration ===",
            f"AMP enabled: {settings.amp}",
            f"FP16 enabled: {settings.fp16}",
            f"Learning rate: {settings.lr:g}",
            "=== Accelerate Configuration ===",
            f"Mixed precision: {accelerator.mixed_precision}",
            f"Distributed type: {accelerator.distributed_type.value}",
            f"Devices: {accelerator.num_processes} x {accelerator.device.type}",
            "=== Configuration Status ===",
            f"{verdict}: a matrix product in the model's context gives {real}",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cfg", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args(arguments)
    config = load_config(options.cfg, options.overrides)
    accelerator = Accelerator(mixed_precision=precision(config))
    folder = config.trainer.results_folder
    trainer = Trainer(config, accelerator, run_dir=Path(folder) / "run" if folder else None)
    if config.trainer.resume_milestone:
        trainer.load(config.trainer.resume_milestone)
    if accelerator.is_main_process:
        print(status(trainer))
    began = time.perf_counter()
    trainer.train(bar=accelerator.is_main_process)
    if accelerator.is_main_process:
        print(f"{trainer.step} steps in {time.perf_counter() - began:.0f} s, NMSE of sampled maps {trainer.nmse():.4f}")


if __name__ == "__main__":
    main()
