"""`stepguard selftest`: what stepguard promises, tried on one device in about a minute.

Everything here was developed on CPUs. This is how somebody with another device finds out whether
the promises hold there, and sends a table instead of an impression.
"""

from __future__ import annotations

import math
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stepguard
from stepguard import Guard, GuardConfig, Policy, Probes, Snapshots
from stepguard._errors import ConfigError

STEPS = 40
ROUNDS = 60
Batch = dict[str, Tensor]
Row = tuple[bool | None, str]
"""True: holds. False: does not. None: cannot be tried on this device. And a sentence."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, tried on the device."""

    name: str
    holds: bool | None
    """None where it cannot be tried here."""
    detail: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Every promise that was tried, and the machine."""

    device: str
    name: str
    torch: str
    stepguard: str
    platform: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Nothing that could be tried failed."""
        return all(check.holds is not False for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


class Net(nn.Module):
    """Batch norm, dropout and a logarithm that a bad sample breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.inner(x)))
        out: Tensor = self.outer(hidden * torch.log(scale)[:, None])
        return out


class Training:
    """A small training on the device, from a fixed seed."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, **options)

    def loss_fn(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch["x"], batch["scale"]), batch["y"])

    def unguarded_step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss_fn(batch))
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        """Everything that training changes, on the host."""
        found = [tensor.cpu().clone() for tensor in self.net.state_dict().values()]
        for slots in self.optimizer.state.values():
            found += [slot.cpu().clone() for slot in slots.values()]
        return found

    def batches(self, count: int = STEPS, bad: int | None = None) -> list[Batch]:
        """Return `count` fixed batches; sample 4 of batch `bad` makes log(0)."""
        source = torch.Generator().manual_seed(1)
        made = []
        for number in range(count):
            scale = torch.rand(6, generator=source) + 1.5
            if number == bad:
                scale[4] = 0.0
            batch = {
                "x": torch.randn(6, 4, generator=source),
                "scale": scale,
                "y": torch.randint(3, (6,), generator=source),
            }
            made.append({key: value.to(self.device) for key, value in batch.items()})
        return made


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Are these the same bits?"""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def healthy(device: torch.device, **options: Any) -> Row:
    """Unguarded, unguarded again, `guard.step` and `watch` from one seed."""
    ends = []
    for _ in range(2):
        training = Training(device, **options)
        for batch in training.batches():
            training.unguarded_step(batch)
        ends.append(training.state())
    if not same(*ends):
        return None, "two unguarded runs differ on this device: nothing to compare with"
    with_step = Training(device, **options)
    config = GuardConfig(clip_norm=1.0, terminal="quiet")
    with Guard(with_step.net, with_step.optimizer, config=config) as guard:
        for batch in with_step.batches():
            guard.step(with_step.loss_fn, batch)
    watched = Training(device, **options)
    with stepguard.watch(watched.net, watched.optimizer, config=GuardConfig(terminal="quiet")):
        for batch in watched.batches():
            watched.unguarded_step(batch)
    found = [
        name
        for name, training in (("guard.step", with_step), ("watch", watched))
        if not same(ends[0], training.state())
    ]
    if found:
        return False, f"{' and '.join(found)} changed the result"
    return True, f"{STEPS} steps of guard.step and watch end with the same bits"


def fused(device: torch.device) -> Row:
    """Healthy run with a fused optimizer, which takes the verdict on the device."""
    try:
        Training(device, fused=True).unguarded_step(Training(device).batches(1)[0])
    except (RuntimeError, TypeError) as error:
        return None, f"no fused AdamW here ({str(error).splitlines()[0]})"
    return healthy(device, fused=True)


def vetoed(device: torch.device) -> Row:
    """A bad sample: nothing moves, and operation, sample and cause are named."""
    training = Training(device)
    data = training.batches(6, bad=4)
    config = GuardConfig(policy=Policy(actions=("skip", "stop")), terminal="quiet")
    with Guard(training.net, training.optimizer, config=config) as guard:
        for batch in data[:4]:
            guard.step(training.loss_fn, batch)
        before = training.state()
        guard.step(training.loss_fn, data[4])
        unchanged = same(before, training.state())
        guard.step(training.loss_fn, data[5])
        incident = guard.incidents[0]
    origin = incident.origin
    code = incident.findings[0].code if incident.findings else "no cause"
    named = origin is not None and (origin.op, origin.samples, code) == ("aten.log", (4,), "SG202")
    if not unchanged:
        return False, "a vetoed step changed weights, buffers or optimizer"
    if not named or origin is None:
        return False, f"located {origin.op if origin else 'nothing'}, {code}; not log of sample 4"
    return True, f"nothing moved; {origin.op}, sample 4, {code}"


def restored(device: torch.device) -> Row:
    """Sealed on the device, verified, and restored into other objects."""
    first, second = Training(device), Training(device)
    data = first.batches(20)
    with tempfile.TemporaryDirectory() as folder:
        config = GuardConfig(run_dir=Path(folder), terminal="quiet")
        with Guard(first.net, first.optimizer, config=config) as guard:
            for batch in data[:10]:
                guard.step(first.loss_fn, batch)
            saved = guard.save()
            for batch in data[10:]:
                guard.step(first.loss_fn, batch)
        if saved is None or not stepguard.verify(saved).ok:
            return False, "the checkpoint is not good"
        with Guard(second.net, second.optimizer, config=config) as guard:
            done = guard.restore()
            for batch in data[10:]:
                guard.step(second.loss_fn, batch)
    if done != 10 or not same(first.state(), second.state()):
        return False, "the restored run ends differently"
    return True, "saved, verified, restored: the same bits ten steps later"


def rewound(device: torch.device) -> Row:
    """A weight that turns NaN between two steps: as if it had never happened."""
    ends, actions = [], []
    for damage in (False, True):
        training = Training(device)
        config = GuardConfig(snapshots=Snapshots(every=4, probation=4), terminal="quiet")
        with Guard(training.net, training.optimizer, config=config) as guard:
            for number, batch in enumerate(training.batches()):
                if damage and number == 30:
                    with torch.no_grad():
                        training.net.outer.weight[0, 0] = math.nan
                guard.step(training.loss_fn, batch)
            actions += [i.decision.action for i in guard.incidents if i.decision is not None]
        ends.append(training.state())
    if actions != ["rewind"] or not same(*ends):
        return False, f"ended differently; done: {', '.join(actions) or 'nothing'}"
    return True, "a NaN in a weight is rewound: the same bits as without it"


def syncs(device: torch.device) -> Row:
    """How often a healthy step waits for the device, by CUDA's own count."""
    if device.type != "cuda":
        return None, "only CUDA counts its synchronisations"
    training = Training(device)
    data = training.batches()
    config = GuardConfig(clip_norm=1.0, probes=Probes(look_every=None), terminal="quiet")
    counts = []
    with Guard(training.net, training.optimizer, config=config) as guard:
        for batch in data:
            with warnings.catch_warnings(record=True) as seen, _sync_warnings():
                warnings.simplefilter("always")
                guard.step(training.loss_fn, batch)
            counts.append(sum("synchroniz" in str(one.message) for one in seen))
    most = max(counts[10:])
    return most <= 1, f"at most {most} synchronisations in a step; the promise is 1"


