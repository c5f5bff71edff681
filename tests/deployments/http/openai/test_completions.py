"""Responses of /v1/completions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from remora.engine.tokens.tokenizer import Tokenizer
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_plan
from tests.deployments.http.streams import events
from tests.tiny_models import make_tiny_tokenizer

PATH = "/v1/completions"


async def post(server: FakeServer | None = None, **body: Any) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post(PATH, json=body, headers={"x-request-id": "r1"})


async def test_an_answer_holds_text_reason_and_usage() -> None:
    unlimited = (await post(FakeServer(FakeEngine(text="x" * 50)), prompt="ab")).json()
    body = (await post(prompt="ab", max_tokens=3)).json()

    assert unlimited["usage"]["completion_tokens"] == 16  # the default

    body.pop("created")
    assert body == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Par",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


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


async def test_answer_j_to_prompt_i_has_the_index_i_times_n_plus_j() -> None:
    body = (await post(prompt=["ab", "cd", "ef"], n=2, echo=True, max_tokens=1)).json()

    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(0, "abP"), (1, "abP"), (2, "cdP"), (3, "cdP"), (4, "efP"), (5, "efP")]


async def test_a_stream_has_no_role_and_ends_with_reason_usage_and_done() -> None:
    options = {"include_usage": True}
    response = await post(prompt="ab", max_tokens=2, stream=True, stream_options=options)

    chunks = events(response)
    blank = {"index": 0, "logprobs": None}
    assert [chunk["choices"] for chunk in chunks] == [
        [blank | {"text": "P", "finish_reason": None}],
        [blank | {"text": "a", "finish_reason": "length", "stop_reason": None}],
        [],
    ]
    assert [chunk["usage"] is None for chunk in chunks] == [True, True, False]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_echo_with_logprobs_covers_prompt_and_output() -> None:
    body = (await post(prompt="ab", echo=True, logprobs=1, max_tokens=2)).json()

    assert body["choices"][0]["text"] == "abPa"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "P", "a"],
        "token_logprobs": [None, -2.0, -0.5, -0.5],
        "top_logprobs": [None, {"!": -0.25, "b": -2.0}, {"P": -0.5}, {"a": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }


async def test_echo_of_ids_without_output_scores_the_prompt_alone() -> None:
    body = (await post(prompt=[97, 98], echo=True, logprobs=1, max_tokens=0)).json()

    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -2.0]
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unwanted_token_ends_nothing(stream: bool) -> None:
    server = FakeServer(FakeEngine(text="P", stopped_by=80))

    response = await post(server, prompt="ab", echo=True, max_tokens=0, stream=stream)

    choice = (events(response)[-1] if stream else response.json())["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


async def test_a_prompt_without_room_for_the_unwanted_token_is_told_so() -> None:
    server = FakeServer()
    limit = server.plan.max_sequence_tokens

    fits = await post(server, prompt="a" * (limit - 1), echo=True, max_tokens=0)
    response = await post(server, prompt="a" * limit, echo=True, max_tokens=0)

    assert fits.status_code == 200
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_log_probabilities_are_bounded_in_all() -> None:
    server = FakeServer(plan=make_plan(max_model_len=40_000, num_pages=4000))
    fields: dict[str, Any] = {"prompt": "ab", "logprobs": 20}

    taken = await post(server, **fields, max_tokens=20_000)
    too_many = await post(server, **fields, max_tokens=20_000, n=3)
    not_asked_for = await post(server, prompt="ab", max_tokens=20_000, n=3)
    prompts = {"prompt": ["a" * 30_000] * 4, "echo": True, "logprobs": 20, "max_tokens": 0}
    too_long = await post(server, **prompts)

    assert (taken.status_code, not_asked_for.status_code) == (200, 200)
    for refused in (too_many, too_long):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


async def test_streamed_pieces_add_up_to_the_whole_answer() -> None:
    fields: dict[str, Any] = {"prompt": ["ab", "cd"], "echo": True, "logprobs": 2, "max_tokens": 3}
    whole = (await post(**fields)).json()["choices"]
    pieces = [chunk["choices"][0] for chunk in events(await post(**fields, stream=True))]

    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [item for piece in own for item in piece["logprobs"][key]]
            assert joined == choice["logprobs"][key]


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
