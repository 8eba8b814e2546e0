"""The verify benchmark runs and writes what it promises; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.parts import reading

from benchmarks import verify


def test_quick_run_measures_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what is measured elsewhere is that it runs."""

    def child(name: str, path: Path) -> dict[str, float]:
        capsys.readouterr()
        assert reading.main(name, str(path)) == 0
        seen: dict[str, float] = json.loads(capsys.readouterr().out)
        return seen

    monkeypatch.setattr(verify, "_child", child)
    output = tmp_path / "verify.json"
    words = ["--quick", "--megabytes", "2", "--folder", str(tmp_path), "--output", str(output)]
    assert verify.main(words) == 0
    data = json.loads(output.read_text(encoding="utf-8"))
    assert data["files"].keys() == {"torch zip", "safetensors"}
    for caches in data["files"].values():
        for rows in caches.values():
            assert {"read", "stepguard"} < {row["name"] for row in rows}
            assert all(row["seconds"] > 0 and row["of_reading"] > 0 for row in rows)
    assert str(tmp_path) not in output.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["verify.json"]


@pytest.mark.parametrize("name", reading.CONTENDERS)
def test_every_contender_finds_a_nan(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = verify.make(
        tmp_path, "torch zip" if ".pt" in reading.CONTENDERS[name].suffixes else "safetensors", 2
    )
    assert reading.main(name, str(path)) == 0
    bad = {"w": torch.tensor([float("nan")])}
    if path.suffix == ".pt":
        torch.save(bad, path)
    else:
        from safetensors.torch import save_file

        save_file(bad, path)
    assert reading.main(name, str(path)) == (0 if name.startswith("read") else 1)
