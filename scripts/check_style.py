"""The English of the docs: no sentence that must be decoded.

    python scripts/check_style.py            exit 1 and name each line that breaks a rule
    python scripts/check_style.py --words    count the words of the docs as well

Rules: a sentence of prose has at most 40 words, and none of the phrases below. They are how an
earlier version of these pages spoke; the words of the field stand beside them. Tables, code and the
project's history are not read for length. All pages together have at most 22 000 words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 40
MOST_WORDS = 22_000
PHRASES = {
    r"foretold|foretells?": "predicted",
    r"\b(?:is|are|was|were|be) told\b": "reported",
    r"\bborn\b": "originated",
    r"\bbare (?:run|step|loop|training|one)s?\b|beside bare": "unguarded",
    r"\b(?:look|looks|looked|looking) ill\b": "unhealthy",
    r"\bin good health\b": "healthy",
    r"\bwhoever\b": "anyone who; or name who",
    r"\bfrom which on\b": "from which",
    r"\bso many (?:steps|of)\b": "the number",
    r"(?<!there )\bis no (?:folder|file|model|number)\b": "is not a ...",
    r"\bhave had them\b": "a full sentence",
    r"\bnone waits for one that does not come\b": "no rank waits for a missing rank",
    r"\bthe same of\b": "a full sentence",
    r"\bways? in\b": "integration",
    r"\bthe oath\b": "guarantees",
    r"\bruin(?:ed|s)?\b": "diverged",
    r"\bfall(?:s)? when it is what\b": "a full sentence",
}


def pages() -> list[Path]:
    """What readers read: README and the pages of the site, without the project's history."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if "project" not in path.parts]
    return [ROOT / "README.md", *sorted(docs)]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and list items with the number of their first line, without tables and code."""
    fenced = False
    begun, words = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced = not fenced
        starts = re.match(r"(?:[-*]|\d+\.)\s", stripped)
        skipped = fenced or not stripped or stripped[0] in "|#<!`" or stripped.startswith(":::")
        if (skipped or starts) and words:
            yield begun, words
            words = ""
        if not skipped:
            begun, words = (number, stripped) if not words else (begun, f"{words} {stripped}")


def problems(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in PHRASES.items():
            found = re.search(pattern, line, re.IGNORECASE)
            if found:
                yield f"{name}:{number}: {found.group()!r}; write: {instead}"
    for number, paragraph in prose(text):
        plain = re.sub(r"`[^`]*`|\[([^]]*)\]\([^)]*\)", r"\1 x", paragraph)
        for sentence in re.split(r"(?<=[.:;?!])\s+", plain):
            count = len(sentence.split())
            if count > LONGEST:
                yield f"{name}:{number}: a sentence of {count} words: {sentence[:60]!r}"


def count_words() -> int:
    """Words of the site without blocks of code; findings and the project's history aside."""
    texts = [p.read_text(encoding="utf-8") for p in pages()[1:] if "findings" not in p.parts]
    prose = (re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in texts)
    return sum(len(re.findall(r"\S*\w\S*", text)) for text in prose)


def main(arguments: list[str]) -> int:
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        found += problems(str(page.relative_to(ROOT)), text)
    for line in found:
        print(line)
    words = count_words()
    if "--words" in arguments or words > MOST_WORDS:
        print(f"{words} words; the pages may have at most {MOST_WORDS}")
    return 1 if found or words > MOST_WORDS else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
