"""Fields of SGLang's, TGI's, LightLLM's and vLLM's bodies that generate text."""

from __future__ import annotations

from remora.deployments.http.lightllm.bodies import LightBody, TokensBody
from remora.deployments.http.sglang.bodies import GenerateBody
from remora.deployments.http.sglang.parse_routes import ParseCallsBody, SeparateBody
from remora.deployments.http.sglang.score import ScoreBody
from remora.deployments.http.tgi.bodies import TgiBody
from remora.deployments.http.vllm.scoring import GenerativeScoringBody
from remora.deployments.http.vllm.tokens import GenerateTokensBody
from tests.deployments.http.fields.chats import COMPLETION
from tests.deployments.http.fields.observing import (
    REASONED,
    Api,
    Rows,
    effect,
    hint,
    refused,
    within,
)
from tests.deployments.http.fields.shared import (
    ADD,
    CALL,
    PATCH,
    SAMPLING,
    SCHEMA,
    STREAM_OPTIONS,
    TOOLS,
    rich_server,
)

_LOGPROBS = {"return_logprob": True}
SGLANG: Rows = {
    "text": effect("abc"),
    "input_ids": refused([65]),
    "input_embeds": effect([[1.0, 2.0]], {"text": None, "input_embeds": [[0.5, 2.0]]}),
    **within(
        "sampling_params[0]",
        {
            **SAMPLING,
            "max_new_tokens": effect(3),
            "min_new_tokens": effect(3),
            "sampling_seed": effect(3),
            "json_schema": effect(SCHEMA),
            "regex": effect("a"),
            "ebnf": effect('root ::= "a"'),
            "structural_tag": effect({"structures": [], "triggers": ["<a>"]}),
        },
    ),
    "sampling_params[0].stream_interval": effect(2, {"stream": True}),
    "model": refused("other"),
    "rid": effect("mine"),
    "return_logprob": effect(True),
    "logprob_start_len": effect(0, _LOGPROBS),
    "top_logprobs_num": effect(2, _LOGPROBS),
    "token_ids_logprob": effect([7], _LOGPROBS),
    "lora_path": refused("other"),
    "return_text_in_logprobs": effect(True, _LOGPROBS),
    "stream": effect(True),
    "priority": effect(3),
    "cache_salt": effect("a"),
    "task_id": effect("sum"),
    "custom_logit_processor": effect("louder"),
    "return_hidden_states": effect(True),
    "log_metrics": hint(False),
}
TGI: Rows = {
    "inputs": effect("abc"),
    **within(
        "parameters",
        {
            **SAMPLING,
            "n": refused(2),
            "use_beam_search": effect(True),
            "no_stop_trim": refused(False),
            "max_new_tokens": effect(3),
            "do_sample": effect(True),
            "seed": effect(3, {"do_sample": True, "seed": 1}),
            "best_of": effect(2, {"do_sample": True}),
            "truncate": effect(1),
            "return_full_text": effect(True),
            "details": effect(True),
            "decoder_input_details": effect(True, {"details": True}),
            "top_n_tokens": effect(2, {"details": True}),
            "adapter_id": refused("other", named="other"),
            "watermark": refused(True),
            "grammar.type": effect("regex", {"grammar": {"type": "json", "value": "{}"}}),
            "grammar.value": effect("b", {"grammar": {"type": "regex", "value": "a"}}),
        },
    ),
    "stream": effect(True),
    "model": refused("other"),
}
LIGHTLLM: Rows = {
    "inputs": effect("abc"),
    **within(
        "parameters",
        {
            **SAMPLING,
            "no_stop_trim": refused(False),
            "max_new_tokens": effect(3),
            "min_new_tokens": effect(3),
            "do_sample": effect(True),
            "temperature": effect(0.5, {"do_sample": True}),
            "seed": effect(3),
            "best_of": effect(2),
            "do_beam": effect(True, {"n": 2}),
            "do_beam_search": effect(True, {"n": 2}),
            "stop_sequences": effect(["x"]),
            "add_special_tokens": effect(False),
            "add_spaces_between_special_tokens": hint(False),
            "print_eos_token": refused(True),
            "return_details": effect(True),
            "allowed_token_ids": effect([65]),
            "regular_constraint": effect("a"),
            "guided_grammar": effect('root ::= "a"'),
            "guided_json": effect(SCHEMA),
            "exponential_decay_length_penalty": refused([1, 2.0]),
            "input_penalty": refused(True),
            "group_request_id": hint(3),
            "move_kv_to_decode_node": refused({"a": 1}),
            "suggested_dp_index": refused(1),
            "disable_prompt_cache": refused(True),
        },
    ),
    "multimodal_params": refused({"images": ["a"]}),
    "model": refused("other"),
    "rid": effect("mine"),
    "stream": effect(True),
}
SCORE: Rows = {
    "query": effect("b"),
    "items": effect(["d"]),
    "label_token_ids": effect([81]),
    "apply_softmax": effect(True),
    "item_first": effect(True),
    "model": refused("other"),
    "priority": effect(3),
    "cache_salt": effect("a"),
    "rid": effect("mine"),
}
GENERATIVE: Rows = {
    **{name: row for name, row in SCORE.items() if name != "rid"},
    "apply_softmax": effect(False),
    "add_special_tokens": refused(False),
    "request_id": effect("mine"),
    "user": hint("me"),
}
# Fields of completions that concern a text, or the request as a whole.
_OTHERS = (
    *(
        "prompt",
        "prompt_embeds",
        "suffix",
        "echo",
        "model",
        "stream",
        "best_of",
        "task_id",
        "rid",
        "request_id",
    ),
    *("priority", "cache_salt", "add_special_tokens", "return_prompt_text"),
)
TOKENS: Rows = {
    "token_ids": effect([65]),
    **within(
        "sampling_params",
        {
            **COMPLETION,
            **{name: refused(COMPLETION[name].value) for name in _OTHERS},
            **dict.fromkeys(STREAM_OPTIONS, refused(True, named="sampling_params.stream_options")),
            # Answers hold ids in any case.
            "return_token_ids": hint(True),
            "return_tokens_as_token_ids": hint(True, {"logprobs": 1}),
        },
    ),
    "model": refused("other"),
    "stream": effect(True),
    **STREAM_OPTIONS,
    "cache_salt": effect("a"),
    "priority": effect(3),
    "request_id": effect("mine"),
    "features": refused({"a": 1}),
}
# The parameters of a tool decide the types of values in formats without quotation marks.
_BARE = {
    "text": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
    "tool_call_parser": "qwen3_coder",
}
_NUMBERED = {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}
_TYPED = {**_BARE, "tools": [{"type": "function", "function": _NUMBERED}]}
_INPUT = "<tool_call><function=patch><parameter=input>1</parameter></function></tool_call>"
CALLS_OF: Rows = {
    "text": effect("none"),
    **TOOLS,
    "tools[0].function.name": effect("sub", _TYPED),
    "tools[0].function.parameters": effect(SCHEMA, _TYPED),
    "tools[0].function.description": hint("Adds"),
    "tools[0].function.strict": hint(True),
    "tools[0].custom.name": effect("add", {**_BARE, "tools": [PATCH], "text": _INPUT}),
    "tools[0].custom.description": hint("Edits", {"tools": [PATCH]}),
    "tool_call_parser": effect("mistral"),
}
SEPARATE: Rows = {"text": effect("none"), "reasoning_parser": effect("mistral")}
COUNT: Rows = {
    "text": effect("abc"),
    "parameters": effect({"add_special_tokens": False}),
    "multimodal_params": refused({"images": ["a"]}),
}

