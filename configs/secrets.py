"""Read secrets that a configuration refers to as `env:NAME` or `file:/path`.

Secrets are never logged, shown or sent; the configuration keeps the reference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.configs.sections.limits import UNNAMED

_KEY = re.compile(r"[!-~]+")  # what a header can carry


def read_keys(reference: str, key: str) -> tuple[str, ...]:
    """Return the secrets of a reference, at least one.

    A variable or file has one secret per line; blank lines and lines with a leading # are skipped.

    key:  configuration key, for errors
    Raises ConfigError, which never contains any part of a secret.
    """
    kind, _, name = reference.partition(":")
    if kind == "env":
        text = os.environ.get(name)
        if text is None:
            raise ConfigError(
                f"{key}: the environment variable {name} is not set; set it before the server (or "
                "the Ray cluster) starts"
            )
    else:
        text = _read_file(Path(name).expanduser(), key)
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{key}: {reference} contains no key; write one key per line into it")
    if not all(map(_KEY.fullmatch, keys)):
        raise ConfigError(
            f"{key}: a key in {reference} contains a space or a non-ASCII character, which clients "
            "cannot send; use letters, digits and punctuation"
        )
    return keys


def read_callers_keys(config: ServeConfig) -> dict[str, tuple[str, ...]]:
    """Return the keys of each tenant, and as the tenant UNNAMED's those of api.api_key.

    Raises ConfigError, also for a key that two of them have.
    """
    found = dict[str, tuple[str, ...]]()
    named = [(UNNAMED, config.api.api_key), *((t.name, t.api_key) for t in config.limits.tenants)]
    for name, reference in named:
        if reference is None:
            continue
        given = read_keys(reference, "api.api_key" if name == UNNAMED else "limits.tenants")
        if any(set(given) & set(others) for others in found.values()):
            raise ConfigError(
                f"limits.tenants: {name!r} has a key that another tenant or api.api_key has; "
                "give each a key of its own"
            )
        found[name] = given
    return found


def _read_file(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read ({error.strerror}); write the keys into it, one per line"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{key}: {path} is not UTF-8 text; write the keys into it, one per line"
        ) from None
