"""The files of the pages: read once, named by their contents.

A page refers to its files at `playground/DIGEST/NAME`, relative to its own address. DIGEST is of
all files together, so browsers may keep each of them forever, and modules that import one another
by relative names always come from the same version. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).with_name("static")
PAGE = "index.html"
DOCS = "docs.html"
# Not a module, or modules of the other page.
_NOT_PRELOADED = frozenset({"theme.js", "docs.js", "schema_view.js"})
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as browsers receive it."""

    content: bytes
    media_type: str
    etag: str


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """The pages and the files that they refer to.

    page:    the playground
    docs:    the description of the API
    digest:  of all files but the pages, in hexadecimal
    """

    page: StaticFile
    docs: StaticFile
    files: Mapping[str, StaticFile]
    digest: str


@cache
def static_files() -> StaticFiles:
    """Return the files of the package."""
    contents = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
    template, docs = contents.pop(PAGE).decode(), contents.pop(DOCS).decode()
    digest = _digest(b"\0".join(name.encode() + b"\0" + contents[name] for name in contents))
    place = f"playground/{digest}"
    # Without these lines a browser would find out about a module only when another imports it.
    preloads = "\n".join(
        f'    <link rel="modulepreload" href="{place}/{name}">'
        for name in contents
        if name.endswith(".js") and name not in _NOT_PRELOADED
    )
    page = template.replace("{{files}}", place).replace("{{preloads}}", preloads.strip())
    return StaticFiles(
        page=_file(PAGE, page.encode()),
        docs=_file(DOCS, docs.replace("{{files}}", place).encode()),
        files={name: _file(name, content) for name, content in contents.items()},
        digest=digest,
    )


def _file(name: str, content: bytes) -> StaticFile:
    return StaticFile(content, _MEDIA_TYPES[Path(name).suffix], f'"{_digest(content)}"')


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]
