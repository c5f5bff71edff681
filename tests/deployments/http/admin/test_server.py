"""The administrative endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from remora.configs.errors import EngineError, QueueFull
from remora.engine.observe.inspection import Inspection
from remora.engine.observe.step_records import StepRecords
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_plan
from tests.deployments.http.refusals import outcome_of
from tests.deployments.http.streams import ask

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def get(path: str, server: FakeServer | None = None) -> httpx.Response:
    async with make_client(server) as client:
        return await client.get(path)


@pytest.mark.parametrize("path", ["/health", "/healthz", "/ready", "/health_generate"])
async def test_health_is_an_empty_200_or_a_503(path: str) -> None:
    healthy = await get(path)
    dead = await get(path, FakeServer(FakeEngine(health_error=EngineError("hung"))))
    full = await get(path, FakeServer(FakeEngine(error=QueueFull("full"))))
    async with make_client() as client:  # load balancers use HEAD
        head = await client.head("/health" if path == "/health_generate" else path)

    assert (healthy.status_code, healthy.content, head.status_code) == (200, b"", 200)
    assert (dead.status_code, bool(dead.headers["retry-after"])) == (503, True)
    assert full.status_code == (503 if path == "/health_generate" else 200)


async def test_the_models_list_and_the_card_agree() -> None:
    card = (await get("/v1/models/tiny")).json()
    (listed,) = (await get("/v1/models")).json()["data"]
    assert {**listed, "created": card["created"]} == card  # two servers, two creation times
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 1000)


async def test_a_model_name_may_hold_slashes() -> None:
    server = FakeServer(plan=make_plan(served_model_name="org/tiny"))
    assert (await get("/v1/models/org/tiny", server)).json()["id"] == "org/tiny"


@pytest.mark.parametrize("old", ["model_info", "server_info"])
async def test_old_names_of_information_still_work(old: str) -> None:
    server = FakeServer()
    assert (await get(f"/{old}", server)).json() == (await get(f"/get_{old}", server)).json()


async def test_server_information_names_limits_and_no_path() -> None:
    response = await get("/server_info")
    assert response.json()["max_total_num_tokens"] == 1024
    assert (response.json()["tp_size"], response.json()["pp_size"]) == (1, 1)
    assert "secret" not in response.text


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_cache_is_flushed_when_nothing_runs(method: str) -> None:
    server = FakeServer()
    async with make_client(server) as client:
        idle = await client.request(method, "/flush_cache")
        server.client.running.add("x")
        busy = await client.request(method, "/flush_cache")

    assert (idle.status_code, idle.json()["success"]) == (200, True)
    assert (busy.status_code, busy.json()["error"]["code"]) == (400, "requests_running")


async def test_all_calls_can_be_aborted_at_once() -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    async with make_client(server) as client:
        calls = [
            asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(3)
        ]
        while len(server.client.running) < 3:
            await asyncio.sleep(0)
        aborted = await client.post("/abort_request", json={"abort_all": True})
        responses = await asyncio.gather(*calls)

    assert aborted.json() == {"num_aborted": 3}
    reasons = {response.json()["choices"][0]["finish_reason"] for response in responses}
    assert reasons == {"abort"}


@pytest.mark.parametrize(
    ("body", "status"), [({}, 400), ({"rid": ""}, 400), ({"rid": "", "abort_all": True}, 200)]
)
async def test_an_abort_names_a_request_or_all(body: Any, status: int) -> None:
    response = await ask("/abort_request", **body)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["param"] == "rid"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_prompts_are_tokenised(path: str) -> None:
    one = (await ask(path, prompt="ab", return_token_strs=True)).json()
    several = (await ask(path, prompt=["ab", ""], foo=1)).json()

    tokens = {"tokens": [97, 98], "token_strs": ["a", "b"]}
    assert one == {"count": 2, "max_model_len": 1000, **tokens}
    assert (several["count"], several["tokens"]) == ([2, 0], [[97, 98], []])


async def test_a_conversation_is_tokenised_as_the_chat_endpoint_would() -> None:
    server = FakeServer()
    body = (await ask("/tokenize", server, **CHAT)).json()
    await ask("/v1/chat/completions", server, **CHAT)
    assert body["tokens"] == server.client.requests[0].prompt_ids


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tokens": [97, 98]}, "ab"),
        ({"tokens": [[97], [98]]}, ["a", "b"]),
        ({"tokens": [97, 256]}, "a</s>"),
        ({"tokens": [97, 256], "skip_special_tokens": True}, "a"),
    ],
)
async def test_ids_become_text(path: str, body: dict[str, Any], text: Any) -> None:
    names = ("prompt", "text", "content")
    assert (await ask(path, **body)).json() == dict.fromkeys(names, text)


@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize(("context", "limit"), [(1000, 2**18), (2**18 + 2, 2**18 + 2)])
async def test_as_many_ids_become_text_as_a_context_holds_or_a_fixed_number(
    context: int, limit: int, lists: int
) -> None:
    async def outcome(num: int) -> Any:
        half = [[97] * (num // 2)] * 2
        body = {"tokens": [97] * num if lists == 1 else half}
        async with make_client(FakeServer(plan=make_plan(max_model_len=context))) as client:
            return await outcome_of(await client.post("/detokenize", json=body), client)

    assert await outcome(limit) == (200, "", [])
    status, message, counted = await outcome(limit + 2)
    assert (status, counted) == (400, ["max_detokenize_ids"])
    assert str(limit) in message


async def test_metrics_count_responses_reasons_latencies_and_the_engines_own() -> None:
    server = FakeServer(FakeEngine(text="abc"))
    async with make_client(server) as client:
        await client.post("/v1/chat/completions", json=CHAT | {"n": 2})
        await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1, "stream": True})
        await client.post("/v1/chat/completions", json={})
        await client.get("/nowhere")
        response = await client.get("/metrics")

    families = text_string_to_metric_families(response.text)
    samples = {
        (sample.name, *(value for key, value in sample.labels.items() if key != "model_name")): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }
    route = "/v1/chat/completions"
    assert samples["remora_http_responses_total", route, "200"] == 2
    assert samples["remora_http_responses_total", route, "400"] == 1
    assert samples["remora_http_responses_total", "other", "404"] == 1
    assert samples["remora_sequences_finished_total", "stop"] == 2
    assert samples["remora_sequences_finished_total", "length"] == 1
    assert samples[("remora_time_to_first_token_seconds_count",)] == 2
    assert samples[("remora_inter_token_latency_seconds_count",)] == 4
    assert samples[("remora_e2e_request_latency_seconds_count",)] == 2
    assert samples[("remora_num_pages",)] == 10
    assert samples[("remora_kv_usage",)] == 0.5


async def test_metrics_show_what_compiled_constraints_take() -> None:
    async with make_client() as client:
        await client.post("/v1/chat/completions", json=CHAT | {"regex": "a"})
        lines = (await client.get("/metrics")).text.splitlines()

    assert 'remora_grammar_cached_bytes{model_name="tiny"} 1.0' in lines
    assert 'remora_grammar_failures_total{model_name="tiny"} 0.0' in lines


async def test_step_records_are_for_the_operator_and_say_when_there_are_none() -> None:
    assert (await get("/step_records")).json()["error"]["code"] == "not_enabled"
    records = StepRecords(FakeEngine().stats, max_records=4, window_s=60.0)
    server = FakeServer(inspection=Inspection(records=records))
    assert (await get("/step_records", server)).json() == {"records": []}
