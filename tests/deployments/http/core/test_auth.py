"""API keys: open paths, callers' permissions, and the operator's permissions."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from remora.deployments.http.app import build_http_app
from remora.deployments.http.core.auth import OPEN_PATHS, Access, Keys
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeEngine, FakeServer, make_config, methods_of
from tests.deployments.http.shared_app import share_http_app

KEY, ADMIN_KEY = "sk-caller", "sk-operator"
CALLERS = Access(keys=Keys(["sk-other", KEY]))
BOTH = Access(keys=Keys([KEY]), admin_keys=Keys([ADMIN_KEY]))
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def make_guarded_app(access: Access) -> FastAPI:
    return build_http_app(ServerState.over(FakeServer()), access=lambda: access)


def make_guarded(
    access: Access, key: str | None = None, server: FakeServer | None = None
) -> httpx.AsyncClient:
    app = share_http_app(ServerState.over(server or FakeServer()), access=lambda: access)
    transport = httpx.ASGITransport(app=app)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def all_routes() -> list[tuple[str, str]]:
    """Return (method, path) of every route of the application."""
    found = methods_of(make_guarded_app(CALLERS))
    assert len(found) > 40
    return sorted((method, path) for path, methods in found.items() for method in methods)


@pytest.mark.parametrize(("method", "path"), all_routes())
async def test_every_route_that_is_not_open_asks_for_a_key(method: str, path: str) -> None:
    async with make_guarded(CALLERS) as client:
        response = await client.request(method, path)
    assert (response.status_code == 401) == (path not in OPEN_PATHS)


def test_nothing_is_open_but_health_and_metrics() -> None:
    probes = {"/health", "/healthz", "/ready", "/liveness", "/readiness", "/health_generate"}
    probes |= {"/status", "/health_check", "/frontend_health"}
    probes |= {"/GraphService/cm2_status", "/SearchService/cm2_status"}
    assert set(OPEN_PATHS) == probes | {"/metrics", "/ping"}


async def test_a_path_that_does_not_exist_asks_too() -> None:
    async with make_guarded(CALLERS) as client:
        responses = [await client.get(path) for path in ("/nowhere", "/health/", "//health")]
    assert [response.status_code for response in responses] == [401] * 3


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": "Bearer of-something-else"},
    ],
)
async def test_a_key_opens_in_either_way_to_send_it(headers: dict[str, str]) -> None:
    async with make_guarded(CALLERS) as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 200


WRONG_VALUES = ("", "Bearer", "Bearer ", KEY, "Bearer \xff", f"Basic {KEY}", f"Bearer {KEY}x")


@pytest.mark.parametrize("value", [*WRONG_VALUES, f"Bearer, {KEY}"])
async def test_anything_else_does_not(value: str) -> None:
    async with make_guarded(CALLERS) as client:
        headers = [(b"authorization", value.encode("latin-1"))]
        response = await client.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-should-retry"] == "false"


async def test_the_openai_client_sees_an_authentication_error() -> None:
    transport = httpx.ASGITransport(app=make_guarded_app(CALLERS))
    http: Any = httpx.AsyncClient(transport=transport)
    client = openai.AsyncOpenAI(base_url="http://remora/v1", api_key="sk-wrong", http_client=http)
    with pytest.raises(openai.AuthenticationError) as caught:
        await client.models.list()
    await client.close()
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", {"type", "error", "request_id"}),
        ("/api/chat", {"error"}),
        ("/v1/chat/completions", {"error"}),
    ],
)
async def test_a_refusal_has_the_shape_of_its_dialect(path: str, shape: set[str]) -> None:
    async with make_guarded(CALLERS) as client:
        body = (await client.post(path, json=CHAT)).json()
    assert set(body) == shape
    assert isinstance(body["error"], str) == path.startswith("/api/")


async def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr("remora.deployments.http.core.auth.hmac.compare_digest", compare)
    keys = Keys(["first", "second", "third"])

    assert [keys.hold(key) for key in (b"first", b"third", b"none")] == [True, True, False]
    assert [len(digest) for digest in compared] == [32] * 9


@pytest.mark.parametrize(
    ("access", "key", "status"),
    [
        (BOTH, None, 401),
        (BOTH, "sk-wrong", 401),
        (BOTH, KEY, 403),
        (BOTH, ADMIN_KEY, 200),
        (Access(admin_keys=Keys([ADMIN_KEY]), is_local=True), None, 401),
        (Access(admin_keys=Keys([ADMIN_KEY]), is_local=True), "EMPTY", 403),
        (Access(admin_keys=Keys([ADMIN_KEY])), ADMIN_KEY, 200),
        (Access(), None, 403),
        (CALLERS, KEY, 403),
        (Access(is_local=True), None, 200),
        (Access(keys=Keys([KEY]), is_local=True), KEY, 200),
        (Access(keys=Keys([KEY]), is_local=True), None, 401),
    ],
)
async def test_who_may_use_the_routes_of_the_operator(
    access: Access, key: str | None, status: int
) -> None:
    async with make_guarded(access, key) as client:
        flushed = await client.get("/flush_cache")
        aborted = await client.post("/abort_request", json={"abort_all": True})
    assert (flushed.status_code, aborted.status_code) == (status, status)


async def test_a_caller_may_abort_a_request_by_name() -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    async with make_guarded(BOTH, KEY, server) as client:
        call = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "rid": "r"}))
        while not server.client.running:
            await asyncio.sleep(0)
        aborted = await client.post("/abort_request", json={"rid": "r"})
        await call
    assert aborted.json() == {"num_aborted": 1}


@pytest.mark.parametrize(("access", "key"), [(BOTH, ADMIN_KEY), (Access(), None)])
async def test_other_routes_are_open_to_the_operator_and_without_keys_to_all(
    access: Access, key: str | None
) -> None:
    async with make_guarded(access, key) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_keys_and_where_they_are_stay_within(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    config = make_config(api_key=f"file:{path}", batch_dir=str(tmp_path))
    access = Access.of(config, is_local=True)
    with caplog.at_level(logging.DEBUG):
        async with make_guarded(access, KEY, FakeServer(config=config)) as client:
            info = await client.get("/server_info")
            wrong = await client.get("/server_info", headers={"authorization": f"Bearer {KEY}x"})

    assert info.status_code == 200
    assert wrong.status_code == 401
    for text in (info.text, wrong.text, caplog.text, repr(access), repr(config)):
        assert KEY not in text
    assert str(tmp_path) not in info.text


GENERATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 1},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [97]},
    "/generate": {"text": "Hi"},
    "/generate_stream": {"inputs": "Hi"},
    "/api/chat": CHAT | {"model": "tiny", "stream": False},
}


@pytest.mark.observes("api.share_prefix_cache")
@pytest.mark.parametrize("path", GENERATIONS)
async def test_the_prefix_cache_is_shared_within_a_key_unless_the_operator_says_otherwise(
    path: str,
) -> None:
    async def namespaces(shares: bool, **body: Any) -> list[Any]:
        server = FakeServer(config=make_config(api_key="env:KEY", share_prefix_cache=shares))
        found = []
        for key in (KEY, KEY, "sk-other"):
            server.client.requests.clear()
            async with make_guarded(CALLERS, key, server) as client:
                response = await client.post(path, json=GENERATIONS[path] | body)
                assert response.status_code == 200, response.text
            (namespace,) = {request.namespace for request in server.client.requests}
            found.append(namespace)
        return found

    first, again, other = await namespaces(False)
    assert first == again != other
    assert KEY not in first.salt
    assert len(set(await namespaces(True))) == 1
    if not path.startswith("/api/") and path != "/generate_stream":
        salted, _, other_salted = await namespaces(False, cache_salt="tenant")
        assert len({first, other, salted, other_salted}) == 4


async def test_a_mounted_application_knows_its_open_paths() -> None:
    app: Any = make_guarded_app(CALLERS)
    transport = httpx.ASGITransport(app=app, root_path="/smol")
    async with httpx.AsyncClient(transport=transport, base_url="http://remora/smol") as client:
        health, models = await client.get("/health"), await client.get("/v1/models")
    assert (health.status_code, models.status_code) == (200, 401)
