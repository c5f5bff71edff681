"""SGLang's control of running requests: pauses, aborts, and ids that are in use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_server_config
from tests.deployments.http.conformance import ABSENT, Row, check_row, check_shape

SOURCE = "SGLang, test/registered/rl and docs/basic_usage/native_api"
PAUSED = {"status": "ok", "message": str}
TABLE = {
    "pause": Row(SOURCE, "/pause_generation", {}, 200, PAUSED),
    "retract": Row(SOURCE, "/pause_generation", {"mode": "retract"}, 200, PAUSED),
    "in place": Row(SOURCE, "/pause_generation", {"mode": "in_place"}, 200, PAUSED),
    "unknown mode": Row(
        SOURCE, "/pause_generation", {"mode": "stop"}, 400, {"error": {"param": "mode"}}
    ),
    "continue": Row(SOURCE, "/continue_generation", {}, 200, PAUSED),
    "vLLM's name": Row("vLLM, tests/entrypoints/serve/rlhf", "/pause", {}, 200, {"status": str}),
    "vLLM's mode": Row("vLLM", "/pause?mode=wait", {}, 400, {"error": {"param": "mode"}}),
    "a state": Row("vLLM", "/is_paused", None, 200, {"is_paused": False}),
    "startup": Row(SOURCE, "/server_info", None, 200, {"startup_time": None, "status": "ready"}),
    "no items": Row(
        SOURCE,
        "/v1/score",
        {"query": "ab", "items": [], "label_token_ids": [33]},
        200,
        {"scores": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}},
    ),
    "a flat error": Row(
        SOURCE,
        "/v1/score",
        {"query": "ab", "items": ["c"]},
        400,
        {"object": "error", "code": 400, "message": str, "param": "label_token_ids"},
    ),
    "an error of pairs": Row(
        "vLLM", "/v1/score", {"text_1": "a"}, 400, {"object": ABSENT, "error": {"message": str}}
    ),
    "an id twice": Row(
        SOURCE,
        "/generate",
        {"text": ["a", "b"], "rid": ["x", "x"]},
        400,
        {"error": {"param": "rid", "code": "duplicate_request_id"}},
    ),
    "an id for all": Row(SOURCE, "/generate", {"text": ["a", "b"], "rid": "x"}, 200, [Any, Any]),
}


@pytest.mark.parametrize("name", TABLE)
async def test_conformance(name: str) -> None:
    await check_row(TABLE[name], FakeServer())


async def test_an_id_that_is_in_use_is_refused_until_its_request_has_ended() -> None:
    engine = FakeEngine(gate=asyncio.Event())
    async with make_client(FakeServer(client=engine)) as client:
        body = {"text": "a", "rid": "x"}
        first = asyncio.create_task(client.post("/generate", json=body))
        at_once = asyncio.create_task(client.post("/generate", json=body))
        while not engine.requests:
            await asyncio.sleep(0)
        refused = await client.post("/generate", json=body)
        of_batch = await client.post("/generate", json={"text": ["a", "b"], "rid": ["y", "x"]})
        assert engine.gate is not None
        engine.gate.set()
        answers = await asyncio.gather(first, at_once)
        again = await client.post("/generate", json=body)
    assert sorted(answer.status_code for answer in answers) == [200, 400]
    assert [refused.status_code, of_batch.status_code, again.status_code] == [400, 400, 200]
    assert "'x' is in use" in refused.json()["error"]["message"]


async def test_a_pause_ends_open_requests_unless_they_are_to_be_kept() -> None:
    engine = FakeEngine(gate=asyncio.Event())
    async with make_client(FakeServer(client=engine)) as client:
        asked = asyncio.create_task(client.post("/generate", json={"text": "a"}))
        while not engine.running:
            await asyncio.sleep(0)
        await client.post("/pause_generation", json={"mode": "in_place"})
        assert not engine.aborted
        assert engine.is_paused
        paused = await client.get("/is_paused")
        token = await client.get("/health_generate")
        await client.post("/pause_generation")
        answer = (await asked).json()
        await client.post("/continue_generation")
    assert paused.json() == {"is_paused": True}
    assert token.status_code == 503
    check_shape(answer["meta_info"]["finish_reason"], {"type": "abort", "message": str})
    assert not engine.is_paused


async def test_an_abort_of_all_reaches_requests_that_wait_for_their_turn() -> None:
    engine = FakeEngine(gate=asyncio.Event())
    config = make_server_config(api={"max_concurrent_requests": 1, "wait_when_busy": True})
    async with make_client(FakeServer(client=engine, config=config)) as client:
        bodies: list[dict[str, Any]] = [
            {"text": "a"},
            {"text": "b"},
            {"text": ["c", "d"], "sampling_params": {"n": 2}},
        ]
        asked = [asyncio.create_task(client.post("/generate", json=body)) for body in bodies]
        while not engine.running:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        await client.post("/abort_request", json={"abort_all": True})
        answers = [answer.json() for answer in await asyncio.gather(*asked)]
        later = await client.post("/generate", json={"text": "e"})
    assert len(answers[2]) == 4
    for answer in (*answers[:2], *answers[2]):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(engine.requests) == 2  # the first, and the later one
    assert later.json()["meta_info"]["finish_reason"]["type"] == "stop"


async def test_the_time_in_the_queue_does_not_count_while_the_engine_is_paused() -> None:
    engine = FakeEngine(is_full=True, is_paused=True)
    config = make_server_config(engine={"queue_timeout_s": 0.01})
    async with make_client(FakeServer(client=engine, config=config)) as client:
        asked = asyncio.create_task(client.post("/generate", json={"text": "a"}))
        done, _ = await asyncio.wait({asked}, timeout=0.2)
        assert not done
        await client.post("/continue_generation")
        assert (await asked).status_code == 503
