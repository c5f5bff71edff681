"""llama.cpp's server API: its conformance table, and what its fields do."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from remora.deployments.http.core.fields import SamplingBody
from remora.deployments.http.llamacpp.bodies import LlamaCompletionBody
from tests.deployments.fakes import (
    EOS,
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_client,
    make_plan,
)
from tests.deployments.http.conformance import ABSENT, Row, check_row
from tests.deployments.http.streams import ask, prompt_of

COMPLETION, INFILL = "/completion", "/infill"
README = "llama.cpp, tools/server/README.md"
TESTS = "llama.cpp, tools/server/tests/unit"
HELLO = [{"role": "user", "content": "Hi"}]
GAP = {"input_prefix": "def f():\n", "input_suffix": "return a\n"}
MARKERS = {1: "<|fim_prefix|>", 2: "<|fim_suffix|>", 3: "<|fim_middle|>"}
FILES = {4: "<|repo_name|>", 5: "<|file_sep|>"}


def make_server(text: str = "ab", *, markers: Any = None, **engine: Any) -> FakeServer:
    tokenizer = CharTokenizer()
    if markers is not None:
        tokenizer.added_tokens = MappingProxyType({EOS: "</s>", **markers})
    return FakeServer(FakeEngine(text=text, **engine), tokenizer=tokenizer)


RATES = {
    f"{part}_{unit}": float
    for part in ("prompt", "predicted")
    for unit in ("ms", "per_token_ms", "per_second")
}
TIMINGS = {"cache_n": 2, "prompt_n": int, "predicted_n": int, **RATES}
SETTINGS = {
    "n_predict": int,
    "temperature": float,
    "seed": int,
    "top_k": int,
    "stop": list,
    "samplers": list,
}
FINAL = {
    "index": 0,
    "content": "ab",
    "tokens": [],
    "id_slot": int,
    "stop": True,
    "model": "tiny",
    "tokens_predicted": 2,
    "tokens_evaluated": 2,
    "generation_settings": SETTINGS,
    "prompt": "Hi",
    "has_new_line": False,
    "truncated": False,
    "stop_type": "eos",
    "stopping_word": "",
    "tokens_cached": 2,
    "timings": TIMINGS,
    "completion_probabilities": ABSENT,
}
PART = {"index": 0, "stop": False, "content": "a", "tokens": [97], "timings": ABSENT}
ENTRY = {"id": int, "token": str, "bytes": list, "logprob": float}
PROBABILITY = {**ENTRY, "id": 97, "token": "a", "bytes": [97], "top_logprobs": [ENTRY, ENTRY]}
REFUSED = {"error": {"code": 400, "type": "invalid_request_error", "message": str}}
SLOT = {"id": 0, "id_task": -1, "n_ctx": 1000, "speculative": False, "is_processing": False}
PROPS = {
    "default_generation_settings": {"params": SETTINGS, "n_ctx": 1000},
    "total_slots": int,
    "model_path": "tiny",
    "model_alias": "tiny",
    "chat_template": str,
    "modalities": {"vision": False, "audio": False},
    "eos_token": "</s>",
    "build_info": str,
    "is_sleeping": False,
}


def completion(answer: Any, status: int = 200, source: str = README, **fields: Any) -> Row:
    return Row(source, COMPLETION, {"prompt": "Hi", **fields}, status, answer)


TABLE: dict[str, Row] = {
    "whole": completion(FINAL),
    "limit": completion(FINAL | {"content": "a", "stop_type": "limit", "tokens_predicted": 1},
                        n_predict=1),
    "no output": completion(
        FINAL | {"content": "", "stop_type": "limit", "tokens_predicted": 0, "tokens": []},
        n_predict=0,
        return_tokens=True,
    ),
    "token ids": completion(FINAL | {"tokens": [97, 98]}, return_tokens=True),
    "stream": completion(
        [PART, PART | {"content": "b", "tokens": [98]}, FINAL | {"content": "", "tokens": []}],
        source=f"{TESTS}/test_completion.py",
        stream=True,
    ),
    "stream without output": completion(
        [FINAL | {"content": "", "stop_type": "limit", "tokens_predicted": 0}],
        n_predict=0,
        stream=True,
    ),
    "stream with timings": completion(
        [PART | {"timings": TIMINGS}, FINAL | {"content": "", "tokens_predicted": 1,
                                               "stop_type": "limit"}],
        n_predict=1,
        stream=True,
        timings_per_token=True,
    ),
    "probabilities": completion(
        FINAL | {"content": "a", "tokens_predicted": 1, "stop_type": "limit",
                 "completion_probabilities": [PROBABILITY]},
        n_predict=1,
        n_probs=2,
    ),
    "probabilities of a stream": completion(
        [PART | {"completion_probabilities": [PROBABILITY]}, {"stop": True}],
        n_predict=1,
        n_probs=2,
        stream=True,
    ),
    "fields of the answer": completion(
        {"content": "a", "generation_settings/n_predict": 1, "stop": ABSENT, "nothing": ABSENT},
        n_predict=1,
        response_fields=["content", "generation_settings/n_predict", "nothing/a"],
    ),
    "answers of two prompts": completion(
        [FINAL | {"prompt": "a", "tokens_evaluated": 1},
         FINAL | {"prompt": "bc", "index": 1}],
        prompt=["a", [98, 99]],
    ),
    "two answers": completion([FINAL, FINAL | {"index": 1}], n_cmpl=2),
    "a list of one prompt": completion(FINAL, prompt=["Hi"]),
    "text as an object": completion(FINAL, prompt={"prompt_string": "Hi"}),
    "texts and tokens": completion(FINAL | {"prompt": "aHib", "tokens_evaluated": 4},
                                   prompt=[97, "Hi", 98]),
    "media": completion(
        REFUSED, 400, prompt={"prompt_string": "a", "multimodal_data": ["eA=="]}
    ),
    "no prompt": Row(README, COMPLETION, {}, 400, REFUSED),
    "prompt beyond the context": completion(
        {"error": {"code": 400, "type": "exceed_context_size_error", "message": str,
                   "n_prompt_tokens": 1001, "n_ctx": 1000}},
        400,
        source=f"{TESTS}/test_ctx_shift.py",
        prompt="x" * 1001,
    ),
    "unknown model": completion(
        {"error": {"code": 404, "type": "not_found_error", "message": str}}, 404, model="other"
    ),
    "infill of a model without markers": Row(README, INFILL, GAP, 400, REFUSED),
    "other text without a text": Row(
        f"{TESTS}/test_infill.py", INFILL, {**GAP, "input_extra": [{"filename": "a"}]}, 400, REFUSED
    ),
    "infill without a suffix": Row(README, INFILL, {"input_prefix": "a"}, 400, REFUSED),
    "tokenize": Row(README, "/tokenize", {"content": "Hi"}, 200, {"tokens": [72, 105]}),
    "tokenize with pieces": Row(
        README,
        "/tokenize",
        {"content": "Hi", "with_pieces": True, "add_special": True},
        200,
        {"tokens": [{"id": 72, "piece": "H"}, {"id": 105, "piece": "i"}]},
    ),
    "tokenize of a number": Row(README, "/tokenize", {"content": 1}, 400, REFUSED),
    "special tokens as text": Row(
        README, "/tokenize", {"content": "</s>", "parse_special": False}, 400, REFUSED
    ),
    "plain text": Row(
        README, "/tokenize", {"content": "Hi", "parse_special": False}, 200, {"tokens": [72, 105]}
    ),
    "detokenize": Row(README, "/detokenize", {"tokens": [72, 105]}, 200, {"content": "Hi"}),
    "template": Row(
        README, "/apply-template", {"messages": HELLO}, 200, {"prompt": "<|user|>Hi<|assistant|>"}
    ),
    "template without the assistant": Row(
        f"{TESTS}/test_template.py",
        "/apply-template",
        {"messages": HELLO, "add_generation_prompt": False},
        200,
        {"prompt": "<|user|>Hi"},
    ),
    "template without messages": Row(README, "/apply-template", {}, 400, REFUSED),
    "properties": Row(README, "/props", None, 200, PROPS),
    "slots": Row(README, "/slots?fail_on_no_slot=1", None, 200, [SLOT, SLOT | {"id": 1}]),
    "number of a slot": completion(FINAL, id_slot=3),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
async def test_a_request_is_answered_as_llamacpp_does(name: str) -> None:
    server = make_server()
    server.plan = make_plan(max_running_requests=2)
    await check_row(TABLE[name], server)


@pytest.mark.parametrize(
    ("engine", "stop"),
    [
        ({}, ("eos", "")),
        ({"stopped_by": "."}, ("word", ".")),
        ({"stopped_by": 46}, ("eos", "")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_is_described(engine: Any, stop: tuple[str, str], stream: bool) -> None:
    ending = {"stop_type": stop[0], "stopping_word": stop[1], "stop": True}
    answer = [PART, Any, ending] if stream else ending
    await check_row(completion(answer, stream=stream), make_server(**engine))


async def test_an_output_that_fills_the_context_is_truncated() -> None:
    server = make_server("abcdef")
    server.plan = make_plan(max_model_len=8)
    await check_row(completion({"stop_type": "eos", "truncated": False}), server)
    server = make_server("abcdefgh")
    server.plan = make_plan(max_model_len=8)
    await check_row(completion({"stop_type": "limit", "truncated": True}, n_predict=6), server)


# Fields of a body -> what the engine is asked for.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_tokens": None, "temperature": 0.6, "top_k": 20, "logprobs": None, "n": 1}),
    ({"n_predict": 5}, {"max_tokens": 5}),
    ({"n_predict": -1}, {"max_tokens": None}),
    ({"n_predict": -2, "max_tokens": 3}, {"max_tokens": None}),
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"n_predict": 0}, {"max_tokens": 1}),
    ({"temperature": -1.0, "top_k": -1, "min_p": 0.1}, {"temperature": 0.0, "top_k": 0}),
    ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
    (
        {"repeat_penalty": 1.5, "presence_penalty": 1.0, "repeat_last_n": 0},
        {"repetition_penalty": 1.0, "presence_penalty": 0.0},
    ),
    ({"repeat_last_n": 64}, {"repetition_penalty": 1.0}),
    ({"seed": -1}, {"seed": None}),
    ({"seed": 2**32 - 1}, {"seed": None}),
    ({"seed": 7}, {"seed": 7}),
    ({"logit_bias": [[5, 1.5], ["ab", -1], [97, 0.5]]}, {"logit_bias": {5: 1.5, 97: -0.5, 98: -1}}),
    ({"logit_bias": {"5": 1, "a": -1}}, {"logit_bias": {5: 1, 97: -1}}),
    ({"logit_bias": [["ab", False]]}, {"logit_bias": {}, "bad_words_ids": ((97,), (98,))}),
    ({"n_probs": 3}, {"logprobs": 3}),
    ({"n_probs": 0}, {"logprobs": None}),
    ({"n_cmpl": 2}, {"n": 2}),
    ({"no_stop_trim": True}, {"include_stop_in_output": True}),
    ({"stop": ["x"], "ignore_eos": True}, {"stop": ("x",), "ignore_eos": True}),
    (
        {"typical_p": 0.5, "top_p": 0.7, "frequency_penalty": 1.0},
        {"typical_p": 0.5, "top_p": 0.7, "frequency_penalty": 1.0},
    ),
    ({"samplers": ["top_k", "top_p", "infill"], "top_p": 0.9}, {"infill": True, "top_p": 0.9}),
    (
        {"samplers": []},
        {"infill": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    ),
    ({"samplers": ["top_k", "temperature"]}, {"temperature": 0.6, "top_k": 20}),
    ({"samplers": ["temperature", "top_k", "top_p"], "top_p": 0.5}, {"top_p": 0.5}),
    (
        {"samplers": ["top_p", "temperature"], "top_p": 0.5, "temperature": 1.0},
        {"top_p": 0.5, "top_k": 0},
    ),
    ({"samplers": ["min_p", "top_k"], "temperature": 0}, {"temperature": 1.0, "top_k": 20}),
]


@pytest.mark.parametrize(("fields", "wanted"), SAMPLING)
async def test_a_body_becomes_sampling_parameters(fields: Any, wanted: Any) -> None:
    server = make_server()
    server.generation_defaults = {"temperature": 0.6, "top_k": 20}
    response = await ask(COMPLETION, server, prompt="Hi", **fields)
    assert response.status_code == 200, response.text
    sampling = server.client.requests[0].sampling
    assert {name: getattr(sampling, name) for name in wanted} == wanted


UNSERVED: dict[str, Any] = {
    "dynatemp_range": 0.5,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "top_n_sigma": 1.0,
    "adaptive_target": 0.5,
    "mirostat": 2,
    "min_keep": 2,
    "post_sampling_probs": True,
    "return_progress": True,
    "grammar_lazy": True,
    "grammar_triggers": [{"type": 0, "value": "a"}],
    "preserved_tokens": ["<a>"],
    "lora": [{"id": 0, "scale": 1.0}],
    "samplers": ["mirostat"],
}


@pytest.mark.parametrize("name", UNSERVED)
async def test_what_would_change_the_answer_is_refused(name: str) -> None:
    response = await ask(COMPLETION, prompt="Hi", **{name: UNSERVED[name]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


# Fields without effect, as docs/http-api.md lists them: they cannot change an answer.
HINTS: dict[str, Any] = {
    "dynatemp_exponent": 2.0,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 5,
    "dry_sequence_breakers": ["x"],
    "xtc_threshold": 0.3,
    "adaptive_decay": 0.5,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.2,
    "t_max_prompt_ms": 5,
    "id_slot": 3,
    "n_keep": 5,
    "n_discard": 5,
    "n_cache_reuse": 5,
    "sse_ping_interval": 1,
    "backend_sampling": True,
    "spaces_between_special_tokens": True,
}


async def test_hints_change_nothing() -> None:
    server, plain = make_server(), make_server()
    hinted = await ask(COMPLETION, server, prompt="Hi", **HINTS)
    answer = await ask(COMPLETION, plain, prompt="Hi")
    names = ("content", "generation_settings", "stop_type")
    assert [hinted.json()[name] for name in names] == [answer.json()[name] for name in names]
    assert server.client.requests[0].sampling == plain.client.requests[0].sampling
    assert "x-remora-ignored-fields" not in hinted.headers


def test_each_field_is_served_refused_or_a_hint() -> None:
    bodies = [row.body or {} for row in TABLE.values() if row.path == COMPLETION]
    served = {name for fields in (*(sent for sent, _ in SAMPLING), *bodies) for name in fields}
    served |= {name for fields in TOGETHER.values() for name in fields}
    shared = SamplingBody.model_fields.keys() - {"typical_p", "top_p", "min_p"}  # other tests
    known = served | UNSERVED.keys() | HINTS.keys() | shared | {"cache_prompt"}
    assert LlamaCompletionBody.model_fields.keys() - known == set()


TOGETHER: dict[str, dict[str, Any]] = {
    "a window of penalties": {"repeat_penalty": 1.5, "repeat_last_n": 64},
    "the order of samplers": {"samplers": ["top_p", "temperature"], "top_p": 0.5,
                              "temperature": 0.5},
    "two constraints": {"grammar": 'root ::= "a"', "json_schema": {}},
    "a ban and a constraint": {"logit_bias": [[97, False]], "json_schema": {}},
    "a ban of no token": {"logit_bias": [[999, False]]},
    "indentation of a stream": {"n_indent": 1, "stream": True},
    "time of a stream": {"t_max_predict_ms": 1, "stream": True},
    "two numbers of answers": {"n": 2, "n_cmpl": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
async def test_fields_that_cannot_be_served_together_are_refused(name: str) -> None:
    response = await ask(COMPLETION, prompt="Hi", **TOGETHER[name])
    assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"grammar": 'root ::= "a"'}, 'root ::= "a"'),
        ({"json_schema": {}}, "{}"),
        ({"json_schema": {"type": "object"}}, '{"type":"object"}'),
        ({"grammar": ""}, None),
    ],
)
async def test_a_constraint_is_compiled(fields: Any, source: str | None) -> None:
    server = make_server()
    await ask(COMPLETION, server, prompt="Hi", **fields)
    assert [asked.source for asked, _ in server.grammars.asked] == ([source] if source else [])


@pytest.mark.parametrize(
    ("text", "indent", "content"),
    [
        ("a\n    b\ncd", 4, "a\n    b\n"),
        ("a\n  bc", 4, "a\n  "),
        ("a\n\n    b", 4, "a\n"),
        ("a\n\tb", 1, "a\n\tb"),
        ("a\nb", 0, "a\nb"),
    ],
)
async def test_an_answer_ends_where_a_line_is_less_indented(
    text: str, indent: int, content: str
) -> None:
    server = make_server(text)
    answer = (await ask(COMPLETION, server, prompt="Hi", n_indent=indent)).json()
    assert answer["content"] == content
    assert answer["stop_type"] == ("eos" if content == text else "limit")
    assert len(server.client.closed) == (content != text)  # the rest is not generated


@pytest.mark.parametrize(("text", "content"), [("a\nbcd", "a\n"), ("abc", "abc")])
async def test_an_answer_ends_after_its_time_once_it_has_a_line(
    text: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(
        "remora.deployments.observing.reply_clock.time.monotonic_ns", lambda: next(clock)
    )
    answer = (await ask(COMPLETION, make_server(text), prompt="Hi", t_max_predict_ms=1)).json()
    assert answer["content"] == content


async def test_a_request_without_the_cache_shares_no_pages() -> None:
    server = make_server()
    for cached in (True, False, False):
        await ask(COMPLETION, server, prompt="Hi", cache_prompt=cached)
    salts = [request.cache_salt for request in server.client.requests]
    assert salts[0] == ""
    assert len(set(salts)) == 3


EXTRA = {"input_extra": [{"filename": "a.py", "text": "b"}, {"text": "c"}]}
BARE = "<|fim_prefix|>def f():\n<|fim_suffix|>return a\n<|fim_middle|>"


@pytest.mark.parametrize(
    ("markers", "fields", "prompt"),
    [
        (MARKERS, {}, BARE),
        (MARKERS, {"prompt": "a ="}, f"{BARE}a ="),
        (MARKERS, EXTRA, f"bc{BARE}"),
        (
            MARKERS | FILES,
            EXTRA,
            "<|repo_name|>project\n<|file_sep|>a.py\nb\n<|file_sep|>file\nc\n"
            f"<|file_sep|>file\n{BARE}",
        ),
        (MARKERS | FILES, {}, BARE),
    ],
)
async def test_a_gap_is_framed_as_the_model_was_trained(
    markers: Any, fields: Any, prompt: str
) -> None:
    server = make_server(markers=markers)
    answer = await ask(INFILL, server, **GAP, **fields)
    assert answer.json()["content"] == "ab"
    assert prompt_of(server) == prompt


async def test_a_slot_is_processing_for_each_running_request() -> None:
    server = make_server()
    server.plan = make_plan(max_running_requests=1)
    busy = replace(server.client.stats(), num_running=1)
    server.client.stats = lambda: busy  # type: ignore[method-assign]
    async with make_client(server) as client:
        (slot,) = (await client.get("/slots")).json()
        refused = await client.get("/slots?fail_on_no_slot=1")
    assert slot["is_processing"] is True
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable_error")
