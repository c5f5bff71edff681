"""Ray's token and folders with data of requests: readable by the server's user only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remora.deployments.cli.ray_token import protect_ray_token
from remora.deployments.observing.crash_dump import CrashDump
from remora.engine.observe.profiling import Profiler
from remora.engine.observe.tensor_dump import TensorDump
from remora.lora.registry import Registry

TOKEN_MODE = {"RAY_AUTH_MODE": "token"}


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


@pytest.fixture(autouse=True)
def _lax_umask() -> Iterator[None]:
    former = os.umask(0)
    yield
    os.umask(former)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_token_is_private_and_stays(token: Path) -> None:
    protect_ray_token(TOKEN_MODE)
    text = token.read_text()
    protect_ray_token(TOKEN_MODE)

    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert (len(bytes.fromhex(text)), token.read_text()) == (32, text)
    assert list(token.parent.iterdir()) == [token]


def test_a_token_that_ray_wrote_becomes_private(token: Path) -> None:
    token.parent.mkdir()
    token.write_text("of Ray")

    protect_ray_token(TOKEN_MODE)

    assert (mode(token), token.read_text()) == (0o600, "of Ray")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RAY_AUTH_MODE": "disabled"},
        TOKEN_MODE | {"RAY_AUTH_TOKEN": "x"},
        TOKEN_MODE | {"RAY_AUTH_TOKEN_PATH": "/x"},
    ],
)
def test_a_token_of_another_place_needs_no_file(token: Path, environment: dict[str, str]) -> None:
    protect_ray_token(environment)
    assert not token.parent.exists()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: CrashDump(path, "replica"), 0o700),
        (Profiler, 0o700),
        (lambda path: TensorDump(path, 2, max_passes=1), 0o700),
        (lambda path: Registry(str(path), base="base", max_pinned=0), 0o600),
    ],
    ids=["crash dumps", "profiles", "tensor dumps", "lora.store"],
)
def test_what_the_server_writes_is_private(
    make: Callable[[Path], object], expected: int, tmp_path: Path
) -> None:
    make(tmp_path / "made")
    assert mode(tmp_path / "made") == expected
