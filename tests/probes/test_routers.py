"""SG930: which modules are taken for routers, what is counted of them, and what is not a router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stepguard
from stepguard import GuardConfig, Probes
from stepguard.diagnose.engine import silent_findings
from stepguard.journal import read_run
from stepguard.records import Reading
from stepguard.records.probes import Look, RouterLook

WIDTH, EXPERTS = 8, 4


class Net(nn.Module):
    """Experts in a list or in one tensor, and a gate that is a layer or a module around one."""

    def __init__(self, choose: Callable[[Tensor], Tensor], fused: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.choose, self.dtype = nn.Linear(WIDTH, EXPERTS), choose, dtype
        if fused:
            self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        else:
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not torch.float32):
            scores = self.gate(x)
        chosen = self.choose(scores.float().softmax(-1))
        if isinstance(self.experts, nn.ModuleList):
            made = torch.stack([expert(x) for expert in self.experts], 1)
        else:
            made = torch.einsum("tw,ewv->tev", x, self.experts)
        return x + made[torch.arange(len(x)), chosen] + scores.float().mean()


def routers(folder: Path, net: nn.Module) -> list[RouterLook]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=1), terminal="quiet")
    torch.manual_seed(1)
    with stepguard.watch(net, optimizer, config=config) as guard:
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(64, WIDTH)).square().mean().backward()
            optimizer.step()
        assert guard.armed
    return [one for look in read_run(folder).looks for one in look.routers]


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda shares: shares.topk(2, -1).indices[:, 0],
    "max": lambda shares: shares.max(-1).indices,
    "argmax": lambda shares: shares.argmax(-1),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_is_recognised_and_counted(
    choice: str, fused: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    found = routers(tmp_path, Net(CHOICES[choice], fused, dtype))
    assert len(found) == 2
    for one in found:
        assert (one.module, one.experts, one.tokens) == ("", EXPERTS, 64)
        assert one.chosen == (2 if choice == "topk" else 1)
        assert sum(one.loads) == pytest.approx(1.0)
        assert one.dtype == str(dtype).removeprefix("torch.")
        assert one.ties < 0.2


def test_choices_over_something_else_are_no_routers(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x * (x.argmax(-1, keepdim=True) + 1)

    torch.manual_seed(0)
    assert routers(tmp_path, Heads()) == []


def told(**more: object) -> bool:
    """Is a router with these figures reported, over probes of a hundred steps?"""
    loads = (0.5, 0.5, 0.0, 0.0)
    fields = {"experts": EXPERTS, "chosen": 1, "tokens": 256, "loads": loads, **more}
    row = RouterLook(module="moe", **fields)  # type: ignore[arg-type]
    looks = [Look(step=step, routers=(row,)) for step in range(0, 100, 20)]
    return bool(silent_findings(looks, [Reading(step=100, loss=1.0)]))


def test_limits_of_what_is_told() -> None:
    assert told()
    assert not told(loads=(0.4, 0.4, 0.19, 0.01))  # one that is hardly used
    assert not told(tokens=32)  # too few to say
    assert told(loads=(0.25,) * 4, ties=0.3, dtype="bfloat16")
    assert not told(loads=(0.25,) * 4, ties=0.1, dtype="bfloat16")
    assert not told(loads=(0.25,) * 4, ties=0.3, dtype="float32")
