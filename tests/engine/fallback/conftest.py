"""Checkpoints for models that transformers' code runs, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fallback.checkpoints import make_checkpoint

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(family, **settings)` returns the folder."""
    made: dict[str, Path] = {}

    def make(family: str, **settings: Any) -> Path:
        key = f"{family} {sorted(settings.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / family
            made[key] = make_checkpoint(folder, family, **settings)
        return made[key]

    return make
