"""What is said where docs/ cannot be built as a site."""

from __future__ import annotations

NO_SITE = "the build of docs/, for mkdocs is not installed: pip install '.[docs]'"
