"""What proxies, platforms and browsers expect: short paths, SageMaker, CORS, load reports."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import httpx
import pytest

from remora.configs.errors import ConfigError, EngineError
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.integration.short_paths import SHORT_PATHS, full_path
from tests.deployments.fakes import (
    MODEL,
    FakeEngine,
    FakeServer,
    client_of,
    make_app,
    make_client,
    make_config,
    methods_of,
)
from tests.deployments.gateway.fakes import Replica, gateway, ready
from tests.deployments.http.shared_app import share_http_app

MESSAGES = [{"role": "user", "content": "Hi"}]
PAGE = "https://chat.example.com"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}


def client_with_key(server: FakeServer) -> httpx.AsyncClient:
    access = Access(keys=Keys(["secret"]))
    return client_of(share_http_app(ServerState.over(server), access=lambda: access))


# -- paths without /v1 -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/chat/completions", {"messages": MESSAGES}, 200, "chat.completion"),
        ("POST", "/completions", {"prompt": "a"}, 200, "text_completion"),
        ("POST", "/responses", {"input": "a"}, 200, "response"),
        ("GET", "/models", None, 200, "list"),
        ("GET", f"/models/{MODEL}", None, 200, "model"),
        ("POST", "/embeddings", {"input": "a"}, 400, None),  # the model generates text
        ("GET", "/models/nothing", None, 404, None),
        ("GET", "/completions", None, 405, None),
        ("GET", "/completionsx", None, 404, None),
    ],
)
@pytest.mark.parametrize("is_mounted", [False, True])
async def test_paths_without_a_version_are_those_of_openai(
    method: str, path: str, body: Any, status: int, kind: str | None, is_mounted: bool
) -> None:
    transport = httpx.ASGITransport(app=make_app(), root_path="/app" if is_mounted else "")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        url = f"/app{path}" if is_mounted else path
        response = await client.request(method, url, json=body)

    assert response.status_code == status
    assert response.json().get("object") == kind
    assert bool(response.json().get("error")) == (status != 200)


async def test_a_short_path_needs_the_key_too() -> None:
    async with client_with_key(FakeServer()) as client:
        response = await client.post("/chat/completions", json={"messages": MESSAGES})

    assert response.status_code == 401


def test_no_api_has_a_path_of_its_own_at_a_short_one() -> None:
    paths = methods_of(make_app())
    assert [path for path in paths if full_path(path) != path] == []
    assert [path for path in SHORT_PATHS if full_path(path) not in paths] == []


async def test_a_gateway_completes_short_paths() -> None:
    async with gateway(ready(Replica("one"))) as client:
        models = await client.get("/models")
        answer = await client.post("/chat/completions", json={"messages": MESSAGES})

    assert models.json()["object"] == "list"
    assert answer.json()["object"] == "chat.completion"


# -- paths of vLLM and Amazon SageMaker --------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_ping_is_the_health_check(method: str) -> None:
    sick = FakeServer(FakeEngine(health_error=EngineError("stopped")))
    async with client_with_key(FakeServer()) as well, client_with_key(sick) as ill:
        assert (await well.request(method, "/ping")).status_code == 200
        assert (await ill.request(method, "/ping")).status_code == 503
        assert (await well.put("/ping")).status_code == 405
    async with gateway(ready(Replica("one"))) as client:
        assert (await client.request(method, "/ping")).status_code == 200
        refused = await client.put("/ping")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, POST")


async def test_version_and_load() -> None:
    async with make_client() as client:
        version, load = await client.get("/version"), await client.get("/load")
    async with gateway(ready(Replica("one"), Replica("two"))) as client:
        total = await client.get("/load")

    assert version.json()["version"].split(".")[0].isdecimal()
    per_replica = load.json()["server_load"]
    assert load.json() == {"server_load": per_replica}
    assert total.json() == {"server_load": 2 * per_replica}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"messages": MESSAGES}, 200, "choices"),
        ({"prompt": "a"}, 200, "choices"),
        ({"inputs": "a"}, 200, "generated_text"),
        ({"inputs": 1}, 422, "error_type"),
        ({"input": "a"}, 400, "error"),
        ({"query": "a", "documents": ["b"]}, 400, "error"),
        ({"text_1": "a", "text_2": "b"}, 400, "error"),
        ({"prompt": 1}, 400, "error"),
        ({}, 400, "error"),
        ([], 400, "error"),
    ],
)
async def test_invocations_are_answered_by_their_fields(body: Any, status: int, field: str) -> None:
    async with make_client() as client:
        response = await client.post("/invocations", json=body)

    found = response.json()
    assert response.status_code == status
    assert field in (found[0] if isinstance(found, list) else found)


async def test_invocations_stream() -> None:
    async with make_client() as client:
        response = await client.post("/invocations", json={"prompt": "a", "stream": True})

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


async def test_an_unknown_invocation_names_what_is_allowed() -> None:
    async with make_client() as client:
        response = await client.post("/invocations", json={"question": "a"})

    message = response.json()["error"]["message"]
    assert "question" in message
    assert "messages; prompt" in message


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_embeds": [[0.5]]}, "input_embeds"),
        ("/v1/completions", {"prompt": "", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
async def test_embeddings_as_input_are_refused_by_name(path: str, body: Any, field: str) -> None:
    async with make_client() as client:
        response = await client.post(path, json=body)

    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, field, "unsupported")
    assert "text or token ids" in error["message"]


# -- CORS --------------------------------------------------------------------------------------


def cors_server(**cors: Any) -> FakeServer:
    return FakeServer(config=make_config(cors={"origins": [PAGE], **cors}))


@pytest.mark.observes("api.cors")
async def test_a_page_of_a_named_origin_may_ask() -> None:
    headers = {"access-control-request-headers": "authorization,content-type"}
    async with client_with_key(cors_server(max_age_s=60)) as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT | headers)
        refusal = await client.post("/v1/completions", headers={"origin": PAGE}, json={})
        answer = await client.post(
            "/completions",
            headers={"origin": PAGE, "authorization": "Bearer secret"},
            json={"prompt": "a"},
        )

    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-max-age"] == "60"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert [refusal.status_code, answer.status_code] == [401, 200]
    for response in (refusal, answer):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in response.headers


async def test_pages_may_be_restricted_to_methods() -> None:
    async with make_client(cors_server(methods=["GET"])) as client:
        asked = await client.options("/v1/completions", headers=PREFLIGHT)
        read = await client.options(
            "/v1/models", headers=PREFLIGHT | {"access-control-request-method": "GET"}
        )

    assert [asked.status_code, read.status_code] == [400, 200]


async def test_other_pages_get_no_headers() -> None:
    other = {"origin": "https://elsewhere.example.com"}
    async with make_client(cors_server()) as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT | other)
        answer = await client.post("/v1/completions", headers=other, json={"prompt": "a"})

    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in answer.headers


async def test_any_page_and_credentials() -> None:
    async with make_client(cors_server(origins=["*"])) as client:
        anyone = await client.get("/v1/models", headers={"origin": "https://a.example"})
    async with make_client(cors_server(credentials=True)) as client:
        named = await client.get("/v1/models", headers={"origin": PAGE})

    assert anyone.headers["access-control-allow-origin"] == "*"
    assert named.headers["access-control-allow-credentials"] == "true"


async def test_without_cors_pages_are_kept_out() -> None:
    async with make_client() as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT)
        answer = await client.get("/v1/models", headers={"origin": PAGE})

    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


async def test_the_operators_routes_stay_closed_to_pages() -> None:
    async with make_client(cors_server()) as client:
        response = await client.post("/flush_cache", headers={"origin": PAGE})

    assert response.status_code == 403


async def test_a_gateway_answers_preflights_and_sends_each_header_once() -> None:
    api = {"cors": {"origins": [PAGE]}}
    async with gateway(ready(Replica("one", cors_server())), api=api) as client:
        preflight = await client.options("/chat/completions", headers=PREFLIGHT)
        answer = await client.post(
            "/v1/completions", headers={"origin": PAGE}, json={"prompt": "a"}
        )

    for response in (preflight, answer):
        assert response.status_code == 200
        assert response.headers.get_list("access-control-allow-origin") == [PAGE]


@pytest.mark.parametrize(
    ("cors", "key"),
    [
        ({"origins": ["*"], "credentials": True}, "credentials"),
        ({"origins": []}, "origins"),
        ({"origins": ["https://a.example/path"]}, "origins"),
        ({"origins": ["a.example"]}, "origins"),
        ({}, "origins"),
    ],
)
def test_origins_that_no_browser_sends_are_refused(cors: Any, key: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=key):
        make_config(cors=cors)


# -- load reports ------------------------------------------------------------------------------


def of_binary(report: str) -> dict[str, float]:
    """Return the named metrics of a report in the format of protocol buffers."""
    found, raw = {}, base64.b64decode(report)
    while raw:
        assert raw[:1] == b"\x42"  # field 8, length-delimited
        entry, raw = raw[2 : 2 + raw[1]], raw[2 + raw[1] :]
        assert (entry[:1], entry[2 + entry[1] :][:1]) == (b"\x0a", b"\x11")
        name = entry[2 : 2 + entry[1]].decode()
        (found[name],) = struct.unpack("<d", entry[3 + entry[1] :])
    return found


async def test_an_answer_reports_the_load_in_the_wanted_format() -> None:
    server = FakeServer()
    stats = server.client.stats()
    expected = {
        "kv_cache_usage_perc": stats.kv_usage,
        "num_requests_waiting": stats.num_waiting,
        "num_requests_running": stats.num_running,
    }
    reports = {}
    async with make_client(server) as client:
        for name in ("TEXT", "json", "BIN"):
            response = await client.post(
                "/v1/completions",
                headers={"endpoint-load-metrics-format": name},
                json={"prompt": "a", "stream": name == "json"},
            )
            kind, _, reports[name] = response.headers["endpoint-load-metrics"].partition(" ")
            assert (response.status_code, kind) == (200, name.upper())

    pairs = [pair.split("=") for pair in reports["TEXT"].split(",")]
    assert {name: float(value) for name, value in pairs} == {
        f"named_metrics.{name}": value for name, value in expected.items()
    }
    assert json.loads(reports["json"]) == {"named_metrics": expected}
    assert of_binary(reports["BIN"]) == expected


@pytest.mark.parametrize("headers", [{}, {"endpoint-load-metrics-format": "XML"}])
async def test_other_answers_have_no_report(headers: dict[str, str]) -> None:
    async with make_client() as client:
        response = await client.get("/v1/models", headers=headers)

    assert response.status_code == 200
    assert "endpoint-load-metrics" not in response.headers


async def test_strangers_get_no_report() -> None:
    async with client_with_key(FakeServer()) as client:
        response = await client.get("/v1/models", headers={"endpoint-load-metrics-format": "TEXT"})

    assert response.status_code == 401
    assert "endpoint-load-metrics" not in response.headers
