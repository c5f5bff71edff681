"""Responses of the gateway itself, and requests of strangers that it keeps from its replicas."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from remora.deployments.gateway.merge import WholeAnswer
from remora.deployments.gateway.relayed_request import GatewayUnreachable
from tests.deployments.fakes import FakeEngine, FakeServer
from tests.deployments.gateway.fakes import Replica, gateway, make_model, ready


class Listening(Replica):
    """A replica that records the bodies of small requests."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.bodies: list[bytes] = []
        self._whole = self.relay.whole
        self.relay.whole = self.whole  # type: ignore[method-assign]

    async def whole(self, scope: Mapping[str, Any], body: bytes) -> WholeAnswer:
        self.bodies.append(body)
        return await self._whole(scope, body)


@pytest.mark.parametrize("path", ["/metrics", "/health_generate"])
async def test_strangers_cannot_send_bodies_to_every_replica(path: str) -> None:
    replica = Listening("one")
    async with gateway(ready(replica)) as client:
        posted = await client.post(path, content=b"x" * 1000)
        got = await client.request("GET", path, content=b"x" * 1000)

    assert (posted.status_code, posted.headers["allow"]) == (405, "GET, HEAD")
    assert got.status_code == 200
    assert replica.bodies == [b""]


async def test_what_is_to_be_aborted_is_told_to_every_replica() -> None:
    replica = Listening("one")
    async with gateway(ready(replica)) as client:
        answer = await client.post("/abort_request", json={"rid": "x"})

    assert answer.json() == {"num_aborted": 0}
    assert replica.bodies == [b'{"rid":"x"}']


async def test_a_replica_that_is_stuck_does_not_keep_the_others_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remora.deployments.gateway.relay.WHOLE_TIMEOUT_S", 0.2)
    stuck = FakeServer(client=FakeEngine(is_full=True))
    async with gateway(ready(Replica("one", stuck), Replica("two"))) as client:
        async with asyncio.timeout(30):
            health = await client.get("/health_generate")
        metrics = await client.get("/metrics")

    assert (health.status_code, len(stuck.client.closed)) == (503, 1)
    assert 'replica="two"' in metrics.text


@pytest.mark.parametrize(
    ("found", "statuses"),
    [
        ([WholeAnswer("one", 200, (), b""), RuntimeError("?")], [200, 503]),
        (TimeoutError(), []),
    ],
)
async def test_a_replica_that_fails_is_not_left_out(found: Any, statuses: list[int]) -> None:
    class Handle:
        def options(self, **_options: str) -> None:
            return None

        def broadcast(self, *_call: Any) -> Handle:
            return self

        async def results_async(self, **_limits: Any) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

    answers = await make_model(Handle()).ask_all({}, b"")

    assert [answer.status for answer in answers] == statuses


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags", "/metrics", "/health_generate"])
async def test_head_is_answered_as_get_is(path: str) -> None:
    async with gateway(ready(Replica("one"))) as client:
        assert (await client.head(path)).status_code == 200


def test_who_has_no_way_back_is_known_on_the_other_side() -> None:
    error = pickle.loads(pickle.dumps(GatewayUnreachable("one")))

    assert (error.replica, error.retry_after_s) == ("one", 1.0)
