"""What each API refuses: errors name the field as the request body does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.deployments.http.core.field_names import in_callers_words, renames
from tests.deployments.fakes import (
    CharTokenizer,
    FakeServer,
    make_client,
    make_config,
    make_plan,
)

TURNS = {"messages": [{"role": "user", "content": "Hi"}]}
PARAMETERS = "parameters"
# Internal names, and those of OpenAI.
INNER = (
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "n",
    "repetition_penalty",
    "response_format",
    "reasoning_effort",
    "guided_regex",
    "guided_json",
    "logprobs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
    "stop_regex",
    "thinking_token_budget",
)
ANTHROPIC_TOOL = {"name": "a", "input_schema": {"type": "array"}}
ADD = {"type": "function", "function": {"name": "add"}}
TOOLS = TURNS | {"tools": [ADD]}
SCORE = {"query": "ab", "items": "c", "label_token_ids": [80]}
OF_EACH_PROMPT = (
    *("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
)
# Constraints that exclude each other, and options that would change nothing.
CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a", "ebnf": "root ::= a"}, "ebnf"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"regex": "a", "bad_words": ["x"]}, "bad_words"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
]  # fmt: skip
UNSUPPORTED = {param for _, param in CONSTRAINTS[-3:]}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# path -> [(body, the field that the error names)]
CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/chat/completions": [
        (TURNS | {"max_tokens": 0}, "max_tokens"),
        (TURNS | {"max_completion_tokens": 0}, "max_completion_tokens"),
        (TURNS | {"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens"),
        (TURNS | {"max_tokens": 3, "min_tokens": 5}, "min_tokens"),
        (TURNS | {"temperature": -1}, "temperature"),
        (TURNS | {"stop_token_ids": [-1]}, "stop_token_ids"),
        (TOOLS | {"tool_choice": function("other")}, "tool_choice"),
        (TURNS | {"tool_choice": "required"}, "tool_choice"),
        (TURNS | {"tool_choice": function("add")}, "tool_choice"),
        (TOOLS | {"functions": [{"name": "f"}]}, "functions"),
        (TOOLS | {"tool_choice": "required", "regex": "a"}, "tool_choice"),
        (TOOLS | {"tool_choice": function("add"), "guided_json": {}}, "tool_choice"),
        (TOOLS | {"tool_choice": "auto", "function_call": "auto"}, "function_call"),
        (TURNS | {"reasoning_effort": "high"}, "reasoning_effort"),
        *((TURNS | body, param) for body, param in CONSTRAINTS),
    ],
    "/v1/completions": [
        ({"prompt": "x", "max_tokens": 3, "min_tokens": 5}, "min_tokens"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": "a", "stream": True, "stream_options": 5}, "stream_options"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "x", "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 17, "best_of": 16}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 3}, "n"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "custom_params": {"id": 3}}, "custom_params"),
        ({"prompt": "a", "custom_logit_processor": "x", "custom_params": [1]}, "custom_params"),
        ({"prompt": "a", "custom_logit_processor": ""}, "custom_logit_processor"),
        ({"prompt": "a", "custom_logit_processor": {"code": "..."}}, "custom_logit_processor"),
        *(({"prompt": "a"} | body, param) for body, param in CONSTRAINTS),
    ],
    "/tokenize": [
        ({"text": "a"}, "prompt"),
        (TURNS | {"prompt": "a"}, "prompt"),
    ],
    "/v1/responses": [
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 3, "min_tokens": 5}, "min_tokens"),
        ({"input": "x", "temperature": 500}, "temperature"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": "x" * 2000}, "input"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "refused",
          "schema": {"title": "refused"}}}}, "text.format"),
    ],
    "/v1/messages": [
        (TURNS | {"max_tokens": 9, "temperature": 500}, "temperature"),
        (TURNS | {"max_tokens": 0}, "max_tokens"),
        (TURNS | {"max_tokens": 9, "stop_sequences": [""]}, "stop_sequences[0]"),
        (TURNS | {"max_tokens": 9, "stop_sequences": ["x"] * 99}, "stop_sequences"),
        (TURNS | {"max_tokens": 9, "tools": [ANTHROPIC_TOOL]}, "tools"),
        (
            TURNS | {"max_tokens": 9999, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens",
        ),
        (
            TURNS | {"max_tokens": 9, "output_config": {"format": {"type": "json_schema",
             "schema": {"title": "refused"}}}},
            "output_config.format",
        ),
    ],
    "/api/chat": [
        (TURNS | {"options": {"temperature": 500}}, "options.temperature"),
        (TURNS | {"options": {"top_p": 0.0}}, "options.top_p"),
        (TURNS | {"options": {"num_predict": 5000}}, "messages"),
        (TURNS | {"options": {"repeat_penalty": 0.0}}, "options.repeat_penalty"),
        (TURNS | {"options": {"presence_penalty": 9.0}}, "options.presence_penalty"),
        (TURNS | {"options": {"stop": ["x" * 999]}}, "options.stop[0]"),
        (TURNS | {"think": "high"}, "think"),
        (TURNS | {"options": {"mirostat": 1}}, "options.mirostat"),
        (TURNS | {"format": {"title": "refused"}}, "format"),
    ],
    "/api/generate": [
        ({"prompt": "x", "raw": True, "options": {"min_p": 3.0}}, "options.min_p"),
        ({"prompt": "x", "raw": True, "options": {"num_predict": 5000}}, "prompt"),
        ({"prompt": "x", "raw": True, "format": {"title": "refused"}}, "format"),
        ({"prompt": "x", "raw": True, "system": "y"}, "system"),
    ],
    "/generate": [
        ({"text": "x", "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 5}},
         "sampling_params.min_new_tokens"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"stop_token_ids": [-1]}},
         "sampling_params.stop_token_ids"),
        ({"text": "x", "sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex"),
        ({"text": "x", "sampling_params": {"regex": "refused"}}, "sampling_params.regex"),
        ({"text": ["x"] * 9, "sampling_params": {"n": 9}}, "sampling_params.n"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}},
         "sampling_params.min_new_tokens"),
        ({"text": "x", "sampling_params": {"regex": "a+", "ebnf": 'root ::= "a"'}},
         "sampling_params.ebnf"),
        ({"text": "x", "sampling_params": {"stream_interval": 0}},
         "sampling_params.stream_interval"),
        ({"text": "x", "sampling_params": {"custom_params": {"a": 1}}},
         "sampling_params.custom_params"),
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": ["x"] * 9}, "text"),
        ({"input_ids": [[1]] * 9}, "input_ids"),
        ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
        *(
            ({"text": ["ab", "cd"], field: [None] * length}, field)
            for field in OF_EACH_PROMPT
            for length in (0, 1, 3)
        ),
    ],
    "/parse_function_call": [
        ({"text": "x", "tools": [ADD], "tool_call_parser": "nope"}, "tool_call_parser"),
        ({"text": "x", "tool_call_parser": "hermes"}, "tools"),
        ({"text": "x", "tools": [], "tool_call_parser": "hermes"}, "tools"),
        ({"tools": [ADD], "tool_call_parser": "hermes"}, "text"),
    ],
    "/separate_reasoning": [
        ({"text": "x"}, "reasoning_parser"),
        ({"text": "x", "reasoning_parser": "nope"}, "reasoning_parser"),
        ({"text": 1, "reasoning_parser": "qwen3"}, "text"),
    ],
    "/v1/score": [
        (SCORE | {"items": [[1]]}, "items"),
        (SCORE | {"items": ["a" * 2000]}, "items"),
        (SCORE | {"items": ["a"] * 9}, "items"),
        (SCORE | {"label_token_ids": [257]}, "label_token_ids"),
        (SCORE | {"label_token_ids": []}, "label_token_ids"),
        (SCORE | {"query": 1}, "query"),
    ],
    "/generate_stream": [
        ({"inputs": "x", PARAMETERS: {"temperature": -1}}, "parameters.temperature"),
        ({"inputs": "x", PARAMETERS: {"top_p": 2.0}}, "parameters.top_p"),
        ({"inputs": "x", PARAMETERS: {"max_new_tokens": 5000}}, "inputs"),
        ({"inputs": "x", PARAMETERS: {"repetition_penalty": 0.0}},
         "parameters.repetition_penalty"),
        ({"inputs": "x", PARAMETERS: {"best_of": 2, "do_sample": True}}, "parameters.best_of"),
        ({"inputs": "x", PARAMETERS: {"decoder_input_details": True}},
         "parameters.decoder_input_details"),
    ],
    "/": [
        ({}, "inputs"),
        ({"inputs": "x", PARAMETERS: {"best_of": 9, "do_sample": True}}, "parameters.best_of"),
        ({"inputs": "x", PARAMETERS: {"best_of": 2}}, "parameters.best_of"),
        ({"inputs": "x", PARAMETERS: {"n": 2}}, "parameters.n"),
        ({"inputs": "x", PARAMETERS: {"no_stop_trim": False}}, "parameters.no_stop_trim"),
        ({"inputs": "x", PARAMETERS: {"best_of": 2, "do_sample": True, "seed": 1}},
         "parameters.seed"),
        ({"inputs": "x", PARAMETERS: {"grammar": {"type": "json_schema", "value": {}}}},
         "parameters.grammar.value"),
        ({"inputs": "x", PARAMETERS: {"grammar": {"type": "regex", "value": "refused"}}},
         "parameters.grammar"),
    ],
}  # fmt: skip
LIGHT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 3, "min_new_tokens": 5}, "parameters.min_new_tokens"),
    ({"best_of": 9, "n": 2}, "parameters.best_of"),
    ({"n": 3, "best_of": 2}, "parameters.n"),
    ({"stop_sequences": ["x", [1]]}, "parameters.stop_sequences"),
    ({"allowed_token_ids": [1], "regular_constraint": "a"}, "parameters.allowed_token_ids"),
    ({"regular_constraint": "a", "guided_json": {}}, "parameters.regular_constraint"),
    ({"print_eos_token": True}, "parameters.print_eos_token"),
    ({"no_stop_trim": False}, "parameters.no_stop_trim"),
    ({"input_penalty": True}, "parameters.input_penalty"),
    ({"exponential_decay_length_penalty": [1, 2.0]}, "parameters.exponential_decay_length_penalty"),
    ({"n": 9}, "parameters.n"),
    ({"stop_sequences": [[-1]]}, "parameters.stop_sequences"),
    ({"stop_sequences": ["x"] * 99}, "parameters.stop_sequences"),
    ({"regular_constraint": "refused"}, "parameters.regular_constraint"),
    ({"guided_json": {"title": "refused"}}, "parameters.guided_json"),
    ({"top_p": 3.0, "do_sample": True}, "parameters.top_p"),
]
ALL = [
    *((path, body, param) for path, cases in CASES.items() for body, param in cases),
    *(("light", {"inputs": "x", PARAMETERS: fields}, param) for fields, param in LIGHT_CASES),
]


def leaves(value: Any) -> set[str]:
    """Return all field names of a body."""
    if isinstance(value, list):
        return {name for item in value for name in leaves(item)}
    if not isinstance(value, dict):
        return set()
    return value.keys() | {name for item in value.values() for name in leaves(item)}


@pytest.mark.parametrize(("path", "body", "param"), ALL)
async def test_an_error_names_what_the_client_has_sent(
    path: str, body: dict[str, Any], param: str
) -> None:
    dialect = "lightllm" if path == "light" else "auto"
    server = FakeServer(
        tokenizer=CharTokenizer("enable_thinking" if "messages" in path else "x"),
        config=make_config(generate_dialect=dialect, tool_parser="hermes"),
        plan=make_plan(),
    )
    async with make_client(server) as client:
        response = await client.post("/generate" if path == "light" else path, json=body)

    assert response.status_code in (400, 422), response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    if isinstance(error, dict) and "param" in error:
        assert error["param"] == param
        assert error["code"] == "unsupported" or param not in UNSUPPORTED
    # The message names a field by its full path, and no field that is absent from the body.
    names = set(re.findall(r"[A-Za-z_][\w.]*\w|[A-Za-z_]", message))
    inner = names & set(INNER) - ({"n", "temperature"} if "best_of" in param else set())
    assert inner <= body.keys(), f"{message} names {inner}"
    if not message.startswith(("It cannot", "This model's maximum")):
        assert param in message, message


async def test_a_message_keeps_its_other_words() -> None:
    rules = renames((r"^n$", "best_of"), (r"^max_tokens$", "num_predict"))
    with (
        pytest.raises(InvalidRequest) as caught,
        in_callers_words(rules),
    ):
        raise InvalidRequest(
            "n is 9; it must not exceed max_tokens (3). No end.", "n", "c", limit="max_n"
        )
    error = caught.value
    assert error.message == "best_of is 9; it must not exceed num_predict (3). No end."
    assert (error.param, error.code, error.limit) == ("best_of", "c", "max_n")


async def test_what_the_client_has_written_is_repeated_as_it_was() -> None:
    rules = renames((r"^max_tokens", "num_predict"))
    with pytest.raises(InvalidRequest) as caught, in_callers_words(rules):
        raise InvalidRequest("The model's max_tokens: the tool 'max_tokens' isn't known.", "tools")
    message = "The model's num_predict: the tool 'max_tokens' isn't known."
    assert caught.value.message == message


async def test_a_word_that_is_also_a_fields_name_is_left_alone_elsewhere() -> None:
    rules = renames((r"^stop$", "stop_sequences"), (r"^messages.*", "input"))
    with pytest.raises(PromptTooLong) as caught, in_callers_words(rules):
        raise PromptTooLong("messages: these messages never stop.", "messages")
    assert caught.value.message == "input: these input never stop."
