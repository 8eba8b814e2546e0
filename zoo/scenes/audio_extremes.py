"""Sound: the phase of near silence, an impossible sample, an energy in 16-bit integers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import randn, tokens, uniform


class Enhancer(nn.Module):
    """Scales every bin of a noisy spectrogram."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.mask = nn.Sequential(
            nn.Conv1d(9, 12, 3, padding=1), nn.PReLU(), nn.Conv1d(12, 9, 3, padding=1), nn.Sigmoid()
        )

    def spectrum(self, wave: Tensor) -> Tensor:
        return torch.stft(wave, 16, 8, window=self.window, return_complex=True)

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = self.spectrum(wave)
        keep = self.mask(spectrum.abs().log1p())
        return torch.complex(spectrum.real * keep, spectrum.imag * keep)


class MagnitudeLoss(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.l1_loss(a.abs(), b.abs())


class PhaseLoss(nn.Module):
    """One minus the cosine between two phases; `safe` moves the real part off 0."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.safe = safe

    def phase(self, z: Tensor) -> Tensor:
        return torch.atan2(z.imag, z.real + 1e-5) if self.safe else torch.angle(z)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (1 - torch.cos(self.phase(a) - self.phase(b))).mean()


class SpectralLoss(nn.Module):
    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.magnitude, self.phase = MagnitudeLoss(), PhaseLoss(safe=safe)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        total: Tensor = self.magnitude(a, b) + 0.3 * self.phase(a, b)
        return total


@incident(
    "pytorch/pytorch#98276",
    "csteinmetz1/auraloss#49",
    "yxlu-0102/MP-SENet#16",
    expected=Expected(
        step=1,
        phase="backward",
        module="criterion.phase",
        op="aten.div",
        node="AngleBackward0",
        event="nan",
        sample=0,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def phase_loss_of_near_silence(fixed: bool) -> Scene:
    """A clip faded to 1e-22: |z|^2 is 0 in float32, and the slope of the phase divides by it."""
    torch.manual_seed(0)
    model, criterion = Enhancer(), SpectralLoss(safe=fixed)

    def batch(step: int) -> Batch:
        clean = randn(3, 64, seed=step)
        noisy = clean + 0.3 * randn(3, 64, seed=step + 50)
        if step == 1:
            clean[0] *= 1e-22
            noisy[0] *= 1e-22
        return {"noisy": noisy, "clean": clean}

    return Scene(
        model=model,
        criterion=criterion,
        batch=batch,
        loss=lambda _, b: criterion(model(b["noisy"]), model.spectrum(b["clean"])),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        clip=5.0,
    )


class LogPower(nn.Module):
    """A filter bank over the power spectrum."""

    bank: Tensor

    def __init__(self, *, limit: float | None) -> None:
        super().__init__()
        self.register_buffer("bank", uniform(17, 6, seed=3))
        self.limit = limit

    def forward(self, wave: Tensor) -> Tensor:
        wave = wave if self.limit is None else wave.clamp(-self.limit, self.limit)
        power = torch.fft.rfft(wave, dim=-1).abs().pow(2)
        return torch.log(power @ self.bank + 1e-5)


class Speaker(nn.Module):
    def __init__(self, *, limit: float | None) -> None:
        super().__init__()
        self.frontend = LogPower(limit=limit)
        self.encode = nn.Sequential(nn.Linear(6, 12), nn.SiLU())
        self.head = nn.Linear(12, 3)

    def forward(self, wave: Tensor) -> Tensor:
        frames = wave.view(len(wave), -1, 32)
        scores: Tensor = self.head(self.encode(self.frontend(frames)).mean(1))
        return scores


@incident(
    "Plachtaa/seed-vc#108",
    expected=Expected(
        step=3, phase="forward", module="frontend", op="aten.pow", event="inf", sample=1
    ),
    accepted=("SG103",),
)
def wav_with_1e29_sample(fixed: bool) -> Scene:
    """A badly cut file holds one sample of 1e29: finite, but its power is not."""
    torch.manual_seed(0)
    model = Speaker(limit=1.0 if fixed else None)

    def batch(step: int) -> Batch:
        wave = randn(4, 96, seed=step).clamp(-3, 3) * 0.3
        if step == 3:
            wave[1, 40] = 1e29
        return {"wave": wave, "y": torch.tensor([0, 1, 2, 0])}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["wave"]), b["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        steps=4,
    )


class FrameEnergy(nn.Module):
    """Root mean square of overlapping frames; `wide` squares in float32 instead of the dtype of the
    file.
    """

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, pcm: Tensor) -> Tensor:
        frames = (pcm.float() if self.wide else pcm).unfold(1, 16, 8)
        return torch.sqrt((frames * frames).sum(-1) / 16) / 1000


class Loudness(nn.Module):
    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.front, self.rnn = FrameEnergy(wide=wide), nn.LSTM(1, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, pcm: Tensor) -> Tensor:
        states, _ = self.rnn(self.front(pcm)[..., None])
        scores: Tensor = self.head(states[:, -1])
        return scores


@incident(
    "librosa/librosa#1656",
    "tyiannak/pyAudioAnalysis#194",
    expected=Expected(
        step=2, phase="forward", module="front", op="aten.sqrt", event="nan", sample=1
    ),
    accepted=("SG207",),
)
def int16_energy_wraps_around(fixed: bool) -> Scene:
    """The square of a loud sample wraps around in int16, so the mean energy is negative and its
    root NaN.
    """
    torch.manual_seed(0)
    model = Loudness(wide=fixed)

    def batch(step: int) -> Batch:
        pcm = tokens(4, 64, seed=step, low=-100, high=101)
        if step == 2:
            pcm[1] = 200 * (2 * tokens(64, seed=9, high=2) - 1)
        return {"pcm": pcm.to(torch.int16), "y": tokens(4, seed=step, high=4)}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["pcm"]), b["y"]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=3,
    )
