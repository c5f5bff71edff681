from __future__ import annotations

from pathlib import Path

import pytest

from remora.configs.environment import cache_dir


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REMORA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")


def test_the_cache_is_in_the_users_home_by_default() -> None:
    assert cache_dir() == Path("/home/somebody/.cache/remora")


def test_the_cache_follows_the_desktops_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")

    assert cache_dir() == Path("/var/caches/remora")


@pytest.mark.parametrize("value", ["", "not/absolute"])
def test_a_cache_setting_that_is_not_absolute_is_ignored(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)

    assert cache_dir() == Path("/home/somebody/.cache/remora")


def test_our_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    monkeypatch.setenv("REMORA_CACHE", "~/mine")

    assert cache_dir() == Path("/home/somebody/mine")
