"""Syncs are requested but not waited for: ten milliseconds each, and only a power cut could tell
the difference.

That they are requested, and when, is in the recorded operations (`test_store.py`,
`test_background.py`).
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "test_disks" not in request.node.nodeid:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
