"""Scalars reach the host in one transfer, and each transfer is counted."""

from __future__ import annotations

import torch

from stepguard.sentinel.gradients import Packet


def test_numbers_come_back_in_order_and_in_full_precision() -> None:
    values = [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([2], dtype=torch.int64)]
    assert Packet(values).fetch() == [1 / 3, 2.0]


def test_building_a_packet_does_not_count_and_fetching_does() -> None:
    before = Packet.fetched
    packet = Packet([torch.tensor(1.0)])
    assert Packet.fetched == before
    packet.fetch()
    assert Packet.fetched == before + 1


def test_a_packet_carries_no_graph() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert not Packet([loss]).values.requires_grad
