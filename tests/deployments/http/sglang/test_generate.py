"""Responses of /generate, in SGLang's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from remora.configs.planning.speculation_plan import SpeculationPlan
from remora.deployments.http.endpoints import GENERATE
from remora.deployments.http.generation.endpoint import stream
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.spec.counts import DraftCounts
from remora.engine.types import Output, Request
from tests.deployments.fakes import (
    EOS,
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
    make_plan,
    make_server_config,
)
from tests.deployments.http.golden import check_golden
from tests.deployments.http.streams import ask

HERE = Path(__file__).parent
ONE, PROMPTS = {"max_new_tokens": 1}, {"text": ["ab", "cd"]}
ALL_LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}


def params(**fields: Any) -> dict[str, Any]:
    return {"text": "ab", "sampling_params": fields}


CASES: dict[str, tuple[FakeServer, dict[str, Any]]] = {
    "text": (FakeServer(), params(max_new_tokens=3)),
    "n": (FakeServer(), params(n=2, max_new_tokens=1)),
    "sampling of each prompt": (
        FakeServer(),
        PROMPTS | {"sampling_params": [ONE, {"max_new_tokens": 3}]},
    ),
    "a list of one prompt": (FakeServer(), {"input_ids": [[1, 2]]}),
    "logprobs": (
        FakeServer(),
        params(max_new_tokens=1) | ALL_LOGPROBS | {"return_text_in_logprobs": True},
    ),
    "logprobs of the output": (FakeServer(), {"text": "ab", "return_logprob": True}),
    "logprobs of prompts and outputs": (
        FakeServer(),
        PROMPTS | ALL_LOGPROBS | {"sampling_params": {"max_new_tokens": 3, "n": 2}},
    ),
    "logprobs of one prompt of two": (
        FakeServer(),
        {
            **PROMPTS,
            "sampling_params": ONE,
            "return_logprob": [False, True],
            "logprob_start_len": [None, 1],
            "top_logprobs_num": [0, 2],
        },
    ),
    "no new tokens": (FakeServer(), params(max_new_tokens=0) | ALL_LOGPROBS),
    "stopped by a token": (FakeServer(FakeEngine(stopped_by=46)), {"text": "ab"}),
    "stopped by the end": (FakeServer(FakeEngine(text="a" + chr(EOS))), {"text": "ab"}),
    "stopped by a grammar": (FakeServer(), params(regex="Paris.")),
    "interval": (FakeServer(), params(stream_interval=3)),
    "interval of deltas": (
        FakeServer(config=make_config(stream_text="delta")),
        params(stream_interval=3),
    ),
    "name of a list of one prompt": (FakeServer(), {"text": ["ab"], "rid": ["mine"]}),
    "names of prompts": (FakeServer(), PROMPTS | {"rid": [None, "mine"]}),
}
NGRAM = SpeculationPlan(method="ngram", max_drafts=4, shortest=2, longest=5, max_bytes=2**20)
post = partial(ask, "/generate")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_it_has_always_been(name: str, stream: bool) -> None:
    server, fields = CASES[name]
    response = await post(server, **fields, stream=stream)
    check_golden(HERE, f"{name}, streamed" if stream else name, response)


async def test_an_event_stays_as_it_was_when_the_next_one_comes() -> None:
    server = ServerState.over(FakeServer())
    body = {"text": "ab", "stream": True, "return_logprob": True, "top_logprobs_num": 1}
    job, _ = await GENERATE.job(server, body, RequestContext(request_id="r1"))

    chunks = [chunk async for chunk in stream(server, job)]

    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert [len(chunk["meta_info"][name]) for chunk in chunks] == [1, 2, 3, 4, 5, 6]


class DraftingEngine(FakeEngine):
    """An engine whose tokens come one by one, each of them a right draft of two."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        async for output in super().generate(request):
            count = output.num_output_tokens * (1 + output.index)
            yield replace(output, drafts=DraftCounts(count, 2 * count, count))


