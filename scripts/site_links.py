"""Hook of mkdocs: pages of the repository that lie outside docs/ become pages of the site.

Links between them and docs/ are written for a reader of the repository. This hook turns them into
links of the site; a link to a file that is no page (source code, a folder) becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url
from scripts.docs_versions import source_version

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "recipes/latent_dlm/README.md",
    "recipes/radiodiff/README.md",
    "recipes/restran_mhc/README.md",
    "recipes/sft/README.md",
)
"""Pages of the repository, by their path in it."""
PICTURES = (".png", ".svg")
PREFIX = "repository/"
"""Where they are in the site."""
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
FENCED = re.compile(r"(^[ \t]*```.*?^[ \t]*```[ \t]*$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
NUMBERED = re.compile(r"\d+\. ")


def on_config(config: Any) -> Any:
    """List every finding below the page that lists them; name the version at the foot."""
    config.copyright = f"stepguard {source_version()}"
    for section in config.nav:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and isinstance(entry.get("Findings"), list):
                pages = sorted((ROOT / "docs" / "findings").glob("SG*.md"))
                entry["Findings"] += [f"findings/{page.name}" for page in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and the pictures beside them."""
    for path in OUTSIDE:
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, PREFIX + path, content=text))
        for found in LINK.finditer(text):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found["path"]))
            if found["picture"] and not target.startswith("docs/"):
                content = (ROOT / target).read_bytes()
                files.append(File.generated(config, PREFIX + target, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    return site_text(widened(markdown), page.file.src_uri)


def widened(markdown: str) -> str:
    """Indent what belongs to a numbered item by four blanks, so that the list is one list.

    GitHub and `stepguard explain` take three; Python-Markdown would begin a new list after each
    block of code, and every item would be number 1.
    """
    lines = []
    inside = False
    for line in markdown.split("\n"):
        if line and not line.startswith(" "):
            inside = NUMBERED.match(line) is not None
        lines.append(f" {line}" if inside and line.startswith("   ") else line)
    return "\n".join(lines)


def site_text(markdown: str, uri: str) -> str:
    """The text of a page with its links as the site needs them; code blocks stay as they are."""
    parts = FENCED.split(markdown)
    for place in range(0, len(parts), 2):  # the others are the fenced blocks themselves
        text = LINK.sub(lambda found: _site_link(found, uri), parts[place])
        parts[place] = CODE.sub(_plain_bars, text)
    return "".join(parts)


def _plain_bars(code: re.Match[str]) -> str:
    """GitHub needs `\\|` for a bar in the code of a table; mkdocs would show the backslash."""
    return code[0].replace("\\|", "|")


def _site_link(found: re.Match[str], uri: str) -> str:
    """One link: unchanged within docs/, else to the page's place in the site, else its text."""
    page = uri.removeprefix(PREFIX) if uri.startswith(PREFIX) else f"docs/{uri}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), found["path"]))
    place = _place(target)
    if place is None:
        return found["text"]
    link = posixpath.relpath(place, posixpath.dirname(uri) or ".")
    text = found["text"].removesuffix(".md")
    return f"{found['picture']}[{text}]({link}{found['anchor'] or ''})"


def _place(target: str) -> str | None:
    """Where a file of the repository is in the site; None where it is not part of it."""
    if target == "README.md":
        return "index.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in OUTSIDE or target.endswith(PICTURES):
        return PREFIX + target
    return None


SHIM = re.compile(r'src="https://[^"]*/iframe-worker/shim"')
"""What the theme loads from elsewhere so that search works in a site opened from disk."""


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the shim from the site itself."""
    path = get_relative_url("assets/iframe-worker.js", page.url)
    return SHIM.sub(f'src="{path}"', output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for pages without a source, such as 404.html."""
    return SHIM.sub('src="assets/iframe-worker.js"', output_content)
