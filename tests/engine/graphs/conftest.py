"""The native library, compiled into the user's cache once."""

from __future__ import annotations

import pytest

from remora.configs.environment import cache_dir
from remora.kernels.cpu.build import NativeUnavailable, load_library
from remora.kernels.cpu.library import Library


@pytest.fixture(scope="session")
def library() -> Library:
    try:
        return Library(load_library(cache_dir() / "kernels"))
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
