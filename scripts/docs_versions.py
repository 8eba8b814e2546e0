"""Put the site that `make docs` built beside those of other versions.

    python scripts/docs_versions.py public

writes public/0.2/ (a copy of site/, named by the minor version of the source), public/versions.json
in the form of mike, and public/index.html, which opens the newest version. Other versions stay.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "stepguard" / "__init__.py"
OPEN_NEWEST = """<!doctype html>
<meta charset="utf-8">
<title>stepguard</title>
<meta http-equiv="refresh" content="0; url={version}/index.html">
<a href="{version}/index.html">stepguard {version}</a>
"""


def source_version() -> str:
    """`0.2.0`, as the package says it."""
    found = re.search(r'^__version__ = "([^"]+)"', SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{SOURCE} has no __version__"
    return found[1]


def add(site: Path, folder: Path, version: str) -> Path:
    """Copy a built site to its place in the folder, and write what leads to it."""
    if not (site / "index.html").is_file():
        raise SystemExit(f"{site} holds no site; run `make docs` first")
    minor = ".".join(version.split(".")[:2])
    place = folder / minor
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(site, place)
    index = folder / "versions.json"
    known = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else []
    titles = {entry["version"]: entry["title"] for entry in known} | {minor: version}
    order = sorted(titles, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    entries = [
        {"version": name, "title": titles[name], "aliases": ["latest"] if name == order[0] else []}
        for name in order
    ]
    index.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(OPEN_NEWEST.format(version=order[0]), encoding="utf-8")
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder to publish, made if it is not there")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="what `make docs` built")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(add(given.site, given.folder, source_version()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
