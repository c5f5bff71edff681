"""RTP-LLM's API: what the fields of a body do, and what a stream holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import EngineError
from remora.deployments.http.generation.constraints import ConstraintBody
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.rtp_llm.answers import RtpJob
from remora.deployments.http.rtp_llm.bodies import RtpBody
from remora.deployments.http.rtp_llm.generate_config import RtpConfig, RtpHints, RtpUnserved
from remora.engine.beams.params import BeamParams
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import FinishReason, Output, Request, SamplingParams
from tests.deployments.fakes import (
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
)
from tests.deployments.http.conformance import check_shape
from tests.deployments.http.rtp_llm.test_conformance import TABLE
from tests.deployments.http.streams import ask, prompt_of
from tests.tiny_models import make_tiny_tokenizer

# Fields of generate_config -> what the engine is asked for, whatever the model recommends.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 998, "n": 1,
          "repetition_penalty": 1.0, "skip_special_tokens": False, "logprobs": None}),
    ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
    ({"gen_length": 5}, {"max_tokens": 5}),
    ({"max_new_tokens": 9999}, {"max_tokens": 998}),
    ({"do_sample": False, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.5, "top_p": 0.7}, {"temperature": 0.5, "top_p": 0.7}),
    ({"top_p": 0.0, "top_k": 1}, {"temperature": 1.0, "top_k": 1, "top_p": 1.0}),
    ({"top_p": 0.0}, {"temperature": 0.0, "top_p": 1.0}),
    ({"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
     {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}),
    ({"random_seed": 7}, {"seed": 7}),
    ({"num_beams": 4, "random_seed": 1}, {"beams": BeamParams(width=4), "n": 4}),
    ({"num_beams": 4, "num_return_sequences": 2}, {"beams": BeamParams(width=4), "n": 2}),
    ({"num_beams": 1}, {"beams": None, "n": 1}),
    ({"num_return_sequences": 3}, {"n": 3}),
    ({"num_return_sequences": 0}, {"n": 1}),
    ({"stop_words_str": ["x", "y"]}, {"stop": ("x", "y"), "include_stop_in_output": False}),
    ({"stop_words_list": [[5], [6]]}, {"stop_token_ids": (5, 6)}),
    ({"print_stop_words": True, "stop_words_str": ["x"]}, {"include_stop_in_output": True}),
    ({"bad_words_list": [[5, 6], [7], [999]]}, {"bad_words_ids": ((5, 6), (7,))}),
    ({"ignore_eos": True, "skip_special_tokens": True},
     {"ignore_eos": True, "skip_special_tokens": True}),
    ({"return_cum_log_probs": True}, {"logprobs": 0}),
    ({"return_softmax_probs": True}, {"logprobs": 0}),
    ({"force_disable_sp_run": True, "sp_advice_prompt": "a"}, {"max_drafts": 0}),
    ({"force_disable_sp_run": False}, {"max_drafts": None}),
]  # fmt: skip


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize(("fields", "wanted"), SAMPLING)
async def test_a_body_becomes_sampling_parameters(fields: Any, wanted: Any, is_inner: bool) -> None:
    server = FakeServer(FakeEngine(text="ab"))
    server.generation_defaults = {"temperature": 0.6, "top_k": 20}
    body = {"generate_config": fields} if is_inner else fields
    response = await ask("/", server, prompt="Hi", **body)
    assert response.status_code == 200, response.text
    assert "x-remora-ignored-fields" not in response.headers
    sampling = server.client.requests[0].sampling
    assert {name: getattr(sampling, name) for name in wanted} == wanted


UNSERVED: dict[str, Any] = {
    "variable_num_beams": [2, 3],
    "no_repeat_ngram_size": 3,
    "combo_token_size": 3,
    "banned_combo_token_ids": [[1, 2, 3]],
    "auto_parse_banned_combo": True,
    "enable_cross_sequence_ban": True,
    "top_p_decay": 0.9,
    "eos_token_id": 5,
    "using_hf_sampling": True,
    "ttft_timeout_ms": 100,
    "request_format": "chatapi",
    "calculate_loss": 1,
    "return_logits": True,
    "output_logits": True,
    "return_prompt_logits": True,
    "return_all_probs": True,
    "logits_index": 1,
    "hidden_states_cut_dim": 8,
    "normalized_hidden_states": True,
    "select_tokens_str": ["a"],
    "select_tokens_id": [1],
    "force_sp_accept": True,
    "role_addrs": [{"role": 1}],
    "resized_shape": [1, 2],
    "in_think_mode": True,
    "chat_template_kwargs": {"a": 1},
}
HINTS: dict[str, Any] = {
    **dict.fromkeys(("max_input_tokens", "traffic_reject_priority", "profile_step"), 5),
    **dict.fromkeys(("inter_request_id", "global_request_id", "max_thinking_tokens"), 7),
    **dict.fromkeys(("batch_group_timeout", "prompt_logits_top_k"), 7),
    **dict.fromkeys(("prompt_logits_start", "prompt_logits_end"), -1),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 5),
    **dict.fromkeys(("chat_id", "trace_id", "unique_key", "md5_value", "custom_prop"), "x"),
    **dict.fromkeys(("sp_edit", "gen_timeline", "add_vision_id", "sync_wait_write"), True),
    **dict.fromkeys(("enable_memory_cache", "enable_memory_block_cache"), False),
    **dict.fromkeys(("enable_remote_cache", "enable_device_cache"), False),
    **dict.fromkeys(("can_use_pd_separation", "force_batch", "return_target_logprob"), True),
    "sp_advice_prompt_token_ids": [1, 2],
    "end_think_token_ids": [1, 2],
    "top_p_min": 0.5,
    "top_p_reset_ids": [5],
    "tool_call_message_extract_strategy": "default",
}


@pytest.mark.parametrize("name", UNSERVED)
async def test_what_would_change_the_answer_is_refused(name: str) -> None:
    response = await ask("/", prompt="Hi", generate_config={name: UNSERVED[name]})
    error = response.json()
    assert (response.status_code, error["error_code"]) == (400, 515)
    assert error["error"]["param"] == f"generate_config.{name}"
    assert name in error["message"]


async def test_hints_change_nothing() -> None:
    server, plain = FakeServer(), FakeServer()
    body = {"source": "me", "private_request": True, "master_info": {"a": 1}}
    hinted = await ask("/", server, prompt="Hi", **body, generate_config=HINTS)
    answer = await ask("/", plain, prompt="Hi")
    assert hinted.status_code == 200, hinted.text
    assert hinted.json()["response"] == answer.json()["response"]
    assert server.client.requests[0].sampling == plain.client.requests[0].sampling
    assert "x-remora-ignored-fields" not in hinted.headers


def test_each_field_is_served_refused_or_a_hint() -> None:
    assert RtpHints.model_fields.keys() == HINTS.keys()
    assert RtpUnserved.model_fields.keys() == UNSERVED.keys()
    served = {name for fields, _ in SAMPLING for name in fields}
    for row in TABLE.values():
        body = row.body or {}
        inner = body.get("generate_config")
        served |= body.keys() | (inner.keys() if isinstance(inner, dict) else set())
    served |= {"timeout_ms", "reuse_cache", "output_input_ids", "return_hidden_states"}
    served |= {"return_all_hidden_states", "urls", "functions", "rid"}  # tested below
    served |= {"source", "private_request", "master_info"}
    constraints = ConstraintBody.model_fields.keys()
    assert RtpBody.model_fields.keys() - served - constraints - HINTS.keys() == UNSERVED.keys()


@pytest.mark.parametrize("name", ["urls", "functions"])
async def test_what_is_no_text_is_refused(name: str) -> None:
    response = await ask("/", prompt="Hi", **{name: ["x"]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_unknown_fields_are_reported_with_their_place() -> None:
    response = await ask("/", prompt="Hi", a=1, generate_config={"b": 2})
    assert response.headers["x-remora-ignored-fields"] == "a, generate_config.b"


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"json_schema": {"type": "object"}}, '{"type":"object"}'),
        ({"response_format": {"type": "json_object"}}, ""),
        ({"regex": "a+"}, "a+"),
    ],
)
async def test_a_constraint_is_compiled(fields: Any, source: str) -> None:
    server = FakeServer()
    await ask("/", server, prompt="Hi", generate_config=fields)
    assert [asked.source for asked, _ in server.grammars.asked] == [source]


async def test_a_request_without_the_cache_shares_no_pages() -> None:
    server = FakeServer()
    for reused in (True, False, False):
        await ask("/", server, prompt="Hi", reuse_cache=reused)
    salts = [request.cache_salt for request in server.client.requests]
    assert salts[0] == ""
    assert len(set(salts)) == 3


async def test_a_task_prompt_precedes_the_prompt() -> None:
    server = FakeServer(config=make_config(task_prompts={"1": "Be brief. "}))
    answer = (await ask("/", server, prompt="Hi", generate_config={"task_id": 1})).json()
    assert prompt_of(server) == "Be brief. Hi"
    check_shape(answer, {"aux_info": {"prefix_len": 10, "input_len": 2}})


async def test_hidden_states_are_those_of_the_last_token_or_of_all() -> None:
    server = FakeServer(FakeEngine(text="ab"), config=make_config(hidden_states=True))
    fields = {"output_hidden_states": True, "return_all_hidden_states": True}
    answer = (await ask("/", server, prompt="Hi", output_input_ids=True, **fields)).json()
    assert answer["all_hidden_states"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert answer["hidden_states"] == [4.0, 5.0]
    assert answer["input_ids"] == [[72, 105]]
    refused = await ask("/", server, prompt="Hi", stop_words_str=["x"], **fields)
    assert refused.json()["error"]["param"] == "stop_words_str"


async def test_a_request_ends_after_its_own_time() -> None:
    server = FakeServer(FakeEngine(is_full=True))
    for stream in (False, True):
        response = await ask("/", server, prompt="Hi", timeout_ms=20, stream=stream)
        assert response.status_code == 504
        assert response.json()["error_code_str"] == "603_GENERATE_TIMEOUT"
    assert not server.client.running
    for unlimited in (-1, 0):
        assert (await ask("/", prompt="Hi", timeout_ms=unlimited)).status_code == 200


class SearchingEngine(FakeEngine):
    """Gives different texts, all at the end."""

    def _outputs(self, request: Request) -> list[Output]:
        ends = [each for each in super()._outputs(request) if each.finish_reason is not None]
        return [replace(each, text=f"beam {each.index}") for each in ends]


async def test_beams_are_shown_best_first() -> None:
    fields: dict[str, Any] = {"prompt": "Hi", "num_beams": 3}
    answer = (await ask("/", FakeServer(SearchingEngine()), **fields)).json()
    assert answer["response"] == "beam 0"
    assert answer["aux_info"]["beam_responses"] == ["beam 0", "beam 1", "beam 2"]
    several = await ask("/", FakeServer(SearchingEngine()), **fields, num_return_sequences=2)
    assert several.json()["response"] == ["beam 0", "beam 1"]


async def test_places_of_tokens_are_those_of_the_tokenizer() -> None:
    server = FakeServer(tokenizer=Tokenizer(make_tiny_tokenizer()))
    text = "Ein Bär, zwei 🐻!"
    body = {"prompt": text, "return_offsets_mapping": True}
    answer = (await ask("/tokenizer/encode", server, **body)).json()
    wanted = make_tiny_tokenizer()(text, return_offsets_mapping=True)
    assert answer["token_ids"] == wanted["input_ids"]
    assert answer["offset_mapping"] == [list(place) for place in wanted["offset_mapping"]]
    assert answer["tokens"] == []


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[list[str]], list[tuple[int, int]]]:
    """Return the texts of each prompt's answers, and an order in which their characters come."""
    n = draw(st.integers(1, 3))
    text = st.text("abc", min_size=1, max_size=5)
    texts = draw(st.lists(st.lists(text, min_size=n, max_size=n), min_size=1, max_size=3))
    turns = [
        (prompt, index)
        for prompt, answers in enumerate(texts)
        for index, answer in enumerate(answers)
        for _ in answer
    ]
    return texts, draw(st.permutations(turns))


