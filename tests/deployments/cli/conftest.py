from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.deployments.bench.openai_server import serving
from tests.deployments.cli.fake_server import FakeServer


@pytest.fixture
def make_server() -> Iterator[Callable[..., FakeServer]]:
    with ExitStack() as stack:
        yield lambda *answers, models=("tiny",): stack.enter_context(
            serving(FakeServer(answers=list(answers), models=models))
        )
