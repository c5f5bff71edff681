"""The routing service, asked as HAProxy asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.exceptions import BackPressureError

from remora.deployments.routing import routing_service as module
from remora.deployments.routing.haproxy_hook import (
    MAX_BODY_BYTES,
    PATH_HEADER,
    ROUTE_PATH,
    TRUNCATED_HEADER,
)
from remora.deployments.routing.key import RouteKey, pages_of
from remora.deployments.routing.routing_service import RoutingService
from tests.conftest import TinyCheckpoints

COMPLETIONS = {PATH_HEADER: "/v1/completions"}
WORDS = "What is the capital of France, and who lives there? " * 4
BODY = orjson.dumps({"prompt": WORDS})
REPLICA = ReplicaID("abc", deployment_id=DeploymentID(name="LLMServer", app_name="app"))


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the log where tests read it."""
    monkeypatch.setattr(module, "log_through_serve", lambda: None)


class Handle:
    """A handle that records the keys that it routes by."""

    def __init__(self) -> None:
        self.keys: list[RouteKey] = []
        self.fails: Callable[[], Awaitable[Any]] | None = None

    @asynccontextmanager
    async def choose_replica(self, *, route: RouteKey, **_: Any) -> AsyncGenerator[Any, None]:
        self.keys.append(route)
        if self.fails is not None:
            await self.fails()
        yield type("Selection", (), {"_replica": type("Replica", (), {"replica_id": REPLICA})})


class HAProxy:
    """Asks a routing service over a recording handle."""

    def __init__(self, service: Any, handle: Handle) -> None:
        self.service = service
        self.handle = handle
        transport = httpx.ASGITransport(service.__serve_build_asgi_app__())
        self.client = httpx.AsyncClient(transport=transport, base_url="http://routing")

    @classmethod
    async def asking(cls, model: Path | str = "nowhere", **sections: Any) -> HAProxy:
        args = {
            "model": {"path": str(model)},
            "engine": {"page_size": 16},
            "routing": {"policy": "shortest_queue"},
            **sections,
        }
        handle, service = Handle(), RoutingService.__new__(RoutingService)
        await service.__init__(args, handle)  # type: ignore[misc]
        return cls(service, handle)

    async def ask(self, content: bytes = b"", **headers: str) -> httpx.Response:
        return await self.client.post(ROUTE_PATH, content=content, headers=headers)

    async def key(self, content: bytes = b"", **headers: str) -> RouteKey:
        assert (await self.ask(content, **headers)).status_code == 200
        return self.handle.keys[-1]


async def test_the_router_gets_the_key_and_haproxy_the_replicas_name() -> None:
    haproxy = await HAProxy.asking()

    answer = await haproxy.ask(b"x" * 400)

    assert answer.json() == {"replica_id": REPLICA.to_full_id_str()}
    assert haproxy.handle.keys == [RouteKey(num_tokens=100)]


async def test_a_prompt_has_the_same_pages_wherever_the_application_is_mounted(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    haproxy = await HAProxy.asking(tiny_checkpoints("llama"), routing={"policy": "prefix"})

    at_root = await haproxy.key(BODY, **COMPLETIONS)
    below = await haproxy.key(BODY, **{PATH_HEADER: "/some/where/v1/completions"})
    elsewhere = await haproxy.key(BODY, **{PATH_HEADER: "/v1/other"})

    assert len(pages_of(at_root.page_hashes)) > 2
    assert below == at_root
    assert elsewhere == RouteKey(num_tokens=len(BODY) // 4)


@pytest.mark.parametrize("policy", ["prefix", "lora"])
async def test_without_a_path_requests_are_routed_by_load_and_one_warning_says_so(
    tiny_checkpoints: TinyCheckpoints, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    haproxy = await HAProxy.asking(tiny_checkpoints("llama"), routing={"policy": policy})

    keys = [await haproxy.key(BODY) for _ in range(3)]

    assert keys == [RouteKey(num_tokens=len(BODY) // 4)] * 3
    assert len(caplog.records) == 1


async def test_a_truncated_body_counts_with_its_whole_length() -> None:
    haproxy = await HAProxy.asking()
    body = b'{"prompt": "' + b"a" * (MAX_BODY_BYTES - 12)

    key = await haproxy.key(body, **{TRUNCATED_HEADER: f"{MAX_BODY_BYTES}/{8 * MAX_BODY_BYTES}"})

    assert key == RouteKey(num_tokens=2 * MAX_BODY_BYTES)
    assert (await haproxy.ask(body + b"a")).status_code == 413


@pytest.mark.observes("routing.session_header")
async def test_sessions_are_named_by_bodies_and_headers() -> None:
    haproxy = await HAProxy.asking(routing={"policy": "session", "session_header": "x-chat"})

    by_body = await haproxy.key(b'{"prompt_cache_key": "s1"}')
    by_header = await haproxy.key(b'{"user": "s1"}', **{"x-chat": "s2"})

    assert (by_body.session, by_header.session) == ("s1", "s2")


async def test_adapters_are_named_by_bodies() -> None:
    haproxy = await HAProxy.asking("tiny", routing={"policy": "lora"})
    body = b'{"model": "tiny:pirate"}'

    assert await haproxy.key(body, **COMPLETIONS) == RouteKey(num_tokens=6, adapter="pirate")


async def test_an_unauthorised_body_is_not_read_and_api_keys_change_in_place(
    tmp_path: Path,
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    haproxy = await HAProxy.asking(api={"api_key": f"file:{tmp_path}/old"})
    old, new = {"authorization": "Bearer old"}, {"x-api-key": "new"}

    assert await haproxy.key(BODY) == await haproxy.key(BODY, **new) == RouteKey()
    assert await haproxy.key(BODY, **old) != RouteKey()

    await haproxy.service.reconfigure({"api": {"api_key": f"file:{tmp_path}/new"}})
    await haproxy.service.reconfigure({"api": {"api_key": f"file:{tmp_path}/none"}})
    assert await haproxy.key(BODY, **old) == RouteKey()
    assert await haproxy.key(BODY, **new) != RouteKey()


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[]", b'"text"', b"\xff"])
async def test_a_malformed_body_is_left_for_the_replica_to_refuse(content: bytes) -> None:
    haproxy = await HAProxy.asking(routing={"policy": "session"})

    assert await haproxy.key(content) == RouteKey(num_tokens=len(content) // 4)


async def test_without_a_choice_the_status_is_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    haproxy = await HAProxy.asking()

    async def refuse() -> None:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)

    haproxy.handle.fails = refuse
    assert (await haproxy.ask()).status_code == 503
    haproxy.handle.fails = asyncio.Event().wait
    monkeypatch.setattr(module, "CHOOSE_TIMEOUT_S", 0.01)
    assert (await haproxy.ask()).status_code == 503
