"""Secrets, which a configuration only refers to: `env:NAME` or `file:/path`.

What is read here is never logged, shown or sent; the configuration keeps the reference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from remora.configs.errors import ConfigError

_KEY = re.compile(r"[!-~]+")  # what a header can carry


def read_keys(reference: str, key: str) -> tuple[str, ...]:
    """Return the keys that a reference names, at least one.

    A variable or a file holds one key a line; blank lines and lines that begin with # are passed
    over.

    key:  of the configuration, to be named in errors
    Raises ConfigError, which never holds any part of a key.
    """
    kind, _, name = reference.partition(":")
    if kind == "env":
        text = os.environ.get(name)
        if text is None:
            raise ConfigError(
                f"{key}: the environment variable {name} is not set; set it where the server (or "
                "the Ray cluster) is started"
            )
    else:
        text = _read_file(Path(name).expanduser(), key)
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{key}: {reference} holds no key; write one into it, one a line")
    if not all(map(_KEY.fullmatch, keys)):
        raise ConfigError(
            f"{key}: a key in {reference} holds a space or a character that is not ASCII, which no "
            "client can send; write letters, digits and punctuation only"
        )
    return keys


def _read_file(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read ({error.strerror}); write the keys into it, one a line"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{key}: {path} is not text; write the keys into it, one a line"
        ) from None
