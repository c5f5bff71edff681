"""Fixtures that several rooms share: the built-in model and tiny checkpoints."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings

# Triton reads it when it is first imported, which others do too: without a GPU kernels are
# interpreted.
os.environ["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "1")

from remora.engine.weights.resolve_model import resolve_model
from tests.tiny_models import make_tiny_checkpoint

TinyCheckpoints = Callable[..., Path]

# Of an engine, or of torch. Beside other processes threads wait for each other.
NUM_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
if NUM_THREADS == 1:
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start

# Machines that run the tests are shared: how long an example takes says nothing.
settings.register_profile("remora", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile("remora")

# Ray reads these when it is first imported, whichever test that happens in.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = (
    "remora.deployments.http.core.serve_proxy:middlewares"
)


# They begin first, so that no worker is left alone with one of them at the end.
LONGEST = ("gpu/test_compiled.py", "test_smollm2.py", "test_structured.py", "cpu/test_build.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare how a run takes a part of the tests."""
    parser.addoption("--slice", metavar="N/M", help="run the Nth of M parts of the chosen tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses the shared cluster as needing Ray; put the longest modules first."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)
    if chosen := config.getoption("slice"):
        number, count = map(int, chosen.split("/"))
        items[:] = [each for each in items if crc32(_whole(each).encode()) % count == number - 1]
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


def _whole(item: pytest.Item) -> str:
    """Return what a slice does not divide: the tests of a class may build on each other."""
    return (item.getparent(pytest.Class) or item).nodeid


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was collected: a million objects that stay."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let what was collected go, or modules that count their objects tell of leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _own_threads() -> None:
    """An engine sets how many threads torch has in all of its process, and so for later modules."""
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Put the log's handlers back: a deployment that is built in a test's process sets its own."""
    ours = logging.getLogger("remora")
    handlers, level = list(ours.handlers), ours.level
    yield
    ours.handlers = handlers
    ours.setLevel(level)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in the user's cache, written there on first use."""
    cache = os.environ.get("REMORA_CACHE") or Path.home() / ".cache" / "remora"
    return resolve_model("smollm2-135m-instruct", Path(cache))


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """`tiny_checkpoints(family, **overrides)` returns the folder, made once per session."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = make_tiny_checkpoint(
                tmp_path_factory.mktemp("checkpoint") / family, family, **overrides
            )
        return made[key]

    return make
