"""Garbage is collected again after an import, unless it was not before."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from remora.deployments.fast_import import fast_import


@pytest.mark.parametrize("was_on", [True, False])
def test_collection_pauses_within_the_block_only(was_on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with suppress(ImportError), fast_import():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