@given(stream=streams(), is_incremental=st.booleans())
def test_a_stream_holds_all_answers_in_few_events(
    stream: tuple[list[list[str]], list[tuple[int, int]]], is_incremental: bool
) -> None:
    texts, turns = stream
    n = len(texts[0])
    request = Request(request_id="r", prompt_ids=[1], sampling=SamplingParams(n=n))
    job = RtpJob(
        context=RequestContext(request_id="r"),
        requests=(request,) * len(texts),
        streams=True,
        config=RtpConfig(num_return_sequences=n, return_incremental=is_incremental),
        is_batch=True,
    )
    writer, places = job.writer(), dict.fromkeys(turns, 0)
    events: list[Any] = []
    for turn in turns:
        prompt, index = turn
        text, place = texts[prompt][index], places[turn]
        places[turn] += 1
        ends = place + 1 == len(text)
        output = Output(
            index=index,
            token_ids=(ord(text[place]),),
            text=text[place],
            finish_reason=FinishReason.STOP if ends else None,
            num_output_tokens=place + 1,
        )
        events += [chunk["response_batch"] for chunk in writer.chunks(prompt, output)]
    # Each event has something new of every answer that goes on.
    assert len(events) <= max(len(text) for answers in texts for text in answers)
    for prompt, answers in enumerate(texts):
        parts = [event[prompt]["response"] for event in events]
        for index, text in enumerate(answers):
            shown = [part[index] for part in parts]
            assert ("".join(shown) if is_incremental else shown[-1]) == text
        assert events[-1][prompt]["finished"] is True
        assert [len(text) for text in answers] == [
            about["output_len"] for about in events[-1][prompt]["aux_info"]
        ]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_health_follows_the_server(method: str) -> None:
    server = FakeServer()
    async with make_client(server) as client:
        healthy = await client.request(method, "/health_check")
        server.client.health_error = EngineError("no")
        failed = await client.request(method, "/health_check")
    assert (healthy.status_code, failed.status_code) == (200, 503)


async def test_other_bodies_of_the_path_keep_their_api() -> None:
    tgi: httpx.Response = await ask("/", inputs="Hi", prompt="Hi")
    assert "generated_text" in tgi.json()[0]
    server = FakeServer(config=make_config(generate_dialect="lightllm"))
    assert "response" in (await ask("/", server, prompt="Hi")).json()
