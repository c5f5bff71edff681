"""Chats and text completions as clients of other servers send them: requests, statuses, shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from remora.deployments.http.core.fields import HintsBody, StreamHints
from remora.engine.types import FinishReason, Output, Request
from tests.deployments.fakes import EOS, FakeEngine, FakeServer, make_config
from tests.deployments.http.conformance import ABSENT, Row, check_row
from tests.deployments.http.streams import ask, events, prompt_of

CHAT, COMPLETIONS, BATCH = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"
HELLO = [{"role": "user", "content": "Hi"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "Well, "}]
VLLM, SGLANG, TGI = "vLLM, OpenAI-compatible server", "SGLang, OpenAI APIs", "TGI, Messages API"
OPENAI = "OpenAI, API reference, chat completions"
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits files"}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\""}}\n</tool_call>'
CALLED = {"id": str, "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STATES = FakeServer(config=make_config(hidden_states=True))


def says(text: str, **api: Any) -> FakeServer:
    config = make_config(**{"tool_parser": "hermes"} | api)
    return FakeServer(FakeEngine(text=text), config=config)


def chat(source: str, answer: Any, status: int = 200, **fields: Any) -> Row:
    return Row(source, CHAT, {"messages": HELLO, **fields}, status, answer)


def text(source: str, answer: Any, status: int = 200, **fields: Any) -> Row:
    return Row(source, COMPLETIONS, {"prompt": "ab", **fields}, status, answer)


def refusal(param: str, message: Any = str) -> dict[str, Any]:
    return {"error": {"param": param, "message": message}}


def choice(**shape: Any) -> dict[str, Any]:
    return {"choices": [shape]}


TABLE: dict[str, tuple[FakeServer, Row]] = {
    "fingerprint": (FakeServer(), chat(OPENAI, {"system_fingerprint": str})),
    "fields that are absent": (
        FakeServer(),
        chat(VLLM, choice(message={"reasoning": ABSENT}, token_ids=ABSENT)),
    ),
    "fields that are null": (
        says("ab", null_fields=True),
        chat(
            VLLM,
            choice(message={"reasoning": None, "reasoning_content": None}, token_ids=None)
            | {"prompt_logprobs": None},
        ),
    ),
    "null fields of a completion": (
        says("ab", null_fields=True),
        text(VLLM, choice(prompt_logprobs=None, token_ids=None, prompt_token_ids=None)),
    ),
    "unknown model": (FakeServer(), chat(OPENAI, refusal("model"), 404, model="dummy")),
    "any model": (
        says("ab", any_model_name=True),
        chat(TGI, {"model": "tiny"}, model="dummy"),
    ),
    "what ended it": (
        FakeServer(FakeEngine(text="ab", stopped_by="x")),
        chat(SGLANG, choice(finish_reason="stop", matched_stop="x", stop_reason="x")),
    ),
    "what ended it, a limit": (FakeServer(), chat(SGLANG, choice(matched_stop=None), max_tokens=1)),
    "foreign stop ids": (FakeServer(), chat(VLLM, {"choices": list}, stop_token_ids=[151643])),
    "schema of json": (
        FakeServer(),
        chat(TGI, {"choices": list}, response_format={"type": "json", "value": SCHEMA}),
    ),
    "named schema": (
        FakeServer(),
        chat(
            TGI,
            {"choices": list},
            response_format={"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}},
        ),
    ),
    "regex": (
        FakeServer(),
        chat(TGI, {"choices": list}, response_format={"type": "regex", "value": "a+"}),
    ),
    "two schemas": (
        FakeServer(),
        chat(
            TGI,
            refusal("response_format.value"),
            400,
            response_format={"type": "json", "schema": SCHEMA, "value": SCHEMA},
        ),
    ),
    "unknown format": (
        FakeServer(),
        chat(OPENAI, refusal("response_format.type"), 400, response_format={"type": "xml"}),
    ),
    "bias out of range": (
        FakeServer(),
        chat(
            OPENAI,
            refusal("logit_bias", "logit_bias must have values between -100 and 100; 101 of token "
                    "7 found."),
            400,
            logit_bias={"7": 101},
        ),
    ),
    "hidden states": (STATES, chat(SGLANG, choice(hidden_states=list), return_hidden_states=True)),
    "hidden states of a completion": (
        STATES,
        text(SGLANG, choice(hidden_states=[float, float]), return_hidden_states=True, max_tokens=3),
    ),
    "hidden states that are off": (
        FakeServer(),
        chat(SGLANG, refusal("return_hidden_states"), 400, return_hidden_states=True),
    ),
    "all likely tokens": (
        FakeServer(),
        chat(
            VLLM,
            refusal("prompt_logprobs", "prompt_logprobs: -1 asks for all 257 tokens of the "
                    "vocabulary; at most 20 are allowed (limits.max_top_logprobs)."),
            400,
            prompt_logprobs=-1,
        ),
    ),
    "repetitions": (
        FakeServer(),
        chat(VLLM, refusal("repetition_detection"), 400, repetition_detection={"min_count": 2}),
    ),
    "arguments of plug-ins": (
        FakeServer(), chat(VLLM, refusal("vllm_xargs"), 400, vllm_xargs={"a": 1})
    ),
    "custom tool": (
        says(PATCH_CALL),
        chat(
            OPENAI,
            choice(message={"content": None, "tool_calls": [CALLED]}, finish_reason="tool_calls"),
            tools=[PATCH, ADD],
        ),
    ),
    "custom tool by name": (
        says('{"input": "a \\"b\\""}'),
        chat(
            OPENAI,
            choice(message={"tool_calls": [CALLED]}),
            tools=[PATCH],
            tool_choice={"type": "custom", "custom": {"name": "patch"}},
        ),
    ),
    "custom tool with a grammar": (
        FakeServer(),
        chat(
            OPENAI,
            refusal("tools[0].custom.format"),
            400,
            tools=[{"type": "custom", "custom": {"name": "a", "format": GRAMMAR}}],
        ),
    ),
    "tool of another type": (
        FakeServer(), chat(OPENAI, refusal("tools[0].type"), 400, tools=[{"type": "web_search"}])
    ),
    "custom tool without a body": (
        FakeServer(), chat(OPENAI, refusal("tools[0].custom"), 400, tools=[{"type": "custom"}])
    ),
    "tool named by a text": (
        says("{}"),
        chat(TGI, choice(message={"tool_calls": [dict]}), tools=[ADD], tool_choice="add"),
    ),
    "unknown tool named by a text": (
        says("{}"), chat(TGI, refusal("tool_choice"), 400, tools=[ADD], tool_choice="sub")
    ),
    "named tool that is cut off": (
        says('{"a": 1}'),
        chat(
            VLLM,
            choice(
                message={"tool_calls": [{"function": {"name": "add", "arguments": '{"a'}}]},
                finish_reason="length",
            ),
            tools=[ADD],
            tool_choice="add",
            max_tokens=3,
        ),
    ),
    "named tool that is cut off at once": (
        says('  {"a": 1}'),
        chat(
            VLLM,
            choice(message={"tool_calls": [{"function": {"name": "add", "arguments": ""}}]}),
            tools=[ADD],
            tool_choice="add",
            max_tokens=2,
        ),
    ),
    "echo": (
        says("then."),
        Row(VLLM, CHAT, {"messages": BEGUN, "echo": True}, 200,
            choice(message={"content": "Well, then."})),
    ),
    "echo of the user": (
        says("then."), chat(VLLM, choice(message={"content": "then."}), echo=True)
    ),
    "two conversations": (
        says("ab"),
        Row(VLLM, BATCH, {"messages": [HELLO, BEGUN], "n": 2}, 200,
            {"choices": [{"index": n, "message": {"content": "ab"}} for n in range(4)],
             "usage": {"completion_tokens": 8, "prompt_tokens": 65}}),
    ),
    "a conversation of no messages": (
        FakeServer(),
        Row(VLLM, BATCH, {"messages": [HELLO, []]}, 400, refusal("messages[1]")),
    ),
    "streamed conversations": (
        FakeServer(),
        Row(VLLM, BATCH, {"messages": [HELLO], "stream": True}, 400, refusal("stream")),
    ),
    "conversations that are too long": (
        FakeServer(),
        Row(VLLM, BATCH, {"messages": [HELLO, [HELLO[0] | {"content": "a" * 2000}]]}, 400,
            refusal("messages[1]")),
    ),
}  # fmt: skip


@pytest.mark.observes("api.any_model_name")
@pytest.mark.observes("api.null_fields")
@pytest.mark.parametrize("name", TABLE)
async def test_a_request_has_its_status_and_shape(name: str) -> None:
    server, row = TABLE[name]
    await check_row(row, server)


# -- fields without effect ---------------------------------------------------------------------

HINTS: dict[str, Any] = {
    "user": "me",
    "safety_identifier": "a",
    "session_id": "b",
    "prompt_cache_key": "c",
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "verbosity": "high",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_hint_changes_neither_the_request_nor_the_answer(path: str) -> None:
    assert HINTS.keys() == HintsBody.model_fields.keys()
    assert list(StreamHints.model_fields) == ["include_obfuscation"]
    body = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    hinted = {**stream["stream_options"], "include_obfuscation": True}  # type: ignore[dict-item]
    server = FakeServer()

    plain = events(await ask(path, server, **body, **stream))
    answer = await ask(path, server, **body, **HINTS, stream=True, stream_options=hinted)

    assert "x-remora-ignored-fields" not in answer.headers
    chunks = [{k: v for k, v in c.items() if k != "service_tier"} for c in events(answer)]
    assert [c | {"created": 0} for c in chunks] == [c | {"created": 0} for c in plain]
    first, second = server.client.requests
    assert replace(second, request_id=first.request_id) == first


async def test_a_prediction_without_speculation_is_reported_as_ignored() -> None:
    prediction = {"type": "content", "content": "abc"}
    config = make_config(unknown_fields="reject")

    answer = await ask(CHAT, FakeServer(config=config), messages=HELLO, prediction=prediction)

    assert answer.status_code == 200
    assert answer.headers["x-remora-ignored-fields"] == "prediction"


# -- roles, and calls of earlier turns ---------------------------------------------------------


async def test_templates_decide_about_roles_and_custom_calls_are_shown_to_them() -> None:
    server = says("ok")
    called = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    messages = [
        {"role": "critic", "content": "no"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]

    answer = await ask(CHAT, server, messages=messages)
    refused = await ask(CHAT, server, messages=[{"role": "a|>b", "content": "x"}])

    assert answer.status_code == 200, answer.text
    assert prompt_of(server).startswith("<|critic|>no<|assistant|>")
    call = server.tokenizer.rendered[0]["messages"][1]["tool_calls"][0]["function"]
    assert call == {"name": "patch", "arguments": {"input": "x"}}
    assert refused.json()["error"]["param"] == "messages[0].role"


async def test_a_role_that_the_template_drops_is_refused() -> None:
    server = FakeServer()
    render = server.tokenizer.render_chat
    server.tokenizer.render_chat = lambda messages, **kwargs: render(
        [message for message in messages if message["role"] == "user"], **kwargs
    )
    messages = [*HELLO, {"role": "critic", "content": "Never!"}]

    answer = await ask(CHAT, server, messages=messages)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].role"


# -- streams -----------------------------------------------------------------------------------


class Stepping(FakeEngine):
    """An engine of which each step gives three tokens, and whose last token is hidden."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        lines = self._lines(request.sampling.logprobs, 97)
        for step, said in enumerate(("abc", "de")):
            ids = tuple(map(ord, said)) + ((EOS,) if step else ())
            yield Output(
                index=0,
                token_ids=ids,
                text=said,
                logprobs=None if lines is None else lines * 3,
                finish_reason=FinishReason.STOP if step else None,
                num_output_tokens=3 * step + 3,
            )