_SCORED = {"query": "a", "items": ["c"], "label_token_ids": [80]}
_INPUTS = {"inputs": "ab", "parameters": {}}
APIS = {
    "sglang": Api(
        GenerateBody, "/generate", {"text": "ab"}, SGLANG, rich_server(), "/generate (SGLang)"
    ),
    "tgi": Api(TgiBody, "/", _INPUTS, TGI, rich_server(), "/generate (TGI)"),
    "lightllm": Api(
        LightBody,
        "/",
        _INPUTS,
        LIGHTLLM,
        rich_server(api={"generate_dialect": "lightllm"}),
        "/generate (LightLLM)",
    ),
    "light tokens": Api(TokensBody, "/tokens", {"text": "ab"}, COUNT, rich_server()),
    "score": Api(ScoreBody, "/v1/score", _SCORED, SCORE, rich_server()),
    "generative scoring": Api(
        GenerativeScoringBody, "/generative_scoring", _SCORED, GENERATIVE, rich_server()
    ),
    "token ids": Api(
        GenerateTokensBody,
        "/inference/v1/generate",
        {"token_ids": [65, 66], "sampling_params": {}},
        TOKENS,
        rich_server(),
    ),
    "parse calls": Api(
        ParseCallsBody,
        "/parse_function_call",
        {"text": CALL, "tools": [ADD], "tool_call_parser": "hermes"},
        CALLS_OF,
        rich_server(),
    ),
    "separate": Api(
        SeparateBody,
        "/separate_reasoning",
        {"text": REASONED, "reasoning_parser": "qwen3"},
        SEPARATE,
        rich_server(),
    ),
}
