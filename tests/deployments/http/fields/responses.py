"""Fields of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

from remora.deployments.http.responses.bodies import PromptBody, ResponsesBody
from remora.deployments.http.responses.compact import CompactBody
from tests.deployments.http.fields.observing import Api, Rows, effect, hint, refused
from tests.deployments.http.fields.shared import (
    CALLS,
    SAMPLING,
    SCHEMA,
    STREAM_OPTIONS,
    rich_server,
)

ADD = {"type": "function", "name": "add", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch"}
_CALL = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "1", "output": "3"}
_EDIT = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "x"}
_ASK = {"role": "user", "content": "Hi"}
_THOUGHT = {"type": "reasoning", "summary": []}
_SAID = {"type": "message", "role": "assistant", "content": "a", "id": "msg_1"}


def _items(*items: Any) -> dict[str, Any]:
    return {"input": [*items, _ASK]}


ITEMS: Rows = {
    "input[0].type": refused("file_search_call"),
    "input[0].id": hint("msg_2", _items(_SAID)),
    "input[0].role": effect("system"),
    "input[0].content": effect("Ho"),
    "input[0].call_id": effect("2", _items(_CALL)),
    "input[0].name": effect("sub", _items(_CALL)),
    "input[0].arguments": effect('{"a": 1}', _items(_CALL)),
    "input[0].input": effect("y", _items(_EDIT)),
    "input[0].output": effect("4", _items(_RESULT)),
    "input[0].summary": effect([{"type": "summary_text", "text": "Hm."}], _items(_THOUGHT)),
    "input[0].status": hint("completed", _items(_SAID)),
    "input[0].encrypted_content": refused(
        "x", _items({"type": "compaction", "encrypted_content": "y"})
    ),
    "input[0].phase": hint("final_answer", _items(_SAID)),
}
CONVERSATION: Rows = {
    **ITEMS,
    "model": refused("other"),
    "instructions": effect("Be brief."),
    "previous_response_id": refused("resp_1"),
    "chat_template_kwargs": effect({"enable_thinking": False}),
    "prompt_cache_key": hint("a"),
    "prompt_cache_retention": hint("24h"),
    "prompt_cache_options.mode": hint("implicit"),
    "prompt_cache_options.ttl": hint("1h"),
    "prompt_cache_options.comparison_response_id": hint("resp_1"),
    "prompt_cache_options.prewarm": refused(True),
    "conversation": refused("conv_1"),
    "image": refused("a"),
}
_ONE = {"tools": [ADD]}
PROMPT: Rows = {
    **CONVERSATION,
    "text.format.type": effect("json_object", {"text": {"format": {"type": "text"}}}),
    "text.verbosity": hint("low"),
    "tools[0].type": refused("web_search", _ONE),
    "tools[0].name": effect("sub", _ONE),
    "tools[0].description": effect("Adds", _ONE),
    "tools[0].parameters": effect({"type": "object"}, _ONE),
    "tools[0].format": refused({"type": "grammar"}, {"tools": [PATCH]}),
    "tools[0].allowed_callers": refused(["server"], _ONE),
    "tools[0].defer_loading": refused(True, _ONE),
    "tools[0].async": refused(True, _ONE),
    "tools[0].output_schema": hint(SCHEMA, _ONE),
    "reasoning.summary": hint("auto"),
    "reasoning.generate_summary": hint("auto"),
    "personality": refused("friendly"),
}
_FORMAT = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "max_drafts", "stop_token_ids"),
    "skip_special_tokens",
)
_LONG = {"input": [{"role": "user", "content": "a" * 2000}, _ASK]}
RESPONSE: Rows = {
    **PROMPT,
    **{name: SAMPLING[name] for name in _SAMPLING},
    **STREAM_OPTIONS,
    "stream_options.include_usage": hint(True, {"stream": True}),
    "stream_options.continuous_usage_stats": hint(True, {"stream": True}),
    "text.format.name": effect("b", _FORMAT),
    "text.format.description": effect("b", _FORMAT),
    "text.format.schema": effect({"type": "object"}, _FORMAT),
    "text.format.strict": effect(False, _FORMAT),
    "tools[0].strict": effect(True, _ONE),
    "tool_choice": effect("required", _ONE),
    "parallel_tool_calls": effect(False, _ONE, says=CALLS),
    "reasoning.effort": effect("none"),
    "truncation": effect("auto", _LONG),
    "cache_salt": effect("a"),
    "priority": effect(3),
    "store": effect(False),
    "stream": effect(True),
    "max_output_tokens": effect(3),
    "include": effect(["message.output_text.logprobs"]),
    "top_logprobs": effect(2),
    "seed": effect(3),
    "min_tokens": effect(3),
    "include_stop_str_in_output": effect(True),
    "include_reasoning": effect(False),
    "user": hint("me"),
    "metadata": effect({"a": "b"}),
    "safety_identifier": hint("a"),
    "service_tier": hint("flex"),
    "max_tool_calls": hint(3),
    "prompt": refused({"id": "a"}),
    "context_management": refused([{"type": "compaction"}]),
    "moderation": refused({"model": "a"}),
    "access_programs": refused(["a"]),
    "background": effect(True),  # the last one, since what it begins is not waited for
}
# Only what templates show, or an error, decides the number of tokens.
COUNT: Rows = {
    **PROMPT,
    "text.format.type": hint("json_object", {"text": {"format": {"type": "text"}}}),
    "text.format.name": hint("b", _FORMAT),
    "text.format.description": hint("b", _FORMAT),
    "text.format.schema": hint({"type": "object"}, _FORMAT),
    "text.format.strict": hint(False, _FORMAT),
    "tools[0].strict": hint(True, _ONE),
    "tool_choice": effect("none", _ONE),
    "parallel_tool_calls": hint(False, _ONE),
    "reasoning.effort": effect("none"),
    "truncation": hint("auto"),
    "cache_salt": hint("a"),
    "priority": hint(3),
    "service_tier": hint("flex"),
}
COMPACT: Rows = {
    **CONVERSATION,
    "cache_salt": effect("a"),
    "priority": effect(3),
    "service_tier": hint("flex"),
}

_BODY = {"input": [_ASK]}
APIS = {
    "responses": Api(ResponsesBody, "/v1/responses", _BODY, RESPONSE, rich_server()),
    "response tokens": Api(PromptBody, "/v1/responses/input_tokens", _BODY, COUNT, rich_server()),
    "compact": Api(CompactBody, "/v1/responses/compact", _BODY, COMPACT, rich_server()),
}