@pytest.mark.observes("api.chunk_per_token")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_token_may_have_a_chunk(path: str) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def chunks(**api: Any) -> list[tuple[str, int]]:
        server = FakeServer(Stepping(), config=make_config(**api))
        fields = {"stream": True, "stream_options": options}
        found = events(await ask(path, server, **body, **fields))
        pieces = [(c["choices"][0], c["usage"]["completion_tokens"]) for c in found[:-1]]
        return [
            (piece["delta"].get("content", "-") if path == CHAT else piece["text"], count)
            for piece, count in pieces
        ]

    each = [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("", 6)]
    begun, ended = ([("", 0)], [("-", 6)]) if path == CHAT else ([], [])
    assert await chunks(chunk_per_token=True) == [*begun, *each, *ended]
    assert await chunks() == [*begun, ("abc", 3), ("de", 6), *ended]


@pytest.mark.observes("api.system_fingerprint")
async def test_the_fingerprint_may_be_a_text_or_absent() -> None:
    async def of(**api: Any) -> Any:
        answer = await ask(CHAT, says("ab", **api), messages=HELLO)
        return answer.json().get("system_fingerprint")

    assert (await of()).startswith("fp_")
    assert await of(system_fingerprint="release-7") == "release-7"
    assert await of(system_fingerprint="none") is None


