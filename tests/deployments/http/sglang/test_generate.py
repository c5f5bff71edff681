"""Responses of /generate, in SGLang's format."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from remora.deployments.http.endpoints import GENERATE
from remora.deployments.http.generation.endpoint import stream
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import (
    EOS,
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
    make_plan,
    make_server_config,
)
from tests.deployments.http.streams import events


async def post(server: FakeServer | None = None, **body: Any) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post("/generate", json=body, headers={"x-request-id": "r1"})


async def test_an_answer_holds_text_ids_and_meta_info() -> None:
    body = (await post(text="ab", sampling_params={"max_new_tokens": 2})).json()

    assert body["meta_info"].pop("e2e_latency") >= 0
    assert body == {
        "text": "Pa",
        "output_ids": [80, 97],
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "cached_tokens": 2,
            "weight_version": "default",
        },
    }


async def test_a_stream_repeats_everything_so_far() -> None:
    chunks = events(await post(text="ab", stream=True, sampling_params={"max_new_tokens": 3}))

    assert [chunk["text"] for chunk in chunks] == ["P", "Pa", "Par"]
    assert [chunk["output_ids"] for chunk in chunks] == [[80], [80, 97], [80, 97, 114]]
    assert [c["meta_info"]["finish_reason"] is None for c in chunks] == [True, True, False]


async def test_n_gives_a_list_and_indexed_events() -> None:
    fields: dict[str, Any] = {"text": "ab", "sampling_params": {"n": 2, "max_new_tokens": 1}}

    whole = (await post(**fields)).json()
    chunks = events(await post(**fields, stream=True))

    assert [answer["text"] for answer in whole] == ["P", "P"]
    assert [chunk["index"] for chunk in chunks] == [0, 1]


async def test_each_prompt_of_a_batch_may_have_its_own_sampling() -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 3}]
    body = (await post(text=["ab", "cd"], sampling_params=params)).json()
    ids = (await post(input_ids=[[1, 2]])).json()
    assert [answer["text"] for answer in body] == ["P", "Par"]
    assert len(ids) == 1


async def test_logprobs_of_prompt_and_output() -> None:
    body = await post(
        text="ab",
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )

    bare = (await post(text="ab", return_logprob=True)).json()["meta_info"]
    assert bare["input_token_logprobs"] == []
    assert bare["output_token_logprobs"][0] == [-0.5, 80, None]
    meta = body.json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-2.0, 98, "b"]]
    assert meta["output_token_logprobs"] == [[-0.5, 80, "P"]]
    assert meta["input_top_logprobs"] == [None, [[-0.25, 33, "!"]]]
    assert meta["output_top_logprobs"] == [[[-0.5, 80, "P"]]]


async def test_a_streams_last_event_holds_the_logprobs_of_the_whole_answer() -> None:
    fields: dict[str, Any] = {
        "text": ["ab", "cd"],
        "sampling_params": {"max_new_tokens": 3, "n": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }

    whole = (await post(**fields)).json()
    chunks = events(await post(**fields, stream=True))

    last = {chunk["index"]: chunk["meta_info"] for chunk in chunks}
    for index, answer in enumerate(whole):
        for side in ("input", "output"):
            for kind in ("token", "top"):
                name = f"{side}_{kind}_logprobs"
                assert last[index][name] == answer["meta_info"][name]
    own = [c["meta_info"]["output_token_logprobs"] for c in chunks if c["index"] == 1]
    assert [len(lines) for lines in own] == [1, 2, 3]


async def test_an_event_stays_as_it_was_when_the_next_one_comes() -> None:
    server = ServerState.over(FakeServer())
    body = {"text": "ab", "stream": True, "return_logprob": True, "top_logprobs_num": 1}
    job, _ = await GENERATE.job(server, body, "r1")

    chunks = [chunk async for chunk in stream(server, job)]

    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert [len(chunk["meta_info"][name]) for chunk in chunks] == [1, 2, 3, 4, 5, 6]


async def test_streamed_log_probabilities_have_a_lower_limit() -> None:
    server = FakeServer(plan=make_plan(max_model_len=40_000, num_pages=4000))
    fields: dict[str, Any] = {"text": "ab", "return_logprob": True, "top_logprobs_num": 20}
    fields["sampling_params"] = {"max_new_tokens": 2000}

    whole = await post(server, **fields)
    streamed = await post(server, **fields, stream=True)

    assert whole.status_code == 200
    assert streamed.status_code == 400
    assert streamed.json()["error"]["param"] == "top_logprobs_num"


@pytest.mark.parametrize(
    ("engine", "params", "matched"),
    [
        (FakeEngine(stopped_by=46), {}, 46),
        (FakeEngine(text="a" + chr(EOS)), {}, EOS),
        (FakeEngine(), {"regex": "Paris."}, None),  # a grammar ended it
    ],
)
async def test_a_stop_names_what_matched(
    engine: FakeEngine, params: dict[str, Any], matched: int | None
) -> None:
    body = (await post(FakeServer(engine), text="ab", sampling_params=params)).json()
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


@pytest.mark.parametrize(
    ("text", "rid", "ids"),
    [(["ab"], ["mine"], ["mine"]), (["ab", "cd"], [None, "mine"], ["r1_0", "mine"])],
)
async def test_prompts_have_their_own_ids_or_those_of_the_request(
    text: list[str], rid: list[str | None], ids: list[str]
) -> None:
    body = (await post(text=text, rid=rid)).json()
    assert [answer["meta_info"]["id"] for answer in body] == ids


@pytest.mark.parametrize(
    "field", ["rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"]
)
@pytest.mark.parametrize("length", [0, 1, 3])
async def test_a_list_is_as_long_as_the_prompts_are_many(field: str, length: int) -> None:
    fields: dict[str, Any] = {field: [None] * length}
    response = await post(text=["ab", "cd"], **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_get_works_like_post() -> None:
    async with make_client() as client:
        response = await client.request("GET", "/generate", json={"text": "ab"})
    assert response.json()["text"] == "Paris."


async def test_a_body_of_an_old_vllm_is_told_so() -> None:
    error = (await post(None, prompt="ab")).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "unsupported")


async def test_ignored_fields_of_sampling_params_are_reported() -> None:
    response = await post(text="ab", sampling_params={"temprature": 1}, foo=2)
    ignored = response.headers["x-remora-ignored-fields"].split(", ")
    assert set(ignored) == {"sampling_params[0].temprature", "foo"}


async def test_no_new_tokens_give_what_is_known_of_the_prompt() -> None:
    fields: dict[str, Any] = {
        "text": "ab",
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }

    whole = (await post(**fields)).json()
    (event,) = events(await post(**fields, stream=True))

    for answer in (whole, event):
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["input_token_logprobs"] == [[None, 97, None], [-2.0, 98, None]]


@pytest.mark.observes("api.stream_text")
async def test_a_stream_of_deltas_holds_each_thing_once() -> None:
    server = FakeServer(config=make_config(stream_text="delta"))
    chunks = events(
        await post(
            server,
            text="ab",
            stream=True,
            return_logprob=True,
            logprob_start_len=1,
            top_logprobs_num=1,
            sampling_params={"max_new_tokens": 3},
        )
    )

    metas = [chunk["meta_info"] for chunk in chunks]
    assert [chunk["text"] for chunk in chunks] == ["P", "a", "r"]
    assert [chunk["output_ids"] for chunk in chunks] == [[80], [97], [114]]
    assert [meta["completion_tokens"] for meta in metas] == [1, 2, 3]
    assert [len(meta["output_token_logprobs"]) for meta in metas] == [1, 1, 1]
    assert [len(meta["output_top_logprobs"]) for meta in metas] == [1, 1, 1]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [1, 0, 0]


@pytest.mark.parametrize(
    ("stream_text", "texts"),
    [("cumulative", ["P", "Pari", "Paris."]), ("delta", ["P", "ari", "s."])],
)
async def test_a_stream_interval_leaves_events_out_but_no_text(
    stream_text: str, texts: list[str]
) -> None:
    server = FakeServer(config=make_config(stream_text=stream_text))
    fields = {"text": "ab", "sampling_params": {"stream_interval": 3}}

    chunks = events(await post(server, **fields, stream=True))

    assert [chunk["text"] for chunk in chunks] == texts


async def test_each_prompt_may_have_logprobs_of_its_own() -> None:
    body = await post(
        text=["ab", "cd"],
        sampling_params={"max_new_tokens": 1},
        return_logprob=[False, True],
        logprob_start_len=[None, 1],
        top_logprobs_num=[0, 2],
    )

    first, second = (answer["meta_info"] for answer in body.json())
    assert "output_token_logprobs" not in first
    assert len(second["input_token_logprobs"]) == 1
    assert len(second["output_top_logprobs"][0]) == 2


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("json_schema", '{"type": "object"}', "json_schema"),
        ("json_schema", {"type": "object"}, "json_schema"),
        ("regex", "a+", "regex"),
        ("ebnf", 'root ::= "a"', "ebnf"),
        ("structural_tag", '{"triggers": []}', "structural_tag"),
    ],
)
async def test_a_constraint_reaches_the_engine(field: str, value: Any, kind: str) -> None:
    server = FakeServer()

    await post(server, text="ab", sampling_params={field: value})

    ((constraint, param),) = server.grammars.asked
    assert (constraint.kind, param) == (kind, f"sampling_params.{field}")
    assert server.client.requests[0].grammar is not None


async def test_prompts_of_one_request_have_constraints_and_limits_of_their_own() -> None:
    server = FakeServer()
    stops = {"stop_regex": "x{1,3}", "min_new_tokens": 3}

    await post(server, text=["ab", "cd"], sampling_params=[{"regex": "a+"}, stops])

    held, free = sorted(server.client.requests, key=lambda request: list(request.prompt_ids))
    assert (held.grammar is None, free.grammar is None) == (False, True)
    assert (free.sampling.stop_regex, free.sampling.min_tokens) == (("x{1,3}",), 3)


@pytest.mark.parametrize(
    ("fields", "heals"),
    [
        ({"text": "ab"}, True),
        ({"input_ids": [97, 98]}, False),
        ({"text": "ab", "sampling_params": {"regex": "a+"}}, False),
        ({"text": "ab", "return_logprob": True, "logprob_start_len": 0}, False),
    ],
)
@pytest.mark.observes("grammar.token_healing")
async def test_only_a_text_that_nothing_else_is_asked_of_is_healed(
    fields: dict[str, Any], heals: bool
) -> None:
    server = FakeServer(config=make_server_config(grammar={"token_healing": True}))
    await post(server, **fields)
    assert server.client.requests[0].heal is heals


@pytest.mark.parametrize(("name", "num_aborted"), [("one", 1), ("call", 2), ("other", 0)])
async def test_a_prompt_is_aborted_by_its_name_and_all_by_the_calls(
    name: str, num_aborted: int
) -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    body = {"text": ["ab", "cd"], "rid": ["one", "two"], "stream": True}
    state = ServerState.over(server)
    job, _ = await GENERATE.job(state, body, "call")
    outputs = await state.calls.open(job.rid, job.requests)
    while len(server.client.running) < 2:
        await asyncio.sleep(0)

    found = await state.calls.abort(name)
    await outputs.aclose()

    assert found == num_aborted
    assert await state.calls.abort(name) == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "x", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ("/v1/completions", {"prompt": "x", "logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
async def test_who_asks_for_chosen_log_probabilities_is_told_what_there_is(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with make_client() as client:
        response = await client.post(path, json=body)
        harmless = await client.post(path, json=body | {param: []})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported")
    assert error["message"].startswith(f"{param}: ")
    assert "top_logprobs_num" in error["message"]
    assert harmless.status_code == 200
