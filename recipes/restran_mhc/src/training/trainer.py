"""The training loop of the reader, as it was (`original`) and under stepguard (`stable`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.amp import GradScaler
from tqdm import tqdm

from configs.config import Config
from src.data.plates import Plates, spelled
from src.models.probes import NonFiniteForward
from src.models.restran import ResTran, read
from src.training.ctc import ctc_loss
from src.training.files import Files, OneCycle, not_finite, states, use_rate
from stepguard import Guard, GuardConfig, Policy, Probes, TrainingHalted

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class History:
    """What a run leaves behind in memory, one entry a step that was run (steps before a rewind
    included).
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    alphas: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """One run. `guard` is None in the original loop."""

    def __init__(self, config: Config, *, files: Files | None = None) -> None:
        torch.manual_seed(config.SEED)
        torch.backends.cudnn.benchmark = config.USE_CUDNN_BENCHMARK
        self.config, self.files = config, files
        self.model = ResTran(config)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY
        )
        self.total_steps = config.EPOCHS * config.STEPS_PER_EPOCH
        self.scheduler = OneCycle(
            self.optimizer, config.LEARNING_RATE, total_steps=self.total_steps
        )
        self.scaler = GradScaler("cpu", enabled=config.AMP == "fp16")
        self.plates = Plates(config, config.SEED)
        self.history = History()
        self.best = (-1.0, 0.0)
        """Accuracy and negative loss of the best validation."""
        self._steps, self._told = 0, False
        self.guard = self._guarded() if config.GUARD == "stable" else None

    def _guarded(self) -> Guard:
        policy = Policy(actions=("stop",)) if self.config.ON_NAN == "stop" else Policy()
        settings = GuardConfig(
            clip_norm=self.config.GRAD_CLIP,
            run_dir=self.files.folder / "run" if self.files else None,
            policy=policy,
            probes=Probes(anomalies="act"),
        )
        return Guard(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler if self.scaler.is_enabled() else None,
            config=settings,
        )

    @property
    def step(self) -> int:
        """Optimizer steps done; a rewind takes some of them back."""
        return self.guard.steps if self.guard is not None else self._steps

    def resume(self, path: Path, rate: float | None = None) -> str:
        """Go on from a `_last.pth`: model, optimizer, schedule, position. Says whose learning rate
        counts.

        The optimizer's groups carry OneCycleLR's `max_lr`, so loading them brings the old rate back
        whatever the configuration says. `rate` puts another one in its place, at the same point of
        the schedule.
        """
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler.is_enabled() and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.plates.generator.set_state(state["plates"])
        self.best = tuple(state.get("best", self.best))
        brought = float(self.optimizer.param_groups[0]["max_lr"])
        if rate is not None:
            use_rate(self.optimizer, rate)
        if self.guard is None:
            self._steps = state["step"]
        elif self.guard.steps == 0:
            self.guard.port.start_at(state["step"])
        said = f"{path.name}: step {state['step']}, its learning rate is {brought:g} at the peak"
        return said + (f"; {rate:g} is used" if rate is not None and rate != brought else "")

    def train(self, *, bar: bool = True) -> History:
        """Train all epochs that are left; end early when the validation stops improving."""
        stale = 0
        try:
            while self.step < self.total_steps and stale < self.config.EARLY_STOPPING:
                epoch = self.step // self.config.STEPS_PER_EPOCH + 1
                if bar:
                    self.check_parameters(epoch)
                facts = self.one_epoch(epoch, bar=bar)
                stale = 0 if self._keep(facts) else stale + 1
        except KeyboardInterrupt:
            tqdm.write(f"stopped by Ctrl+C; {self.save('last')}")
            raise
        finally:
            self.close()
        return self.history

    def close(self) -> None:
        """Undo the guard's hooks; a second time does nothing."""
        if self.guard is not None:
            self.guard.close()

    def check_parameters(self, epoch: int) -> list[str]:
        """Parameters, buffers and optimizer state before an epoch; the names of those that are not
        finite.
        """
        tqdm.write(f"🔍 Checking model parameters before epoch {epoch}...")
        bad = not_finite(self.model, self.optimizer)
        tqdm.write(
            f"🔴 {len(bad)} tensors are not finite, first {bad[0]}"
            if bad
            else "✅ Model parameters OK"
        )
        return bad

    def one_epoch(self, epoch: int, *, bar: bool) -> dict[str, float]:
        """Its steps, then the validation."""
        config = self.config
        begin, end = (epoch - 1) * config.STEPS_PER_EPOCH, epoch * config.STEPS_PER_EPOCH
        seen = len(self.history.losses)
        with tqdm(
            total=config.STEPS_PER_EPOCH, desc=f"Ep {epoch}/{config.EPOCHS}", disable=not bar
        ) as shown:
            while self.step < end:
                loss = self.one_step(self.plates.draw(config.BATCH_SIZE))
                shown.n = max(0, self.step - begin)  # a rewind takes it back
                shown.set_postfix(loss=f"{loss:.3f}", lr=f"{self.rate:.2e}")
        losses = self.history.losses[seen:]
        accuracy, value = self.validate()
        if self.guard is not None:
            self.guard.follow("val_acc", accuracy)  # stands beside the next step
        mean = sum(losses) / max(1, len(losses))
        facts = {
            "epoch": float(epoch),
            "train_loss": mean,
            "val_loss": value,
            "val_acc": accuracy,
            "lr": self.rate,
        }
        self.history.epochs.append(facts)
        return facts

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def one_step(self, batch: Batch) -> float:
        """Guarded, or as the original has it."""
        self.model.probes.clear()
        loss, norm = (
            self._guarded_step(batch) if self.guard is not None else self._original_step(batch)
        )
        self.history.losses.append(loss)
        self.history.norms.append(norm)
        self.history.alphas.append(self.model.largest_alpha())
        return loss

    def _guarded_step(self, batch: Batch) -> tuple[float, float]:
        assert self.guard is not None
        rate = self.rate
        try:
            result = self.guard.step(self._followed_loss, batch)
        except TrainingHalted as halted:
            seen = [*map(str, self.model.probes.sightings)]
            story = "\n".join([*seen, "   Stopping training to prevent corruption..."])
            if not seen:  # the forward pass was fine: the guard says what was not
                tqdm.write(story)
                raise
            raise NonFiniteForward(f"{story}\n{NonFiniteForward.REASON}") from halted
        if result.incident is not None and not self._told:
            epoch, batch_number = divmod(result.incident.step, self.config.STEPS_PER_EPOCH)
            tqdm.write(f"   epoch {epoch + 1}, batch {batch_number + 1}, lr={rate:.2e}")
            for line in self.model.probes.story():
                tqdm.write(line)
        self._told = result.incident is not None  # a repeated incident is one line of the guard's
        return float(result.loss), math.nan if result.grad_norm is None else float(result.grad_norm)

    def _original_step(self, batch: Batch) -> tuple[float, float]:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.GRAD_CLIP)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._steps += 1
        if self.scaler.get_scale() >= scale:  # else the update was left out
            self.scheduler.step()
        return float(loss.detach()), float(norm)

    def _followed_loss(self, batch: Batch) -> Tensor:
        """The loss; every gate, the largest of them and the largest routing score go into the
        journal beside it.
        """
        assert self.guard is not None
        loss = self.loss(batch)
        for name, gate in self.model.gates().items():
            self.guard.follow(name, gate)
        self.guard.follow("alpha", self.model.largest_alpha())
        self.guard.follow("routing", self.model.probes.largest())
        return loss

    def loss(self, batch: Batch) -> Tensor:
        """CTC over the plates of a batch."""
        return self._ctc(self._forward(batch[0]), batch[1])

    def _forward(self, frames: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.scaler.is_enabled()):
            log_probabilities: Tensor = self.model(frames)
        return log_probabilities

    def _ctc(self, log_probabilities: Tensor, texts: Tensor) -> Tensor:
        number, times = log_probabilities.shape[:2]
        lengths = torch.full((number,), times), torch.full((number,), texts.shape[1])
        return ctc_loss(log_probabilities.transpose(0, 1), texts + 1, *lengths)

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Share of plates read right, and the loss, on plates never trained on."""
        frames, texts = Plates(self.config, seed=99).draw(self.config.VALIDATION_PLATES)
        self.model.eval()
        log_probabilities = self._forward(frames)
        self.model.train()
        found = read(log_probabilities)
        right = sum(a == b for a, b in zip(found, spelled(texts), strict=True))
        return right / len(found), float(self._ctc(log_probabilities, texts))

    def _keep(self, facts: dict[str, float]) -> bool:
        """Save; returns whether this is the best validation so far, by its loss where no plate more
        is read.
        """
        if self.files is not None:
            self.files.history(self.history.epochs)
        score = (facts["val_acc"], -facts["val_loss"])
        better = score > self.best
        if better:
            self.best = score
            self.save("best")
        self.save("last")
        return better

    def save(self, name: str) -> str:
        """Guarded, only a state that is finite. Returns what to say."""
        if self.files is None:
            return "nothing is saved"
        if self.guard is not None and (bad := not_finite(self.model, self.optimizer)):
            return f"{name} NOT saved: {bad[0]} is not finite; the one before it stays"
        state = self.model.state_dict() if name == "best" else states(self)
        return f"saved {self.files.write(name, state)}"
