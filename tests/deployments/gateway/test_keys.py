"""Configuration keys for holding and blocking requests take effect in the gateway."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from ray import serve

from remora.configs.errors import Unavailable
from remora.deployments.gateway import model as module
from remora.deployments.gateway.model import GatewayModel
from remora.deployments.gateway.wait_queue import Phase
from tests.deployments.gateway.fakes import make_model


class Handle:
    def options(self, **_options: Any) -> Any:
        return self


def model_of(monkeypatch: pytest.MonkeyPatch, **routing: Any) -> GatewayModel:
    async def phase(_handle: object) -> Phase:
        return Phase.LOADING

    monkeypatch.setattr(module, "_phase_of", phase)
    return make_model(Handle(), **routing)


async def refusal(model: GatewayModel) -> str | None:
    """Wait for a replica that never arrives, for half a second at most."""
    taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def tell(_phase: Phase) -> None:
        pass

    try:
        async with asyncio.timeout(0.5):
            await model.carrier.wait_queue.wait_for(taken, tell)
    except Unavailable as error:
        return error.limit
    except TimeoutError:
        return None
    raise AssertionError("a replica came")


@pytest.mark.observes("routing.max_held_requests", "routing.hold_timeout_s")
@pytest.mark.parametrize(
    ("routing", "limit"),
    [
        ({}, None),
        ({"max_held_requests": 0}, "max_held_requests"),
        ({"hold_timeout_s": 0.05}, "hold_timeout_s"),
    ],
)
async def test_a_request_is_held_as_configured(
    monkeypatch: pytest.MonkeyPatch, routing: dict[str, Any], limit: str | None
) -> None:
    assert await refusal(model_of(monkeypatch, **routing)) == limit


@pytest.mark.observes("routing.max_crashes")
async def test_a_request_is_barred_after_as_many_crashes_as_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def barred_after(model: GatewayModel) -> int:
        crashes = model.carrier._crashes
        for number in range(1, 10):
            crashes.note(b"poison")
            if crashes.is_barred(b"poison"):
                return number
        return 0

    assert barred_after(model_of(monkeypatch)) == 2
    assert barred_after(model_of(monkeypatch, max_crashes=5)) == 5


async def test_the_phase_is_unknown_while_no_file_can_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def status() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(serve, "status", status)
    model = make_model(Handle())

    assert await model.carrier.wait_queue.phase() is Phase.READY
