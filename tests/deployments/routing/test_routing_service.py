"""What a chooser makes of HAProxy's questions."""

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

from remora.deployments.routing import routing_service as chooser_module
from remora.deployments.routing.haproxy_hook import CUT_HEADER, PATH_HEADER, QUESTION, SHOWN_BYTES
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
    monkeypatch.setattr(chooser_module, "log_through_serve", lambda: None)


class Handle:
    """A handle that notes by what it is to choose."""

    def __init__(self) -> None:
        self.keys: list[RouteKey] = []
        self.fails: Callable[[], Awaitable[None]] | None = None

    @asynccontextmanager
    async def choose_replica(self, *, route: RouteKey, **_: Any) -> AsyncGenerator[Any, None]:
        self.keys.append(route)
        if self.fails is not None:
            await self.fails()
        yield type("Selection", (), {"_replica": type("Replica", (), {"replica_id": REPLICA})})


class Desk:
    """A chooser, and somebody who asks as HAProxy does."""

    def __init__(self, chooser: Any, handle: Handle) -> None:
        self.chooser = chooser
        self.handle = handle
        transport = httpx.ASGITransport(chooser.__serve_build_asgi_app__())
        self.client = httpx.AsyncClient(transport=transport, base_url="http://chooser")

    @classmethod
    async def open(cls, model: Path | str = "nowhere", **sections: Any) -> Desk:
        args = {
            "model": {"path": str(model)},
            "engine": {"page_size": 16},
            "routing": {"policy": "shortest_queue"},
            **sections,
        }
        handle = Handle()
        chooser = RoutingService.__new__(RoutingService)
        await chooser.__init__(args, handle)  # type: ignore[misc]
        return cls(chooser, handle)

    async def ask(self, content: bytes = b"", **headers: str) -> httpx.Response:
        return await self.client.post(QUESTION, content=content, headers=headers)

    async def key(self, content: bytes = b"", **headers: str) -> RouteKey:
        assert (await self.ask(content, **headers)).status_code == 200
        return self.handle.keys[-1]


async def test_the_router_is_given_the_key_and_haproxy_the_name() -> None:
    desk = await Desk.open()

    answer = await desk.ask(b"x" * 400)

    assert answer.json() == {"replica_id": REPLICA.to_full_id_str()}
    assert desk.handle.keys == [RouteKey(num_tokens=100)]


async def test_a_prompt_has_the_same_pages_wherever_the_application_is_mounted(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    desk = await Desk.open(tiny_checkpoints("llama"), routing={"policy": "prefix"})

    at_root = await desk.key(BODY, **COMPLETIONS)
    below = await desk.key(BODY, **{PATH_HEADER: "/some/where/v1/completions"})
    elsewhere = await desk.key(BODY, **{PATH_HEADER: "/v1/other"})

    assert len(pages_of(at_root.page_hashes)) > 2
    assert below == at_root
    assert elsewhere == RouteKey(num_tokens=len(BODY) // 4)


async def test_without_a_path_requests_go_by_load_and_that_is_said_once(
    tiny_checkpoints: TinyCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    desk = await Desk.open(tiny_checkpoints("llama"), routing={"policy": "prefix"})

    keys = [await desk.key(BODY) for _ in range(3)]

    assert keys == [RouteKey(num_tokens=len(BODY) // 4)] * 3
    assert caplog.text.count("HAProxy does not say which path") == 1


async def test_a_body_that_is_cut_counts_with_its_whole_length() -> None:
    desk = await Desk.open()
    shown = b'{"prompt": "' + b"a" * (SHOWN_BYTES - 12)

    key = await desk.key(shown, **{CUT_HEADER: f"{SHOWN_BYTES}/{8 * SHOWN_BYTES}"})

    assert key == RouteKey(num_tokens=2 * SHOWN_BYTES)
    assert (await desk.ask(shown + b"a")).status_code == 413


@pytest.mark.observes("routing.session_header")
async def test_sessions_are_named_by_bodies_and_headers() -> None:
    desk = await Desk.open(routing={"policy": "session", "session_header": "x-chat"})

    by_body = await desk.key(b'{"prompt_cache_key": "s1"}')
    by_header = await desk.key(b'{"user": "s1"}', **{"x-chat": "s2"})

    assert (by_body.session, by_header.session) == ("s1", "s2")


async def test_adapters_are_named_by_bodies_where_the_path_is_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = await Desk.open("tiny", routing={"policy": "lora"})
    body = b'{"model": "tiny:pirate"}'

    assert await desk.key(body, **COMPLETIONS) == RouteKey(num_tokens=6, adapter="pirate")
    assert await desk.key(body) == RouteKey(num_tokens=6)
    assert "HAProxy does not say which path" in caplog.text


async def test_nothing_is_read_of_a_stranger_and_keys_change_in_place(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    desk = await Desk.open(api={"api_key": f"file:{tmp_path}/old"})
    old, new = {"authorization": "Bearer old"}, {"x-api-key": "new"}

    assert await desk.key(BODY) == await desk.key(BODY, **new) == RouteKey()
    assert await desk.key(BODY, **old) != RouteKey()

    await desk.chooser.reconfigure({"api": {"api_key": f"file:{tmp_path}/new"}})
    await desk.chooser.reconfigure({"api": {"api_key": f"file:{tmp_path}/none"}})
    assert await desk.key(BODY, **old) == RouteKey()
    assert await desk.key(BODY, **new) != RouteKey()


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[]", b'"text"', b"\xff"])
async def test_a_body_with_a_fault_is_for_the_replica_to_refuse(content: bytes) -> None:
    desk = await Desk.open(routing={"policy": "session"})

    assert await desk.key(content) == RouteKey(num_tokens=len(content) // 4)


async def test_where_no_replica_is_chosen_haproxy_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = await Desk.open()

    async def refuse() -> None:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)

    desk.handle.fails = refuse
    assert (await desk.ask()).status_code == 503
    desk.handle.fails = asyncio.Event().wait  # type: ignore[assignment]
    monkeypatch.setattr(chooser_module, "PICK_TIMEOUT_S", 0.01)
    assert (await desk.ask()).status_code == 503
