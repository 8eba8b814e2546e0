"""A signal ends the step, saves a good state, and then has its usual effect."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import stepguard
from scenes import NAN, Scene, batches, plain_net, plain_step, quiet
from stepguard import Guard
from stepguard.engine.recover import signals
from stepguard.engine.recover.signals import StuckProcess
from stepguard.journal import read_run

DATA = batches(12)
SOURCE = Path(stepguard.__file__).parents[1]
pytestmark = pytest.mark.usefixtures("interruptible")


def scene() -> Scene:
    model = plain_net()
    return Scene(model, torch.optim.SGD(model.parameters(), 0.05))


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.parametrize("loop", ["step", "watch"])
def test_signal_saves_between_two_steps_and_then_has_its_effect(
    loop: str, number: int, kind: type[BaseException], tmp_path: Path
) -> None:
    at = scene()
    make: Any = Guard if loop == "step" else stepguard.watch
    with (
        make(at.model, at.optimizer, config=quiet(run_dir=tmp_path)) as guard,
        pytest.raises(kind) as raised,
    ):
        for index, batch in enumerate(DATA):
            if index == 3:
                send(number)
            if loop == "step":
                guard.step(at.loss_fn, batch)
            else:
                plain_step(at, (batch,))
    assert kind is KeyboardInterrupt or raised.value.code == 143  # type: ignore[attr-defined]
    assert saved(tmp_path) == ["step-3"]
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    assert read_run(tmp_path).notes[-1]["type"] == "end"


def test_signal_inside_a_step_lets_the_step_end(tmp_path: Path) -> None:
    at = scene()
    inner, at.loss = at.loss_fn, None
    sent: list[int] = []

    def loss(batch: Any) -> Any:
        if len(sent) == 2:
            send(signal.SIGTERM)
        sent.append(1)
        return inner(batch)

    with (
        Guard(at.model, at.optimizer, config=quiet(run_dir=tmp_path)) as guard,
        pytest.raises(SystemExit),
    ):
        for batch in DATA:
            result = guard.step(loss, batch)
    assert result.committed and saved(tmp_path) == ["step-3"]


def test_signal_in_the_last_step_is_answered_when_the_guard_closes(tmp_path: Path) -> None:
    at = scene()
    with (
        pytest.raises(KeyboardInterrupt),
        Guard(at.model, at.optimizer, config=quiet(run_dir=tmp_path)) as guard,
    ):
        for batch in DATA[:4]:
            guard.step(at.loss_fn, batch)
        send(signal.SIGINT)
    assert saved(tmp_path) == ["step-4"]


def test_second_signal_has_its_effect_at_once(tmp_path: Path) -> None:
    at = scene()
    with Guard(at.model, at.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        guard.step(at.loss_fn, DATA[0])
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        guard._signals.waiting = None


def test_state_that_is_not_good_is_not_saved_but_the_last_good_snapshot_is(tmp_path: Path) -> None:
    at = scene()
    settings = quiet(run_dir=tmp_path, snapshot_every=2, probation=2)
    with Guard(at.model, at.optimizer, config=settings) as guard, pytest.raises(SystemExit):
        for index, batch in enumerate(DATA):
            if index == 8:
                with torch.no_grad():
                    at.model[0].weight[0, 0] = NAN
                send(signal.SIGTERM)
            guard.step(at.loss_fn, batch)
    assert saved(tmp_path) in (["step-4"], ["step-6"])
    fresh = scene()
    with Guard(fresh.model, fresh.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        guard.restore()
    assert all(torch.isfinite(p).all() for p in fresh.model.parameters())


def test_handler_of_the_user_is_called_afterwards(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        at = scene()
        with Guard(at.model, at.optimizer, config=quiet(run_dir=tmp_path)) as guard:
            guard.step(at.loss_fn, DATA[0])
            send(signal.SIGTERM)
            assert heard == []
        assert heard == [signal.SIGTERM] and saved(tmp_path) == ["step-1"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("why", ["no folder", "off", "thread"])
def test_signals_are_left_alone(why: str, tmp_path: Path) -> None:
    at, found = scene(), []
    settings = quiet(
        run_dir=None if why == "no folder" else tmp_path,
        on_signal="off" if why == "off" else "save",
    )

    def look() -> None:
        with Guard(at.model, at.optimizer, config=settings):
            found.append(signal.getsignal(signal.SIGTERM))

    if why == "thread":
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    else:
        look()
    assert found == [signal.SIG_DFL]


def test_two_guards_both_save_before_the_effect(tmp_path: Path) -> None:
    first, second = scene(), scene()
    one = Guard(first.model, first.optimizer, config=quiet(run_dir=tmp_path / "one"))
    two = Guard(second.model, second.optimizer, config=quiet(run_dir=tmp_path / "two"))
    with one, two, pytest.raises(SystemExit):
        for index, batch in enumerate(DATA):
            if index == 2:
                send(signal.SIGTERM)
            one.step(first.loss_fn, batch)
            two.step(second.loss_fn, batch)
    assert saved(tmp_path / "one") == ["step-2"] and saved(tmp_path / "two") == ["step-2"]


def test_process_ends_with_143_and_can_be_resumed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys, torch, stepguard
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        config = stepguard.GuardConfig(run_dir=sys.argv[1], terminal="quiet")
        guard = stepguard.Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config)
        for index in range(100):
            if index == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            guard.step(lambda batch: model(batch).square().mean(), torch.ones(4, 2))
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    ended = forked.python(["-c", script, str(tmp_path)], variables=environment)
    assert ended.returncode == 143 and saved(tmp_path) == ["step-5"]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    at = scene()
    try:
        with Guard(at.model, at.optimizer, config=quiet(run_dir=tmp_path)) as guard:
            for batch in DATA[:3]:
                send(signal.SIGINT)
                guard.step(at.loss_fn, batch)
        assert saved(tmp_path) == []
    finally:
        signal.signal(signal.SIGINT, before)


# --- a watch over signals leaves nothing behind (tests/distributed has one that really waits)


GRACE = 30.0


def wakeup_file() -> int:
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current, warn_on_full_buffer=False)
    return current


def test_file_of_an_event_loop_stays_its_own() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    try:
        watch = StuckProcess(lambda number: True, GRACE)
        assert wakeup_file() == writes
        watch.close()
        assert wakeup_file() == writes
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize("why", ["acted", "harmless"])
def test_process_that_acts_or_would_go_on_is_not_ended(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    asked = threading.Event()
    monkeypatch.setattr(signals, "_die_of", ended.append)

    def ends(number: int) -> bool:
        asked.set()
        return why == "acted"

    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    watch = StuckProcess(ends, GRACE)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.wait(20)
        watch.acted()
    finally:
        watch.close()
        signal.signal(signal.SIGUSR1, before)
    assert ended == []
