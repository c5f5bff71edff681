"""Limits of a whole request: outputs, context, queue, time, and the model's template."""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import AsyncGenerator
from contextvars import Context
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import InvalidRequest, PromptTooLong, QueueFull
from remora.configs.schema import ServeConfig
from remora.configs.sections.limits import LimitsSection
from remora.deployments.http.endpoints import COMPLETIONS as COMPLETION_JOBS
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.tokens.chat import render_chat
from remora.engine.tokens.chat_template import ChatTemplate
from remora.engine.tokens.tokenizer import Tokenizer
from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_client,
    make_plan,
    make_server_config,
)
from tests.deployments.http.batches.jobs import make_line, make_runner, opened, start
from tests.deployments.http.refusals import outcome_of, refusals_of
from tests.tiny_models import make_tiny_tokenizer

DEFAULTS = LimitsSection()
COMPLETIONS = "/v1/completions"


async def complete(server: FakeServer, **fields: Any) -> tuple[httpx.Response, list[str]]:
    async with make_client(server) as client:
        body = {"prompt": "a", "max_tokens": 1} | fields
        response = await client.post(COMPLETIONS, json=body)
        return response, await refusals_of(client)


@pytest.mark.parametrize("max_sequences", [256, 32])
@pytest.mark.observes("limits.max_sequences")
async def test_outputs_of_one_request_are_prompts_times_n(max_sequences: int) -> None:
    def server() -> FakeServer:
        plan = make_plan(max_running_requests=4096)
        config = make_server_config(limits={"max_sequences": max_sequences})
        return FakeServer(plan=plan, config=config)

    at = {"prompt": ["a"] * (max_sequences // 16), "n": 16}
    taken, nothing = await complete(server(), **at)
    refused, counted = await complete(server(), **at | {"prompt": [*at["prompt"], "a"]})  # type: ignore[misc]

    assert (taken.status_code, nothing) == (200, [])
    assert (refused.status_code, counted) == (400, ["max_sequences"])


async def test_prompt_and_output_fit_the_context_to_the_last_token() -> None:
    def server() -> FakeServer:
        return FakeServer(plan=make_plan(max_model_len=100, num_pages=100))

    taken, nothing = await complete(server(), prompt="a" * 90, max_tokens=10)
    refused, counted = await complete(server(), prompt="a" * 90, max_tokens=11)
    long, counted_unread = await complete(server(), prompt="a" * 1000, max_tokens=1)

    assert (taken.status_code, nothing) == (200, [])
    for response, limits in ((refused, counted), (long, counted_unread)):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert limits == ["context_length"]
    # The limit; the requested total, prompt and output tokens; and the excess.
    numbers = set(map(int, re.findall(r"\d+", refused.json()["error"]["message"])))
    assert numbers >= {100, 101, 90, 11, 1}


async def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    server = FakeServer(plan=make_plan(max_model_len=100, num_pages=100))
    at_most = 100 * server.tokenizer.max_token_chars
    encoded: list[int] = []
    encode = server.tokenizer.encode

    def noted(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        ids: list[int] = encode(text, add_special_tokens=add_special_tokens)
        return ids

    server.tokenizer.encode = noted
    await complete(server, prompt="a" * at_most)
    await complete(server, prompt="a" * (at_most + 1))

    assert encoded == [at_most]


async def test_a_queue_is_full_at_its_limit() -> None:
    server = FakeServer(FakeEngine(limit=1, gate=asyncio.Event()))
    async with make_client(server) as client:
        body = {"prompt": "a", "max_tokens": 2}
        first = asyncio.ensure_future(client.post(COMPLETIONS, json=body))
        while not server.client.running:
            await asyncio.sleep(0)
        refused = await client.post(COMPLETIONS, json=body | {"stream": True})
        assert server.client.gate is not None
        server.client.gate.set()
        taken = await first
        counted = await refusals_of(client)

    assert (taken.status_code, refused.status_code) == (200, 429)
    assert refused.headers["retry-after"] == "3"
    assert refused.headers["x-should-retry"] == "true"
    assert counted == ["max_queued_requests"]


@pytest.mark.observes("engine.queue_timeout_s")
async def test_a_request_that_waits_too_long_for_its_turn_is_given_up() -> None:
    config = make_server_config(engine={"queue_timeout_s": 0.02})
    server = FakeServer(FakeEngine(is_full=True), config=config)

    async with asyncio.timeout(10):
        refused, counted = await complete(server, prompt=["a", "b"], stream=True)

    assert (refused.status_code, counted) == (503, ["queue_timeout_s"])
    assert refused.headers["retry-after"] == "5"
    assert server.client.running == set()


async def test_a_request_whose_turn_has_come_is_waited_for() -> None:
    config = make_server_config(engine={"queue_timeout_s": 0.02})
    engine = FakeEngine()
    server = FakeServer(engine, config=config)
    original = engine.generate

    async def slow(request: Any) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.06)  # its prompt is being computed
        async for output in original(request):
            yield output

    engine.generate = slow  # type: ignore[method-assign]
    taken, nothing = await complete(server)

    assert (taken.status_code, nothing) == (200, [])


@pytest.mark.observes("api.request_timeout_s")
async def test_a_request_that_runs_too_long_is_given_up() -> None:
    config = make_server_config(api={"request_timeout_s": 0.02})
    server = FakeServer(FakeEngine(gate=asyncio.Event()), config=config)

    refused, counted = await complete(server, max_tokens=3)
    stream, _ = await complete(server, max_tokens=3, stream=True)

    assert (refused.status_code, counted) == (504, ["request_timeout_s"])
    assert b'"code":"timeout"' in stream.content
    assert stream.content.endswith(b"data: [DONE]\n\n")
    assert server.client.running == set()


def test_the_name_of_a_limit_comes_along_between_processes() -> None:
    errors = (
        InvalidRequest("a", "n", limit="max_n"),
        QueueFull("a", 2.0, limit="max_queued_tokens"),
    )
    for error in errors:
        assert pickle.loads(pickle.dumps(error)).limit == error.limit
    assert pickle.loads(pickle.dumps(PromptTooLong("a"))).limit == "context_length"


# -- of the model's template -------------------------------------------------------------------


class TemplateTokenizer(CharTokenizer):
    """Renders chats with a real template, under the configured limits."""

    def __init__(self, source: str, config: ServeConfig) -> None:
        super().__init__()
        self._template = ChatTemplate(source, {})
        self._template.max_render_s = config.limits.template_timeout_s
        self._template.max_render_chars = config.limits.max_template_chars

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        options.pop("template_kwargs")
        return render_chat(
            self._template,
            messages,
            template_kwargs={},
            **{"add_generation_prompt": True, "continue_final_message": False} | options,
        )


async def chat(source: str, text: str, **limits: Any) -> Any:
    config = make_server_config(limits=limits)
    plan = make_plan(max_model_len=10**8, num_pages=10**7)
    server = FakeServer(tokenizer=TemplateTokenizer(source, config), config=config, plan=plan)
    async with make_client(server) as client:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        response = await client.post("/v1/chat/completions", json=body)
        return await outcome_of(response, client)


@pytest.mark.parametrize("limits", [{}, {"max_template_chars": 5000}], ids=["default", "operator"])
async def test_a_template_writes_so_much_and_no_more(limits: dict[str, int]) -> None:
    at = limits.get("max_template_chars", DEFAULTS.max_template_chars)

    assert await chat("{{ messages[0].content }}", "a" * at, **limits) == (200, "", [])
    status, message, counted = await chat("{{ messages[0].content }}!", "a" * at, **limits)
    assert (status, counted) == (400, ["max_template_chars"])
    assert f"more than {at} characters" in message


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("limits", [{}, {"template_timeout_s": 0.01}], ids=["default", "operator"])
async def test_a_template_takes_so_long_and_no_longer(limits: dict[str, float]) -> None:
    allowed_s = limits.get("template_timeout_s", DEFAULTS.template_timeout_s)

    status, message, counted = await chat(LOOPS, "a", **limits)

    assert (status, counted) == (400, ["template_timeout_s"])
    assert f"takes more than {allowed_s:g} s" in message


async def test_templates_obey_the_operators_limits() -> None:
    """Set on the tokenizer, as in a replica."""
    backend = make_tiny_tokenizer()
    backend.chat_template = "{{ messages[0].content }}"
    tokenizer = Tokenizer(backend)
    tokenizer.limit_rendering(max_seconds=1.0, max_chars=1024)

    assert tokenizer.render_chat([{"role": "user", "content": "a" * 1024}])
    with pytest.raises(InvalidRequest, match="more than 1024 characters"):
        tokenizer.render_chat([{"role": "user", "content": "a" * 1025}])


# -- bodies from any source ----------------------------------------------------------------------


async def test_bodies_of_handles_and_batches_are_under_the_same_limits() -> None:
    server = ServerState.over(FakeServer(config=make_server_config(limits={"max_n": 2})))
    body = {"prompt": "a", "max_tokens": 1}

    job, _ = await COMPLETION_JOBS.job(server, body | {"n": 2}, RequestContext(request_id="r"))
    with pytest.raises(InvalidRequest, match="n is 3; at most 2 is allowed") as refused:
        await COMPLETION_JOBS.job(server, body | {"n": 3}, RequestContext(request_id="r"))

    assert job.requests[0].sampling.n == 2
    assert refused.value.limit == "max_n"


async def test_entries_are_counted_before_they_are_checked() -> None:
    async with make_client() as client:
        body = {"messages": [1] * 100_000}
        response = await client.post("/v1/chat/completions", json=body)

    assert response.json()["error"]["param"] == "messages"  # not messages[0]


@pytest.mark.parametrize(("depth", "status"), [(8, "completed"), (9, "failed")])
async def test_lines_of_batches_nest_no_deeper_than_the_operator_says(
    tmp_path: Path, depth: int, status: str
) -> None:
    config = make_server_config(api={"batch_dir": str(tmp_path)}, limits={"max_json_depth": 8})
    server = FakeServer(config=config)
    extra: Any = {}
    for _ in range(depth - 3):  # the line and its body are levels, too
        extra = {"a": extra}
    async with opened(server) as client:
        line = make_line("x", messages=[{"role": "user", "content": "a"}], extra=extra)
        batch = await start(client, line)
        # In a new context, as in a replica: no request has set any limits there.
        task = asyncio.create_task(make_runner(server)[0].run_next(), context=Context())
        await task
        ended = await client.batches.retrieve(batch.id)

    assert ended.status == status


PART = {"type": "text", "text": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("path", "field", "message"),
    [
        ("/v1/chat/completions", "messages", {"role": "user", "content": [PART] * 9}),
        ("/v1/chat/completions", "messages", {"role": "assistant", "tool_calls": [CALL] * 9}),
        ("/tokenize", "messages", {"role": "user", "content": [PART] * 9}),
        ("/v1/responses", "input", {"role": "user", "content": [PART] * 9}),
        ("/v1/messages", "messages", {"role": "user", "content": [PART] * 9}),
        ("/api/chat", "messages", {"role": "assistant", "content": "", "tool_calls": [CALL] * 9}),
    ],
)
async def test_parts_and_calls_are_counted_over_all_messages(
    path: str, field: str, message: dict[str, Any]
) -> None:
    """Two thousand messages with the maximum of parts would block the server for seconds."""
    limits = {"max_messages": 100, "max_parts": 9}
    fields = {"max_tokens": 1} if path == "/v1/messages" else {}
    server = FakeServer(
        config=make_server_config(limits=limits),
        plan=make_plan(max_model_len=10**6, num_pages=10**5),
    )
    async with make_client(server) as client:
        taken = await client.post(path, json={field: [message] * 88} | fields)
        nothing = await refusals_of(client)
        refused = await client.post(path, json={field: [message] * 89} | fields)
        counted = await refusals_of(client)

    assert (taken.status_code, nothing) == (200, [])
    assert (refused.status_code, counted) == (400, ["max_messages"])


async def test_a_conversation_that_is_gone_on_with_has_as_many_items_as_may_be_read() -> None:
    """Counting messages alone is too low: reasoning and the text after it form one message."""
    limits = {"max_messages": 10, "max_parts": 1}
    reasoning = {"type": "reasoning", "content": "a"}
    body: dict[str, Any] = {"input": [reasoning] * 10}
    async with make_client(FakeServer(config=make_server_config(limits=limits))) as client:
        for _ in range(8):
            body["previous_response_id"] = (await client.post("/v1/responses", json=body)).json()[
                "id"
            ]
        refused = await client.post("/v1/responses", json=body)

    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "previous_response_id")
