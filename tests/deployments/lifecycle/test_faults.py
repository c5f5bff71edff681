"""Each kind of process is killed once under load, behind a gateway; rank 1 is also stopped."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

import pytest

from tests.conftest import TinyCheckpoints
from tests.deployments.lifecycle.faults import (
    NUM_TOKENS,
    PYTHON_FAULTS,
    STREAMS,
    Fault,
    make_config,
    try_change,
    try_fault,
    try_signal,
    try_user_config,
)
from tests.deployments.lifecycle.load import Load
from tests.deployments.lifecycle.rolling import with_replicas, with_seed
from tests.deployments.lifecycle.server import Server, running

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.faults,
]


@pytest.fixture(scope="module")
def server(
    tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    config = make_config(tiny_checkpoints("llama", max_position_embeddings=8192), "python")
    with running(config, tmp_path_factory.mktemp("server"), proxy="python") as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """The texts of an undisturbed run, found out by the first test."""
    return {}


@pytest.fixture
async def load(server: Server, expected: dict[int, str]) -> AsyncGenerator[Load, None]:
    async with Load(server.url, NUM_TOKENS["python"], expected) as load:
        if not expected:
            await load.learn(STREAMS)
        yield load


@pytest.mark.parametrize("fault", PYTHON_FAULTS, ids=lambda fault: fault.name)
async def test_a_fault_costs_only_what_was_on_it_and_is_healed(
    server: Server, load: Load, fault: Fault
) -> None:
    await try_fault(fault, server, load)


def test_user_config_changes_what_running_replicas_do(server: Server) -> None:
    try_user_config(server)


async def test_a_rolling_update_cuts_no_stream_short(server: Server, load: Load) -> None:
    change = await try_change(server, load, with_seed(server.config, 1))

    assert change.num_kept == 0


async def test_scaling_down_cuts_no_stream_short(server: Server, load: Load) -> None:
    config = with_replicas(with_seed(server.config, 1), 1)
    change = await try_change(server, load, config)

    assert change.num_kept == 1


def test_after_all_of_it_a_signal_leaves_nothing_behind(server: Server) -> None:
    try_signal(server)
