"""Parses the checksum manifests in an adapter's folder and compares checksums.

`SHA256SUMS` is the output of the command sha256sum; `checksums.json` is an object of file names and
SHA-256 sums. Names of other files are ignored.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from remora.configs.errors import InvalidAdapter

SUMS, JSON_SUMS = "SHA256SUMS", "checksums.json"
MANIFESTS = (SUMS, JSON_SUMS)
MAX_MANIFEST_BYTES = 2**20
_SUM = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def parse_manifest(manifest: str, content: bytes) -> dict[str, str]:
    """Return lower-case SHA-256 sums by file name. Raises InvalidAdapter."""
    try:
        text = content.decode()
        return _parse_json(text) if manifest == JSON_SUMS else _parse_lines(text)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"the adapter's {manifest} cannot be read: {error}") from error


def check_sum(name: str, found: str, manifest: str, sums: dict[str, str]) -> None:
    """Raise InvalidAdapter if a file's sum differs from its entry in the manifest's `sums`."""
    if sums.get(name, found) != found:
        raise InvalidAdapter(
            f"{name} has the SHA-256 {found}, and {manifest} says {sums[name]}. Is the copy "
            "complete?"
        )


def file_sum(file: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _parse_lines(text: str) -> dict[str, str]:
    sums = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError("expected lines of a SHA-256, two spaces and a name")
        sums[match[2].removeprefix("./")] = match[1].lower()
    return sums


def _parse_json(text: str) -> dict[str, str]:
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise ValueError("expected an object of names and SHA-256 sums")
    sums = {}
    for name, value in parsed.items():
        match = _SUM.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError("expected an object of names and SHA-256 sums")
        sums[name] = match[1].lower()
    return sums
