"""docs/install.md says what an installation brings; scripts/install_size.py writes it."""

from __future__ import annotations

from scripts import install_size


def test_page_names_every_package_that_is_required_now_and_no_extra() -> None:
    page = install_size.PAGE.read_text(encoding="utf-8")
    written = page.split(install_size.BEGIN)[1].split(install_size.END)[0]
    light = install_size.closure(
        install_size.requirements(install_size.OURS), leave_out=frozenset({"torch"})
    )
    for name in light:
        assert f"| {name} " in written, f"{name}: python scripts/install_size.py --write"
    assert "matplotlib" not in written


def test_torch_and_what_only_it_requires_are_counted_apart() -> None:
    last = install_size.table().splitlines()[-1]
    assert last.startswith("| torch ")
    assert int(last.split("|")[2]) > 100
