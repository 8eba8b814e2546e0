"""A loop that leaves its schedule alone when the scaler skips, and vetoes among such skips."""

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import quiet
from stepguard import Guard, GuardConfig, Incident, watch

QUIET = GuardConfig(terminal="quiet")
SCALE = 256.0


def _loss(model: nn.Linear, kind: str) -> Tensor:
    if kind == "overflow":  # finite as it is; only the scale makes its gradient infinite
        return torch.sin(model.weight * 1e37).sum()
    rows = torch.full((4, 4), float("nan") if kind == "nan" else 1.0)
    return model(rows).sum()


def _schedule_after(kinds: list[str], *, fused: bool) -> tuple[int, float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    with stepguard.watch(model, optimizer, scaler=scaler, scheduler=scheduler, config=QUIET):
        for kind in kinds:
            optimizer.zero_grad()
            scaler.scale(_loss(model, kind)).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
    return scheduler.last_epoch, scaler.get_scale()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["good", "good", "overflow", "nan", "good", "good"],
        ["good", "overflow", "nan", "overflow", "good", "good"],
        ["overflow", "nan", "good", "good"],
        ["good", "nan", "overflow", "nan", "good"],
    ],
    ids=" ".join,
)
def test_schedule_counts_updates_only(kinds: list[str], fused: bool) -> None:
    moved, scale = _schedule_after(kinds, fused=fused)
    assert moved == kinds.count("good")
    assert scale == SCALE / 2 ** kinds.count("overflow")


def _calibrated(
    mode: str, *, clip: float | None = None, nan_at: int = -1, fused: bool = False
) -> tuple[list[Tensor], tuple[Incident, ...]]:
    """Train with a scaler that starts at 2**127: its first scaled losses are infinite.

    Returns the gradients that every step left, the final weights and the scale.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def loss_fn(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x) * 50, x[:, :3].nan_to_num().argmax(1))

    guard = None
    if mode == "step":
        guard = Guard(model, optimizer, scaler=scaler, config=quiet(clip_norm=clip))
    elif mode != "unguarded":
        handed = {"scaler": scaler} if mode == "watch" else {}
        guard = watch(model, optimizer, config=quiet(), **handed)
    seen: list[Tensor] = []
    for index in range(12):
        x = torch.randn(16, 6)
        if index == nan_at:
            x[2, 2] = float("nan")
        if guard is not None and mode == "step":
            guard.step(loss_fn, x)
        else:
            optimizer.zero_grad()
            scaler.scale(loss_fn(x)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if guard is not None:
        guard.close()
    assert scaler.get_scale() < 2.0**127
    seen += [*(p.detach() for p in model.parameters()), torch.tensor(scaler.get_scale())]
    return seen, guard.incidents if guard is not None else ()


@pytest.mark.parametrize(
    ("mode", "clip"), [("step", None), ("step", 1.0), ("watch", None), ("watch-alone", None)]
)
def test_scaler_calibrates_whatever_its_start_and_leaves_the_gradients_of_a_bare_loop(
    mode: str, clip: float | None
) -> None:
    bare, _ = _calibrated("unguarded", clip=clip)
    guarded, incidents = _calibrated(mode, clip=clip)
    assert incidents == ()
    assert len(bare) == len(guarded)
    for theirs, ours in zip(bare, guarded, strict=True):
        assert torch.allclose(theirs, ours, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("mode", "clip"), [("step", None), ("step", 1.0), ("watch", None), ("watch-alone", None)]
)
def test_scaler_of_a_fused_optimizer_calibrates_and_leaves_the_gradients_of_a_bare_loop(
    mode: str, clip: float | None
) -> None:
    bare, _ = _calibrated("unguarded", clip=clip, fused=True)
    guarded, incidents = _calibrated(mode, clip=clip, fused=True)
    assert incidents == ()
    for theirs, ours in zip(bare, guarded, strict=True):
        assert torch.allclose(theirs, ours, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("mode", "fused"), [("step", False), ("step", True), ("watch", False), ("watch-alone", False)]
)
def test_nan_under_a_scaler_that_is_calibrating_is_found(mode: str, fused: bool) -> None:
    _, incidents = _calibrated(mode, nan_at=2, fused=fused)
    assert [(i.step, i.verdict.kind) for i in incidents] == [(2, "nonfinite_input")]