async def test_drafts_are_counted_for_each_choice_so_far() -> None:
    server = FakeServer(DraftingEngine(), plan=make_plan(speculation=NGRAM))
    response = await post(
        server, text="ab", stream=True, sampling_params={"n": 2, "max_new_tokens": 3}
    )

    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line[6:7] == "{"]
    found = [
        {name: value for name, value in chunk["meta_info"].items() if name.startswith("spec_")}
        for chunk in chunks
    ]
    for chunk, counted in zip(chunks, found, strict=True):
        count = chunk["meta_info"]["completion_tokens"] * (1 + chunk["index"])
        assert counted == {
            "spec_verify_ct": count,
            "spec_accept_token_num": count,
            "spec_draft_token_num": 2 * count,
            "spec_accept_rate": 0.5,
            "spec_accept_length": 2.0,
        }
    assert len(found) == 6


async def test_without_speculation_there_are_no_drafts() -> None:
    response = await post(FakeServer(DraftingEngine()), text="ab")
    assert "spec_" not in response.text


async def test_get_works_like_post() -> None:
    async with make_client() as client:
        response = await client.request("GET", "/generate", json={"text": "ab"})
    assert response.json()["text"] == "Paris."


async def test_ignored_fields_of_sampling_params_are_reported() -> None:
    response = await post(text="ab", sampling_params={"temprature": 1}, foo=2)
    ignored = response.headers["x-remora-ignored-fields"].split(", ")
    assert set(ignored) == {"sampling_params[0].temprature", "foo"}


@pytest.mark.observes("api.stream_text")
async def test_a_stream_of_deltas_holds_each_thing_once() -> None:
    server = FakeServer(config=make_config(stream_text="delta"))
    response = await post(server, **params(max_new_tokens=3) | ALL_LOGPROBS, stream=True)
    check_golden(HERE, "deltas, streamed", response)


async def test_prompts_of_one_request_have_constraints_and_limits_of_their_own() -> None:
    server = FakeServer()
    stops = {"stop_regex": "x{1,3}", "min_new_tokens": 3}

    await post(server, text=["ab", "cd"], sampling_params=[{"regex": "a+"}, stops])

    held, free = sorted(server.client.requests, key=lambda request: list(request.prompt_ids))
    assert (held.grammar is None, free.grammar is None) == (False, True)
    assert (free.sampling.stop_regex, free.sampling.min_tokens) == (("x{1,3}",), 3)


@pytest.mark.parametrize(
    ("path", "fields", "heals"),
    [
        ("/generate", {"text": "ab"}, True),
        ("/generate", {"input_ids": [97, 98]}, False),
        ("/generate", {"text": "ab", "sampling_params": {"regex": "a+"}}, False),
        ("/generate", {"text": "ab", "return_logprob": True, "logprob_start_len": 0}, False),
        ("/v1/completions", {"prompt": "text"}, True),
        ("/v1/completions", {"prompt": [1, 2]}, False),
        ("/v1/completions", {"prompt": "text", "regex": "a"}, False),
        ("/v1/completions", {"prompt": "text", "echo": True, "logprobs": 1}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, False),
    ],
)
@pytest.mark.observes("grammar.token_healing")
async def test_only_a_text_that_nothing_else_is_asked_of_is_healed(
    path: str, fields: dict[str, Any], heals: bool
) -> None:
    server = FakeServer(config=make_server_config(grammar={"token_healing": True}))
    usual = FakeServer()
    await ask(path, server, **fields)
    await ask(path, usual, **fields)
    assert (server.client.requests[0].heal, usual.client.requests[0].heal) == (heals, False)


@pytest.mark.parametrize(("name", "num_aborted"), [("one", 1), ("call", 2), ("other", 0)])
async def test_a_prompt_is_aborted_by_its_name_and_all_by_the_calls(
    name: str, num_aborted: int
) -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    body = {"text": ["ab", "cd"], "rid": ["one", "two"], "stream": True}
    state = ServerState.over(server)
    job, _ = await GENERATE.job(state, body, RequestContext(request_id="call"))
    outputs = await state.calls.open(job.context, job.requests)
    while len(server.client.running) < 2:
        await asyncio.sleep(0)

    found = await state.calls.abort(name)
    await outputs.aclose()

    assert found == num_aborted
    assert await state.calls.abort(name) == 0
