"""A trained model with everything that a checkpoint holds, and files of it."""

from __future__ import annotations

from typing import Any

import pytest

from verification import saved


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    return saved.trained()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, everything: dict[str, Any]) -> dict[str, bytes]:
    """One undamaged file of each single-file format, by name."""
    folder = tmp_path_factory.mktemp("whole")
    saved.save_zip(folder / "zip.pt", everything)
    saved.save_legacy(folder / "legacy.pt", everything)
    saved.save_safetensors(folder / "m.safetensors", everything["state_dict"])
    return {path.name: path.read_bytes() for path in folder.iterdir()}
