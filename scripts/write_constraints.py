"""Write constraints.txt: the version of everything that `make venv` has installed here.

A release of a framework in the middle of the day must not decide whether the tests pass.
`pip install -c /dev/null --upgrade --upgrade-strategy eager -e '.[dev]' torch==2.13.0` brings the
newest; run the tests, then this.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TARGET = Path(__file__).parents[1] / "constraints.txt"
HEAD = "# written by scripts/write_constraints.py; torch is the CPU build\n"


def needed(name: str, extra: str, found: dict[tuple[str, str], Distribution]) -> None:
    """Collect what the package needs with this extra, and what that needs."""
    key = (canonicalize_name(name), extra)
    if key in found:
        return
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return
    found[key] = package
    for text in package.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for more in {"", *requirement.extras}:
                needed(requirement.name, more, found)


def main() -> None:
    found: dict[tuple[str, str], Distribution] = {}
    needed("stepguard", "dev", found)
    # DeepSpeed and other engines have folders of their own
    for folder in Path(sys.prefix).glob("*/site-packages"):
        for package in distributions(path=[str(folder)]):
            found[canonicalize_name(package.name), ""] = package
    # a local part such as +cpu names a build, which a registry does not know
    versions = {name: package.version.partition("+")[0] for (name, _), package in found.items()}
    del versions["stepguard"]
    TARGET.write_text(HEAD + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions)))


if __name__ == "__main__":
    main()
