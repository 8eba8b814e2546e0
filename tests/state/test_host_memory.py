"""Available memory of the machine, within the limit of a container."""

from __future__ import annotations

from pathlib import Path

from stepguard.state.files import free_memory


def files(tmp_path: Path, **content: str) -> tuple[Path, Path]:
    for name, text in content.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 100 kB\n")
    return tmp_path, meminfo


def test_without_a_container_the_machine_counts(tmp_path: Path) -> None:
    assert free_memory(*files(tmp_path)) == 100 * 1024


def test_no_limit_is_written_as_max(tmp_path: Path) -> None:
    assert free_memory(*files(tmp_path, memory_max="max", memory_current="5")) == 100 * 1024


def test_a_limit_counts_what_is_used_but_not_cached_files(tmp_path: Path) -> None:
    content = {"memory_max": "5000", "memory_current": "4000", "memory_stat": "inactive_file 300"}
    assert free_memory(*files(tmp_path, **content)) == 1300


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    assert free_memory(*files(tmp_path, memory_max="10", memory_current="50")) == 0
