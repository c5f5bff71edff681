from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.deployments.bench.openai_server import FakeOpenAI, serving


@pytest.fixture
def make_openai() -> Iterator[Callable[..., FakeOpenAI]]:
    with ExitStack() as stack:

        def make(**settings: Any) -> FakeOpenAI:
            return stack.enter_context(serving(FakeOpenAI(**settings)))

        yield make


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure bounds quickly, and ignore the load of other processes."""
    monkeypatch.setattr("remora.deployments.bench.session.busy_warning", lambda: None)
    monkeypatch.setattr("remora.deployments.bench.bounds.SECONDS_EACH", 0.0)
    monkeypatch.setattr("remora.deployments.bench.bounds._MIN_BYTES", 2**20)
    monkeypatch.setattr("remora.deployments.bench.bounds._MAX_BYTES", 2**20)
