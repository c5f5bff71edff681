"""Hooks of the documentation site (mkdocs.yml).

Pages link to files of the repository, which the site does not hold: such links become plain text.
"""

from __future__ import annotations

import re
from typing import Any

_LINK_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\((?:\.\./|notes/)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside the site by their text."""
    return _LINK_OUT_OF_DOCS.sub(r"\1", markdown)
