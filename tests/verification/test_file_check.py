"""One file of any format: what is cut off anywhere is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepguard


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "m.safetensors"])
def test_truncation_anywhere_is_an_error(
    tmp_path: Path, whole: dict[str, bytes], name: str
) -> None:
    content = whole[name]
    for length in range(0, len(content), max(1, len(content) // 97)):
        (tmp_path / name).write_bytes(content[:length])
        assert stepguard.verify(tmp_path / name).corrupt, f"cut at {length} of {len(content)}"
