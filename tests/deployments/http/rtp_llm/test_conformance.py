"""RTP-LLM's API: its conformance table, frames and errors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from remora.configs.errors import QueueFull, RequestTimedOut, Unavailable
from tests.deployments.fakes import (
    EOS,
    FakeEngine,
    FakeServer,
)
from tests.deployments.http.conformance import ABSENT, Row, check_row
from tests.deployments.http.streams import ask

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