@pytest.mark.observes("api.stream_usage")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_operator_may_want_usage_in_all_streams(path: str) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "a"}

    async def usages(stream_usage: str) -> list[Any]:
        server = says("ab", stream_usage=stream_usage)
        found = events(await ask(path, server, **body, stream=True))
        return [chunk.get("usage", "-") and chunk.get("usage", "-") for chunk in found]

    assert set(await usages("on_request")) == {"-"}
    *chunks, last = await usages("final")
    assert set(chunks) == {None}
    assert last["completion_tokens"] == 2
    assert None not in await usages("continuous")


async def test_the_last_delta_may_have_an_empty_content() -> None:
    found = events(await ask(CHAT, says("ab", null_fields=True), messages=HELLO, stream=True))

    assert found[-1]["choices"][0]["delta"] == {"content": ""}
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


async def test_an_echo_and_a_custom_call_are_streamed_whole() -> None:
    fields = {"messages": BEGUN, "echo": True, "tools": [PATCH, ADD], "stream": True}

    found = events(await ask(CHAT, says(f"ok{PATCH_CALL}"), **fields))

    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    said = "".join(delta.get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert said == "Well, ok"
    assert calls[0] | {"id": ""} == {
        "index": 0,
        "id": "",
        "type": "custom",
        "custom": {"name": "patch", "input": ""},
    }
    assert calls[1:] == [{"index": 0, "custom": {"input": 'a "b"'}}]


async def test_echoed_prompts_have_log_probabilities_for_each_of_n() -> None:
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "n": 2, "stream": True, "max_tokens": 2}

    for engine in (FakeEngine(), Reversed()):
        found = events(await ask(COMPLETIONS, FakeServer(engine), **fields))
        for index in (0, 1):
            own = [c["choices"][0] for c in found if c["choices"][0]["index"] == index]
            tokens = [token for piece in own for token in piece["logprobs"]["tokens"]]
            assert tokens == ["a", "b", "P", "a"]
            assert own[0]["logprobs"]["token_logprobs"][:2] == [None, -2.0]


