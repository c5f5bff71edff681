"""Which status, type and code an error becomes; and that no error becomes anything else."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import httpx
import pytest

from remora.configs.errors import (
    EngineError,
    InvalidRequest,
    InvariantViolated,
    NotFinite,
    PromptTooLong,
    QueueFull,
    RequestTimedOut,
    StepTimeout,
    Unavailable,
    UnknownModel,
)
from tests.deployments.fakes import (
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
    make_plan,
    make_server_config,
)

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"


async def post(server: FakeServer, body: Any = CHAT, **options: Any) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post(PATH, json=body, **options)


def outcome(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["type"], error["code"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("m", "p"), (400, "invalid_request_error", "invalid_value")),
        (PromptTooLong("m"), (400, "invalid_request_error", "context_length_exceeded")),
        (UnknownModel("m"), (404, "not_found_error", "model_not_found")),
        (QueueFull("m"), (429, "rate_limit_error", "queue_full")),
        (Unavailable("m"), (503, "overloaded_error", "unavailable")),
        (RequestTimedOut("m"), (504, "timeout_error", "timeout")),
        (StepTimeout("m"), (500, "server_error", "engine_failed")),
        (NotFinite("m"), (500, "server_error", "not_finite")),
        (InvariantViolated("m"), (500, "server_error", "engine_failed")),
        (KeyError("m"), (500, "server_error", "internal_error")),
        (TimeoutError("m"), (500, "server_error", "internal_error")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_table(error: Exception, expected: tuple[int, str, str], stream: bool) -> None:
    response = await post(FakeServer(FakeEngine(error=error)), CHAT | {"stream": stream})
    assert outcome(response) == expected


@pytest.mark.parametrize("error", [EngineError("at /secret/place"), RuntimeError("/secret/place")])
async def test_a_500_tells_nothing_of_our_insides(error: Exception) -> None:
    response = await post(FakeServer(FakeEngine(error=error)))
    assert "secret" not in response.text
    assert "Error" not in response.text


@pytest.mark.parametrize("kind", [QueueFull, Unavailable])
async def test_refusals_for_lack_of_room_say_when_to_come_back(kind: Any) -> None:
    response = await post(FakeServer(FakeEngine(error=kind("m", 0.2))))
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-should-retry"] == "true"


async def test_a_caller_is_told_not_to_repeat_a_bad_request() -> None:
    response = await post(FakeServer(), {})
    assert response.headers["x-should-retry"] == "false"
    assert outcome(response)[2] == "missing_required_parameter"


async def test_a_dead_engine_is_a_503() -> None:
    response = await post(FakeServer(FakeEngine(health_error=EngineError("dead"))))
    assert outcome(response) == (503, "overloaded_error", "unavailable")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nowhere", (404, "not_found_error", "not_found")),
        ("GET", PATH, (405, "invalid_request_error", "method_not_allowed")),
        ("GET", "/v1/models/a/b", (404, "not_found_error", "model_not_found")),
        ("POST", f"{PATH}?{'x' * 9000}", (414, "invalid_request_error", "url_too_long")),
    ],
)
async def test_routing_errors_have_our_shape(method: str, path: str, expected: Any) -> None:
    async with make_client() as client:
        response = await client.request(method, path)
    assert outcome(response) == expected
    assert len(response.json()["error"]["message"]) > 20  # more than the status's name


async def test_too_many_or_too_large_headers_are_refused() -> None:
    many = {f"x-{number}": "1" for number in range(150)}
    large = {"x-large": "1" * 40_000}
    for headers in (many, large):
        response = await post(FakeServer(), headers=headers)
        assert outcome(response)[0] == 431


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "x"},
        {"content-type": FORM, "origin": "http://elsewhere"},
        {"content-type": FORM, "origin": "null"},
    ],
)
async def test_other_content_types_are_refused(headers: dict[str, str]) -> None:
    assert outcome(await post(FakeServer(), headers=headers))[0] == 415


async def test_what_curl_calls_a_form_is_json_but_not_from_a_web_page() -> None:
    assert (await post(FakeServer(), headers={"content-type": FORM})).status_code == 200


async def test_compressed_bodies_are_refused() -> None:
    response = await post(FakeServer(), headers={"content-encoding": "gzip"})
    assert outcome(response)[0] == 415


async def test_a_body_over_the_cap_is_refused_announced_or_not() -> None:
    server = FakeServer(config=make_config(max_body_bytes=1000))

    async def pieces() -> Any:
        for _ in range(3):
            yield b" " * 400

    async with make_client(server) as client:
        announced = await client.post(PATH, content=b" " * 1200)
        unannounced = await client.post(PATH, content=pieces())

    assert outcome(announced)[0] == 413
    assert outcome(unannounced)[0] == 413


async def test_a_body_that_does_not_arrive_times_out() -> None:
    server = FakeServer(config=make_server_config(limits={"body_timeout_s": 0.01}))

    async def pieces() -> Any:
        yield b"{"
        await asyncio.sleep(5)

    async with make_client(server) as client:
        response = await client.post(PATH, content=pieces())
    assert outcome(response) == (408, "timeout_error", "timeout")


async def test_a_prompt_that_cannot_fit_is_told_the_numbers() -> None:
    server = FakeServer(plan=make_plan(max_model_len=30))

    response = await post(server, CHAT | {"max_tokens": 10})

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages"
    for text in (
        "maximum context length is 30 tokens",
        "33 tokens",
        "23 in",
        "10 in",
        "3 too many",
    ):
        assert text in error["message"]


async def test_a_text_far_too_long_is_refused_without_tokenising_it() -> None:
    server = FakeServer(plan=make_plan(max_model_len=30))

    def explode(text: str, *, add_special_tokens: bool) -> list[int]:
        raise AssertionError("tokenised")

    server.tokenizer.encode = explode
    async with make_client(server) as client:
        response = await client.post("/v1/completions", json={"prompt": "x" * 200})

    assert outcome(response) == (400, "invalid_request_error", "context_length_exceeded")
    assert "200 characters" in response.json()["error"]["message"]


async def test_the_deadline_of_the_operator_ends_a_call() -> None:
    config = make_config(request_timeout_s=0.02)
    server = FakeServer(FakeEngine(gate=asyncio.Event()), config=config)

    whole = await post(server)
    stream = await post(server, CHAT | {"stream": True})

    assert outcome(whole) == (504, "timeout_error", "timeout")
    assert b'"code":"timeout"' in stream.content
    assert stream.content.endswith(b"data: [DONE]\n\n")
    assert server.client.running == set()


async def test_unknown_fields_are_refused_where_the_operator_wants_it() -> None:
    server = FakeServer(config=make_config(unknown_fields="reject"))

    response = await post(server, CHAT | {"temprature": 1})

    assert outcome(response)[2] == "unknown_field"
    assert response.json()["error"]["param"] == "temprature"


def test_our_own_error_survives_pickling() -> None:
    error = RequestTimedOut("late", 3.0)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args) == (RequestTimedOut, ("late", 3.0))


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(EngineError("x"), False), (KeyError(), True)]
)
async def test_a_failed_engine_is_not_told_with_a_traceback_by_each_request(
    caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    async with make_client(FakeServer(FakeEngine(error=error))) as client:
        await client.post("/v1/completions", json={"prompt": "a"})

    (record,) = [r for r in caplog.records if "failed" in r.getMessage()]
    assert (record.exc_info is not None) is has_traceback