@contextmanager
def _sync_warnings() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def streams(device: torch.device) -> Row:
    """A training on a stream of its own, with a bad step in it."""
    if device.type != "cuda":
        return None, "no streams on this device"
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        holds, detail = vetoed(device)
    torch.cuda.synchronize(device)
    return holds, detail


def scaler(device: torch.device) -> Row:
    """Autocast to float16 with a GradScaler: calibration is no incident, a NaN is."""
    if device.type not in ("cuda", "cpu"):
        return None, "GradScaler is tried on cpu and cuda"
    training = Training(device)
    scaling = torch.amp.GradScaler(device.type, init_scale=2.0**40)

    def loss_fn(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.float16):
            return training.loss_fn(batch)

    config = GuardConfig(terminal="quiet")
    with Guard(training.net, training.optimizer, scaler=scaling, config=config) as guard:
        for batch in training.batches(bad=35):
            guard.step(loss_fn, batch)
        steps = [incident.step for incident in guard.incidents]
    return steps == [35], f"incidents at {steps or 'no step'}; expected at [35]"


def overhead(device: torch.device) -> Row:
    """What the guard adds to a step, interleaved with the unguarded step."""
    wait: Callable[[], None] = lambda: None  # noqa: E731
    if device.type == "cuda":
        wait = lambda: torch.cuda.synchronize(device)  # noqa: E731
    plain, guarded, watched = (Training(device) for _ in range(3))
    batch = plain.batches(1)[0]
    config = GuardConfig(clip_norm=1.0, terminal="quiet")
    own = GuardConfig(terminal="quiet")
    took: dict[str, list[float]] = {"unguarded": [], "guard.step": [], "watch": []}
    with (
        Guard(guarded.net, guarded.optimizer, config=config) as guard,
        stepguard.watch(watched.net, watched.optimizer, config=own),
    ):
        steps: dict[str, Callable[[], Any]] = {
            "unguarded": lambda: plain.unguarded_step(batch),
            "guard.step": lambda: guard.step(guarded.loss_fn, batch),
            "watch": lambda: watched.unguarded_step(batch),
        }
        for number in range(2 * ROUNDS):
            for name, step in steps.items():
                wait()
                begun = time.perf_counter()
                step()
                wait()
                if number >= ROUNDS:
                    took[name].append(time.perf_counter() - begun)
    plain_ms = 1e3 * statistics.median(took["unguarded"])
    parts = [f"unguarded {plain_ms:.3g} ms a step"]
    for name in ("guard.step", "watch"):
        # beside the unguarded step of the same round, so that a busy machine slows both
        pairs = zip(took[name], took["unguarded"], strict=True)
        low, middle, high = statistics.quantiles([1e3 * (one - other) for one, other in pairs])
        parts.append(f"{name} {middle:+.3g} ms (half of the rounds {low:+.3g} to {high:+.3g})")
    return True, "; ".join(parts)


CHECKS: dict[str, Callable[[torch.device], Row]] = {
    "healthy run unchanged": healthy,
    "the same, fused optimizer": fused,
    "bad step vetoed and located": vetoed,
    "checkpoint restored": restored,
    "damaged weight rewound": rewound,
    "float16 with GradScaler": scaler,
    "a stream of its own": streams,
    "synchronisations": syncs,
    "cost": overhead,
}


def selftest(device: str, progress: Callable[[str], None] = lambda _: None) -> SelfTest:
    """Try every promise on `device`. Random states and determinism are put back."""
    try:
        where = torch.device(device)
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    checks = []
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    forked = [where] if where.type == "cuda" else []
    with torch.random.fork_rng(forked) if where.type in ("cpu", "cuda") else nullcontext():
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            for name, check in CHECKS.items():
                progress(name)
                checks.append(Check(name, *_tried(check, where)))
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    label = torch.cuda.get_device_name(where) if where.type == "cuda" else ""
    return SelfTest(
        device=str(where),
        name=label or platform.machine(),
        torch=torch.__version__,
        stepguard=stepguard.__version__,
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        checks=tuple(checks),
    )


def _tried(check: Callable[[torch.device], Row], device: torch.device) -> Row:
    """A check that raises has failed; the rest is still worth knowing."""
    try:
        return check(device)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
