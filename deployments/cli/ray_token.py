"""Ray's authentication token, readable by its user only.

Ray 2.60 creates the file with the permissions of any other file, and who reads it can run code in
the cluster.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_ELSEWHERE = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_OTHERS = 0o077  # permission bits of group and others


def protect_ray_token(environment: Mapping[str, str]) -> None:
    """Create Ray's token with mode 0600 where Ray would create it, or restrict the existing one.

    Does nothing if the environment turns token authentication off or names another token. Errors
    of the file system are left to Ray, which reports them.
    """
    if environment.get("RAY_AUTH_MODE") != "token" or any(map(environment.get, _ELSEWHERE)):
        return
    file = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):
        if not file.exists():
            _create(file)
        mode = file.stat().st_mode
        if mode & _OTHERS:
            file.chmod(mode & ~_OTHERS & 0o777)


def _create(file: Path) -> None:
    """Write a new token; the file appears complete, and never replaces another one."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    draft = file.with_name(f".{file.name}-{os.getpid()}")
    opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(opened, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was first
            file.hardlink_to(draft)
    finally:
        draft.unlink()