class Reversed(FakeEngine):
    """An engine whose later outputs arrive before the first one's."""

    def _outputs(self, request: Request) -> list[Output]:
        return sorted(super()._outputs(request), key=lambda output: -output.index)


# -- log-probabilities -------------------------------------------------------------------------


class SameTexts(FakeEngine):
    """An engine of which three likely tokens have the same text."""

    def _lines(self, k: int | None, token_id: int) -> Any:
        lines = super()._lines(k, token_id)
        return lines and tuple(
            replace(line, top=((1, -0.1), (token_id, -0.5), (2, -0.6))) for line in lines
        )


async def test_the_chosen_token_is_first_and_equal_texts_stay_apart() -> None:
    server = FakeServer(SameTexts(text="a"))
    server.tokenizer.token_text = lambda id_: chr(id_) if id_ > 9 else "\ufffd"

    answer = await ask(COMPLETIONS, server, prompt="ab", logprobs=3, max_tokens=1)

    (top,) = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("a", -0.5), ("\ufffd", -0.1), ("token_id:2", -0.6)]


class Asked(FakeEngine):
    """An engine that gives log-probabilities of the tokens that requests ask for."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        asked = tuple((id_, -float(id_)) for id_ in request.sampling.logprob_token_ids)
        async for output in super().generate(request):
            lines = output.logprobs and tuple(replace(x, asked=asked) for x in output.logprobs)
            yield replace(output, logprobs=lines)


async def test_tokens_that_are_asked_for_follow_the_likely_ones() -> None:
    server, ids = FakeServer(Asked(text="a")), {"logprob_token_ids": [98, 97]}

    chat = await ask(CHAT, server, messages=HELLO, logprobs=True, top_logprobs=2, **ids)
    text = await ask(COMPLETIONS, server, prompt="a", logprobs=1, max_tokens=1, **ids)
    refused = [
        await ask(CHAT, server, messages=HELLO, **ids),
        await ask(CHAT, server, messages=HELLO, logprobs=True, logprob_token_ids=[257]),
        await ask(COMPLETIONS, server, prompt="a", **ids),
    ]

    (line,) = chat.json()["choices"][0]["logprobs"]["content"]
    found = [(entry["token"], entry["logprob"]) for entry in line["top_logprobs"]]
    assert found == [("a", -0.5), ("!", -1.5), ("b", -98.0)]
    (top,) = text.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("a", -0.5), ("b", -98.0)]
    for answer in refused:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logprob_token_ids"


async def test_the_native_api_has_tokens_that_are_asked_for_at_each_position() -> None:
    async def meta(**fields: Any) -> Any:
        sampling = {"sampling_params": {"max_new_tokens": 2}}
        return (await ask("/generate", FakeServer(Asked()), **sampling, **fields)).json()

    ids = {"token_ids_logprob": [98], "return_logprob": True, "return_text_in_logprobs": True}
    one = await meta(text="ab", **ids)
    each = await meta(text=["a", "b"], return_logprob=True, token_ids_logprob=[[98], [99, 33]])
    refused = [
        await meta(text="a", token_ids_logprob=[98]),
        await meta(text="a", return_logprob=True, token_ids_logprob=[257]),
        await meta(text="a", return_logprob=True, token_ids_logprob=[[1], [2]]),
        await meta(text="a", return_logprob=True, token_ids_logprob="x"),
    ]

    assert one["meta_info"]["output_token_ids_logprobs"] == [[[-98.0, 98, "b"]]] * 2
    found = [answer["meta_info"]["output_token_ids_logprobs"][0] for answer in each]
    assert found == [[[-98.0, 98, None]], [[-99.0, 99, None], [-33.0, 33, None]]]
    assert [answer["error"]["param"] for answer in refused] == ["token_ids_logprob"] * 4


@pytest.mark.observes("api.tokens_as_ids")
async def test_tokens_may_be_ids_unless_a_request_says_otherwise() -> None:
    async def token(**fields: Any) -> Any:
        server = says("a", tokens_as_ids=True)
        answer = await ask(CHAT, server, messages=HELLO, logprobs=True, **fields)
        return answer.json()["choices"][0]["logprobs"]["content"][0]["token"]

    assert await token() == "token_id:97"
    assert await token(return_tokens_as_token_ids=False) == "a"


# -- OpenAI's types ----------------------------------------------------------------------------


async def test_answers_and_chunks_are_those_of_the_openai_client() -> None:
    server = says("ab", null_fields=True, stream_usage="final")

    whole = await ask(CHAT, server, messages=HELLO, logprobs=True, service_tier="priority")
    chunks = events(await ask(CHAT, server, messages=HELLO, stream=True))
    calls = await ask(CHAT, says(PATCH_CALL), messages=HELLO, tools=[PATCH])

    ChatCompletion.model_validate(whole.json(), strict=True)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    found = ChatCompletion.model_validate(calls.json(), strict=True)
    call = (found.choices[0].message.tool_calls or [])[0]
    assert call.type == "custom"
    assert call.custom.input == 'a "b"'
