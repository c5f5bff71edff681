from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.deployments.cli.fake_server import FakeServer, running


@pytest.fixture
def make_server() -> Iterator[Callable[..., FakeServer]]:
    with ExitStack() as stack:
        yield lambda *answers, models=("tiny",): stack.enter_context(
            running(FakeServer(answers=list(answers), models=models))
        )
