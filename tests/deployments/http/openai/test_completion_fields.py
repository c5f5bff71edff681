"""Less common fields of text completions: best_of, suffix, truncated and healed prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from remora.engine.types import Output, Request
from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
)
from tests.deployments.http.streams import ask, prompt_of

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


async def post(
    server: FakeServer | None = None, *, path: str = PATH, **body: Any
) -> httpx.Response:
    return await ask(path, server, **body)


class RankedEngine(FakeEngine):
    """An engine whose sequence i of n has tokens of log-probability -|i - 2| and the text i."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        async for output in super().generate(request):
            lines = tuple(
                replace(line, logprob=-abs(output.index - 2.0)) for line in output.logprobs or ()
            )
            text = str(output.index) if output.finish_reason else ""
            yield replace(output, text=text, logprobs=lines or None)


async def test_the_likeliest_of_best_of_come_first_and_all_tokens_count() -> None:
    server = FakeServer(RankedEngine(text="abc"))

    body = (await post(server, prompt=["x", "y"], best_of=4, n=2)).json()

    found = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert found == [(0, "2"), (1, "1"), (2, "2"), (3, "1")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 2 * 4 * 3
    assert [request.sampling.n for request in server.client.requests] == [4, 4]


class FimTokenizer(CharTokenizer):
    """A tokenizer with fill-in-the-middle tokens."""

    added_tokens = MappingProxyType(
        {1: "<fim_prefix>", 2: "<fim_suffix>", 3: "<fim_middle>", 4: "<other>"}
    )


async def test_a_suffix_is_told_in_the_models_marks() -> None:
    server = FakeServer(tokenizer=FimTokenizer())

    response = await post(server, prompt="def f(", suffix="return 1")

    assert response.status_code == 200
    assert prompt_of(server) == "<fim_prefix>def f(<fim_suffix>return 1<fim_middle>"


@pytest.mark.parametrize(
    ("tokenizer", "fields", "param"),
    [
        (CharTokenizer(), {}, "suffix"),
        (FimTokenizer(), {"echo": True}, "echo"),
        (FimTokenizer(), {"prompt": [1, 2]}, "suffix"),
    ],
)
async def test_a_suffix_that_cannot_be_is_refused(
    tokenizer: CharTokenizer, fields: dict[str, Any], param: str
) -> None:
    server = FakeServer(tokenizer=tokenizer)

    response = await post(server, **{"prompt": "a", "suffix": "b"} | fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "hij"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "hij"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 30}, "abcdefghij"),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_is_cut_to_the_tokens_that_are_asked_for(
    fields: dict[str, Any], kept: str, as_ids: bool
) -> None:
    server = FakeServer()
    text = "abcdefghij"

    prompt = list(map(ord, text)) if as_ids else text
    answer = (await post(server, prompt=prompt, max_tokens=1, **fields)).json()

    assert prompt_of(server) == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)


async def test_a_prompt_too_long_for_the_context_can_be_cut_to_what_fits() -> None:
    server = FakeServer()
    text = "a" * 100_000 + "end"

    response = await post(server, prompt=text, max_tokens=10, truncate_prompt_tokens=-1)

    assert response.status_code == 200
    assert len(server.client.requests[0].prompt_ids) == 990
    assert prompt_of(server).endswith("end")


async def test_a_chats_prompt_can_be_cut_too() -> None:
    server = FakeServer()

    await post(server, path=CHAT, messages=HELLO, truncate_prompt_tokens=13)

    assert prompt_of(server) == "<|assistant|>"
