from __future__ import annotations

from pathlib import Path

import pytest

from remora.configs.environment import cache_dir


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "/home/user/.cache/remora"),
        ({"XDG_CACHE_HOME": "/var/caches"}, "/var/caches/remora"),
        ({"XDG_CACHE_HOME": ""}, "/home/user/.cache/remora"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "/home/user/.cache/remora"),
        ({"XDG_CACHE_HOME": "/var/caches", "REMORA_CACHE": "~/mine"}, "/home/user/mine"),
    ],
)
def test_the_cache_directory(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str
) -> None:
    for name in ("REMORA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/user", **environ}.items():
        monkeypatch.setenv(name, value)

    assert cache_dir() == Path(expected)
