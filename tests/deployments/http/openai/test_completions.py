"""Responses of /v1/completions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from remora.engine.tokens.tokenizer import Tokenizer
from tests.deployments.fakes import FakeEngine, FakeServer
from tests.deployments.http.golden import check_golden
from tests.deployments.http.streams import ask
from tests.tiny_models import make_tiny_tokenizer

PATH = "/v1/completions"


post = partial(ask, PATH)
HERE = Path(__file__).parent
SCORED = {"prompt": "ab", "echo": True, "logprobs": 1}
CASES: dict[str, tuple[FakeServer, dict[str, Any]]] = {
    "completion": (FakeServer(), {"prompt": "ab", "max_tokens": 3}),
    "completion of the default length": (FakeServer(FakeEngine(text="x" * 17)), {"prompt": "ab"}),
    "completions with usage": (
        FakeServer(),
        {"prompt": ["ab", "cd"], "n": 2, "echo": True, "max_tokens": 1}
        | {"stream_options": {"include_usage": True}},
    ),
    "echo with logprobs": (FakeServer(), SCORED | {"max_tokens": 2}),
    "echoes with logprobs": (FakeServer(), SCORED | {"prompt": ["ab", "cd"], "max_tokens": 2}),
    "echo of ids without output": (
        FakeServer(),
        SCORED | {"prompt": [97, 98], "max_tokens": 0},
    ),
    "echo of a prompt that is cut": (
        FakeServer(),
        SCORED | {"prompt": "abcdef", "truncate_prompt_tokens": 2, "max_tokens": 1},
    ),
    "stop text": (FakeServer(FakeEngine(stopped_by="ri")), {"prompt": "ab", "max_tokens": 4}),
    # The engine computes one token, which is not part of the reply.
    "unwanted token": (
        FakeServer(FakeEngine(text="P", stopped_by=80)),
        {"prompt": "ab", "echo": True, "max_tokens": 0},
    ),
    "text and tier": (
        FakeServer(),
        {"prompt": [97, 98], "return_prompt_text": True, "service_tier": "auto"},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_it_has_always_been(name: str, stream: bool) -> None:
    server, fields = CASES[name]
    if not stream:
        fields = {key: value for key, value in fields.items() if key != "stream_options"}
    response = await post(server, **fields, stream=stream)
    check_golden(HERE, f"/v1/completions {name}{', streamed' * stream}", response)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_prompts_come_in_four_forms(prompt: Any, expected: list[list[int]]) -> None:
    server = FakeServer()

    response = await post(server, prompt=prompt)

    assert response.status_code == 200
    assert sorted(list(r.prompt_ids) for r in server.client.requests) == sorted(expected)


async def test_a_prompt_without_room_for_the_unwanted_token_is_told_so() -> None:
    server = FakeServer()
    limit = server.plan.max_sequence_tokens

    fits = await post(server, prompt="a" * (limit - 1), echo=True, max_tokens=0)
    response = await post(server, prompt="a" * limit, echo=True, max_tokens=0)

    assert fits.status_code == 200
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_offsets_index_the_text_of_the_answer() -> None:
    server = FakeServer(FakeEngine(text="abc"), tokenizer=Tokenizer(make_tiny_tokenizer()))

    (choice,) = (await post(server, prompt="é🙂 x", echo=True, logprobs=1)).json()["choices"]

    *prompt, first, second, third = choice["logprobs"]["text_offset"]
    assert prompt[0] == 0
    assert choice["text"][prompt[-1] :].startswith(("x", " x"))
    assert first == len("é🙂 x")
    # The fake engine's "abc" has the ids of other texts.
    widths = [len(server.tokenizer.token_text(ord(char))) for char in "ab"]
    assert [second - first, third - second] == widths


async def test_one_refused_prompt_refuses_the_call_and_ends_the_others() -> None:
    server = FakeServer(FakeEngine(limit=2))

    response = await post(server, prompt=["a", "b", "c"], stream=True)

    assert response.status_code == 429
    assert server.client.running == set()
