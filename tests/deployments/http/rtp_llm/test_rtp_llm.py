"""RTP-LLM's API: its conformance table, and what the fields of `generate_config` do."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import EngineError, QueueFull, RequestTimedOut, Unavailable
from remora.deployments.http.generation.constraints import ConstraintBody
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.rtp_llm.answers import RtpJob
from remora.deployments.http.rtp_llm.bodies import RtpBody
from remora.deployments.http.rtp_llm.generate_config import RtpConfig, RtpHints, RtpUnserved
from remora.engine.beams.params import BeamParams
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import FinishReason, Output, Request, SamplingParams
from tests.deployments.fakes import (
    EOS,
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
)
from tests.deployments.http.conformance import ABSENT, Row, check_row, check_shape
from tests.deployments.http.streams import ask, prompt_of
from tests.tiny_models import make_tiny_tokenizer

WORKER = "rtp-llm, frontend/test/frontend_worker_test.py"
SERVER = "rtp-llm, frontend/test/frontend_server_test.py"
APP = "rtp-llm, frontend/frontend_app.py"
DOCS = "rtp-llm, docs/backend/sampling_params.md"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}

AUX = {
    "cost_time": float,
    "first_token_cost_time": float,
    "wait_time": float,
    "iter_count": 2,
    "input_len": 2,
    "prefix_len": 0,
    "output_len": 2,
    "reuse_len": 2,
    "pd_sep": False,
    "cum_log_probs": [],
    "beam_responses": [],
    "softmax_probs": [],
}
WHOLE = {
    "response": "ab",
    "finished": True,
    "aux_info": AUX,
    "output_ids": ABSENT,
    "input_ids": ABSENT,
    "hidden_states": ABSENT,
}


def refusal(param: str | None, code: str = "507_ERROR_INPUT_FORMAT_ERROR") -> dict[str, Any]:
    return {"error_code": int, "error_code_str": code, "message": str, "error": {"param": param}}


def generation(answer: Any, status: int = 200, source: str = WORKER, **fields: Any) -> Row:
    body = fields if {"prompt_batch", "text"} & fields.keys() else {"prompt": "Hi"} | fields
    return Row(source, "/", body, status, answer)


def config(answer: Any, status: int = 200, source: str = DOCS, **fields: Any) -> Row:
    return generation(answer, status, source, generate_config=fields)


def unserved(param: str, **fields: Any) -> Row:
    return generation(refusal(param, "515_UNSUPPORTED_OPERATION"), 400, **fields)


def event(text: str, **aux: Any) -> dict[str, Any]:
    return {"response": text, "finished": False, "aux_info": aux}


TABLE: dict[str, Row] = {
    "a prompt": generation(WHOLE),
    "a text": generation(WHOLE, text="Hi"),
    "a limit": config(WHOLE | {"response": "a", "aux_info": {"output_len": 1}}, max_new_tokens=1),
    "a limit in the body": generation({"response": "a"}, max_new_tokens=1),
    "the body's own field comes first": generation(
        {"response": "a"}, max_new_tokens=1, generate_config={"max_new_tokens": 2}
    ),
    "the body's own field by its other name": generation(
        {"response": "a"}, gen_length=1, generate_config={"max_new_tokens": 2}
    ),
    "generation_config": generation({"response": "a"}, generation_config={"gen_length": 1}),
    "a limit beyond the context": config(WHOLE, max_new_tokens=32_000),
    "no aux_info": config({"response": "ab", "aux_info": {}}, aux_info=False),
    "ids": config(
        {"output_ids": [[97, 98]], "input_ids": [[72, 105]]},
        return_output_ids=True,
        return_input_ids=True,
    ),
    "a prefix": config({"response": ">ab"}, out_prefix=">"),
    "log-probabilities": config(
        {"aux_info": {"cum_log_probs": [-1.0], "softmax_probs": [math.exp(-0.5)] * 2}},
        return_cum_log_probs=True,
        return_softmax_probs=True,
    ),
    "several answers": config(
        {"response": ["ab"] * 3, "finished": True, "aux_info": [AUX] * 3},
        num_return_sequences=3,
    ),
    "one answer in a list": config(
        {"response": ["ab"], "finished": True, "aux_info": [AUX]}, num_return_sequences=1
    ),
    "a batch": generation(
        {"response_batch": [WHOLE, {"response": "ab", "aux_info": {"input_len": 3}}]},
        prompt_batch=["Hi", "abc"],
    ),
    "a batch of several answers": generation(
        {"response_batch": [{"response": ["ab", "ab"], "aux_info": [AUX, AUX]}] * 2},
        prompt_batch=["Hi", "Hi"],
        generate_config={"num_return_sequences": 2},
    ),
    "a stream": generation(
        [event("a", step_output_len=1, output_len=1), WHOLE, "[done]"], yield_generator=True
    ),
    "a stream by OpenAI's field": generation([event("a"), WHOLE, "[done]"], stream=True),
    "an incremental stream": config(
        [event("a"), {"response": "b", "finished": True, "output_ids": [[98]]}, "[done]"],
        source=WORKER,
        yield_generator=True,
        is_streaming=True,
        return_incremental=True,
        return_output_ids=True,
    ),
    "a prefix of an incremental stream": config(
        [event(">a"), {"response": "b"}, "[done]"],
        yield_generator=True,
        return_incremental=True,
        out_prefix=">",
    ),
    "a streamed batch of several answers": generation(
        [
            {"response_batch": [{"response": ["a", "a"], "finished": False}] * 2},
            {"response_batch": [{"response": ["b", "b"], "finished": True}] * 2},
            "[done]",
        ],
        prompt_batch=["Hi", "Hi"],
        yield_generator=True,
        generate_config={"return_incremental": True, "num_return_sequences": 2},
    ),
    "no prompt that is a text": generation(refusal("prompt"), 400, prompt=1),
    "two prompts": generation(refusal("text"), 400, prompt="a", text="b"),
    "prompts in one field": generation(refusal("prompt"), 400, prompt=["a", "b"]),
    "an empty prompt": generation(refusal("prompt"), 400, prompt=""),
    "an empty batch": generation(refusal("prompt_batch"), 400, prompt_batch=[]),
    "a batch that is a text": generation(refusal("prompt_batch"), 400, prompt_batch="a"),
    "a conversation": unserved("prompt", prompt=HELLO["messages"]),
    "messages": unserved("messages", **HELLO),
    "images": unserved("images", images=["http://a/b.png"]),
    "two configs": generation(
        refusal("generation_config"),
        400,
        generate_config={"top_k": 1},
        generation_config={"top_k": 1},
    ),
    "two names": config(refusal("generate_config.gen_length"), 400, gen_length=1, max_new_tokens=1),
    "a config that is none": generation(refusal("generate_config"), 400, generate_config=[]),
    "too many answers": config(
        refusal("generate_config.num_return_sequences"), 400, num_return_sequences=17
    ),
    "incremental without a stream": config(
        refusal("generate_config.return_incremental"), 400, return_incremental=True
    ),
    "a name of streams that selects none": generation(
        refusal("is_streaming"), 400, is_streaming=True
    ),
    "a minimum above the limit": config(
        refusal("generate_config.min_new_tokens"), 400, min_new_tokens=3, max_new_tokens=2
    ),
    "a minimum above a limit elsewhere": generation(
        refusal("generate_config.min_new_tokens"),
        400,
        max_new_tokens=2,
        generate_config={"min_new_tokens": 3},
    ),
    "stop ids of several tokens": generation(
        refusal("generate_config.stop_words_list", "515_UNSUPPORTED_OPERATION"),
        400,
        generate_config={"stop_words_list": [[20, 25], [10]]},
    ),
    "a stop id that is none": config(
        refusal("generate_config.stop_words_list"), 400, stop_words_list=[[-1]]
    ),
    "too many names of adapters": generation(
        refusal("adapter_name"), 400, prompt_batch=["a", "b"], adapter_name=["x"]
    ),
    "an adapter that is not there": config(
        refusal("generate_config.adapter_name"), 404, adapter_name="x"
    ),
    "an unknown task": config(refusal("generate_config.task_id"), 400, task_id="x"),
    "hidden states that are off": config(
        refusal("generate_config.output_hidden_states", "515_UNSUPPORTED_OPERATION"),
        400,
        output_hidden_states=True,
    ),
    "a constraint that does not compile": config(
        refusal("generate_config.json_schema"), 400, json_schema={"title": "refused"}
    ),
    "a constraint and a ban": config(
        refusal("generate_config.bad_words_list", "515_UNSUPPORTED_OPERATION"),
        400,
        regex="a",
        bad_words_list=[[5]],
    ),
    "a temperature of beams": config(
        refusal("generate_config.temperature"), 400, num_beams=2, temperature=0.5
    ),
    "too many beams": config(refusal("generate_config.num_beams"), 400, num_beams=99),
    "a prompt beyond the context": generation(
        refusal("prompt", "511_LONG_PROMPT_ERROR"), 400, prompt="x" * 1000
    ),
    "an unknown model": generation(refusal("model"), 404, model="other"),
    "a batch at its own path": Row(
        WORKER, "/batch_infer", {"prompt_batch": ["Hi"]}, 200, {"response_batch": [WHOLE]}
    ),
    "a streamed batch at its own path": Row(
        WORKER,
        "/batch_infer",
        {"prompt_batch": ["Hi"], "generate_config": {"yield_generator": True}},
        400,
        refusal("generate_config.yield_generator", "515_UNSUPPORTED_OPERATION"),
    ),
    "a prompt at the path of batches": Row(
        WORKER, "/batch_infer", {"prompt": "Hi"}, 400, refusal("prompt")
    ),
    "tokens": Row(
        SERVER,
        "/tokenizer/encode",
        {"prompt": "Hi"},
        200,
        {"token_ids": [72, 105], "tokens": ["H", "i"], "error": "", "offset_mapping": ABSENT},
    ),
    "tokens of no prompt": Row(
        SERVER, "/tokenizer/encode", {"text": "Hi"}, 400, refusal("prompt")
    ),
    **{
        f"a conversation at {path}": Row(
            APP,
            path,
            HELLO | {"top_k": 3, "max_tokens": 5, "stop": ["x"]},
            200,
            {
                "input_prompt": "<|user|>Hi<|assistant|>",
                "input_ids": [ord(char) for char in "<|user|>Hi<|assistant|>"],
                "input_urls": [],
                "max_seq_len": 1000,
                "eos_token_id": EOS,
                "stop_word_ids_list": [[EOS]],
                "stop_words_list": ["</s>", "x"],
                "generate_config": {"top_k": 3, "max_new_tokens": 5, "stop_words_str": ["x"]},
            },
        )
        for path in ("/chat/render", "/v1/chat/render")
    },
    "a conversation that is none": Row(
        APP, "/chat/render", {"messages": 1}, 400, refusal("messages")
    ),
    "fields of chats elsewhere": Row(
        DOCS,
        "/v1/chat/completions",
        HELLO | {"extra_configs": {"top_k": 1}},
        400,
        {"error": {"param": "extra_configs", "code": "unsupported"}},
    ),
    **{
        f"the load at {prefix}/worker_status": Row(
            APP,
            f"{prefix}/worker_status",
            None,
            200,
            {
                "alive": True,
                "running_query_len": 0,
                "waiting_query_len": 0,
                "available_concurrency": int,
                "step_latency_ms": float,
                "tp_size": 1,
                "cache_status": {
                    "available_kv_cache": 80,
                    "total_kv_cache": 160,
                    "block_size": 16,
                },
            },
        )
        for prefix in ("", "/rtp_llm")
    },
    "the memory": Row(APP, "/cache_status", {}, 200, {"total_kv_cache": 160}),
    **{
        f"health at {path}": Row(APP, path, None, 200, "ok")
        for path in (
            *("/status", "/health_check", "/frontend_health"),
            *("/GraphService/cm2_status", "/SearchService/cm2_status"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
async def test_a_request_is_answered_as_rtp_llm_does(name: str) -> None:
    await check_row(TABLE[name], FakeServer(FakeEngine(text="ab")))


async def test_events_are_framed_as_rtp_llm_does() -> None:
    response = await ask("/", FakeServer(FakeEngine(text="a")), prompt="Hi", yield_generator=True)
    first, end, rest = response.text.split("\r\n\r\n")
    assert first.startswith('data:{"response":"a",')
    assert (end, rest) == ("data:[done]", "")
    assert response.headers["content-type"].startswith("text/event-stream")


ENGINE_FAULTS: list[tuple[Exception, int, str]] = [
    (QueueFull("The queue is full.", 2.5), 429, "409_CONCURRENCY_LIMIT_ERROR"),
    (Unavailable("Loading.", 1.0), 503, "514_UNKNOWN_ERROR"),
    (RequestTimedOut("Too slow."), 504, "603_GENERATE_TIMEOUT"),
    (RuntimeError("at /secret/place"), 500, "514_UNKNOWN_ERROR"),
]


@pytest.mark.parametrize(("error", "status", "code"), ENGINE_FAULTS)
async def test_a_fault_of_the_engine_is_a_status(error: Exception, status: int, code: str) -> None:
    for stream in (False, True):
        response = await ask("/", FakeServer(FakeEngine(error=error)), prompt="Hi", stream=stream)
        assert (response.status_code, response.json()["error_code_str"]) == (status, code)
        assert "secret" not in response.text


async def test_an_error_in_a_stream_is_an_event() -> None:
    engine = FakeEngine(text="abc", error=RuntimeError("no"), fail_at=1)
    response = await ask("/", FakeServer(engine), prompt="Hi", stream=True)
    _, error, _, _ = response.text.split("\r\n\r\n")
    assert json.loads(error.removeprefix("data:"))["error_code_str"] == "514_UNKNOWN_ERROR"


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
        started_ns=0,
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
