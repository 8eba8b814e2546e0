"""Tracing beside what else is active: other dispatch modes, closures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stepguard
from engine.watch.test_live_tracing_locate import Net, Watched, _modes, log_loss
from stepguard import GuardConfig
from stepguard.journal import read_run


def test_a_dispatch_mode_of_the_users_own_survives_ours() -> None:
    class Theirs(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Theirs.seen += 1
            return func(*args, **(kwargs or {}))

    theirs = Theirs()

    def during(step: int, model: nn.Module) -> None:
        if step == 3:
            assert _modes()
            theirs.__enter__()  # type: ignore[no-untyped-call]

    try:
        Watched(loss=log_loss, bad=(1,), steps=6, during=during).run()
        assert _modes() == [theirs]
    finally:
        theirs.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    assert Theirs.seen > 0


def test_a_closure_optimizer_is_not_traced_and_says_so(tmp_path: Path) -> None:
    config = GuardConfig(terminal="quiet", run_dir=tmp_path)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with stepguard.watch(model, optimizer, config=config) as guard:
        for _ in range(2):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = log_loss(
                    model(torch.randn(6, 4), torch.ones(6)),
                    torch.zeros(6, dtype=torch.long),
                    -torch.ones(6),
                )
                loss.backward()
                return loss

            optimizer.step(closure)
            assert not _modes()
    assert len(guard.incidents) == 2
    assert any(
        "several times a step" in str(note.get("summary")) for note in read_run(tmp_path).notes
    )
