"""Numbers that modules count with are state once they have moved."""

from __future__ import annotations

from torch import nn

from stepguard.state.python_state import ModuleCounters


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.limit = 10
        self.flag = True
        self.inner = nn.BatchNorm1d(2)


def test_only_numbers_that_moved_are_state() -> None:
    model = Counting()
    counters = ModuleCounters({"model/": model})
    assert counters.moved() == {}
    model.calls += 2
    model.flag = False
    model.inner.eps = 0.5
    assert counters.moved() == {"model/:calls": 2}


def test_numbers_go_back_and_later_ones_to_their_first_value() -> None:
    model = Counting()
    counters = ModuleCounters({"model/": model})
    model.calls = 2
    saved = counters.moved()
    model.calls = 5
    model.limit = 20
    counters.put_back(saved)
    assert (model.calls, model.limit) == (2, 10)


def test_modules_that_are_left_out_keep_their_numbers() -> None:
    model = nn.Sequential(Counting())
    counters = ModuleCounters({"model/": model})
    model[0].calls = 7
    counters.put_back({}, {"model/": {"0"}})
    assert model[0].calls == 7
    counters.put_back({})
    assert model[0].calls == 0
