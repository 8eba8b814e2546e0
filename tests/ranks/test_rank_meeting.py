"""Two ranks as two threads over one real store; real processes are in tests/distributed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from stepguard.ranks import agreement
from stepguard.ranks.agreement import Meeting, RankAbsent


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    shared = dist.HashStore()
    monkeypatch.setattr(agreement, "default_store", lambda: shared)
    return shared


def pair(seconds: float) -> list[Meeting]:
    return [Meeting("stepguard/0-1/0", (4, 6), own, seconds) for own in (4, 6)]


def both_come(meetings: list[Meeting], what: str, step: int) -> list[BaseException | None]:
    """What each rank heard; None for go."""
    with ThreadPoolExecutor(2) as threads:
        coming = [threads.submit(meeting.all_came, what, step) for meeting in meetings]
    return [one.exception() for one in coming]


def test_ranks_that_all_come_go_on_every_time_and_leave_little_behind(
    store: dist.HashStore,
) -> None:
    meetings = pair(20.0)
    for step in (0, 0, 1, 0):
        assert both_come(meetings, "the reading", step) == [None, None]
    assert store.num_keys() <= 4


def test_rank_that_waits_in_vain_names_the_missing_one_and_a_late_one_hears_the_same() -> None:
    first, second = pair(0.05)
    with pytest.raises(RankAbsent, match=r"rank 6 did not come within 0.05 s .* step 3"):
        first.all_came("the save", 3)
    with pytest.raises(RankAbsent, match=r"rank 6 did not come"):
        second.all_came("the save", 3)


def test_call_of_one_rank_does_not_shift_what_follows() -> None:
    first, _ = pair(0.05)
    with pytest.raises(RankAbsent):
        first.all_came("the save", 3)
    assert both_come(pair(20.0), "the save", 4) == [None, None]


def test_nobody_waits_for_a_rank_that_has_left() -> None:
    first, second = pair(600.0)
    second.leave("has closed its guard", for_good=True)
    with pytest.raises(RankAbsent, match=r"rank 6 has closed its guard, so it did not come"):
        first.all_came("the reading", 1)
    with pytest.raises(RankAbsent, match=r"rank 6 has closed its guard before step 2"):
        first.refuse_if_closed(2)


def test_guard_of_one_rank_only_leaves_nothing_behind(store: dist.HashStore) -> None:
    first, _ = pair(0.05)
    with pytest.raises(RankAbsent, match=r"rank 6 did not come"):
        first.all_came("the reading", 3)
    first.nobody_came("the reading", 3)
    first.leave("has closed its guard", for_good=True)
    assert both_come(pair(20.0), "the reading", 3) == [None, None]


def test_nobody_waits_at_a_meeting_that_a_rank_has_called_off() -> None:
    meetings = pair(600.0)
    first, second = meetings
    second.call_off("the origin", 3, 1, "OSError: full")
    with pytest.raises(RankAbsent, match=r"rank 6 has failed \(OSError: full\) for the origin"):
        first.all_came("the origin", 3)
    assert both_come(meetings, "the origin", 4) == [None, None]
