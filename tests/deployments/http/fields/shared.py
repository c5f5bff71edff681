"""Rows of fields that several APIs share: sampling, constraints, tools, messages of chats."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from remora.configs.planning.speculation_plan import SpeculationPlan
from remora.deployments.http.core.fields import HintsBody, SamplingBody
from tests.deployments.fakes import EOS, CharTokenizer, FakeServer, make_plan, make_server_config
from tests.deployments.http.fields.observing import Row, Rows, effect, hint, refused

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
PATCH = {"type": "custom", "custom": {"name": "patch"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLS = f"</think>{CALL}\n{CALL}"
BEAMS = {"num_beams": 4}


class Framing(CharTokenizer):
    """Precedes texts by a token of its own, where it is asked to; has marks of gaps."""

    added_tokens = MappingProxyType(
        {
            2: "<|fim_prefix|>",
            3: "<|fim_suffix|>",
            4: "<|fim_middle|>",
            5: "<|repo_name|>",
            6: "<|file_sep|>",
            EOS: "</s>",
        }
    )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = super().encode(text, add_special_tokens=False)
        return [1, *ids] if add_special_tokens else ids


NGRAM = SpeculationPlan(method="ngram", max_drafts=4, shortest=2, longest=5, max_bytes=2**20)


def rich_server(*variables: str, **sections: Any) -> FakeServer:
    """Return a server with all optional parts of the APIs.

    variables:  of the chat template, in addition to those of tools and reasoning
    """
    api = {
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
        "hidden_states": True,
        "prompt_truncation": "tail",
        "response_store": "memory",
        "task_prompts": {"sum": "Sum up: "},
        "prompt_embeddings": True,
    } | sections.pop("api", {})
    engine = {"logit_processors": {"louder": "my.module:louder"}}
    names = ("documents", "enable_thinking", *variables)
    return FakeServer(
        tokenizer=Framing(*names),
        config=make_server_config(api=api, engine=engine, **sections),
        plan=make_plan(speculation=NGRAM, embedding_size=2),
    )


SAMPLING: Rows = {
    "temperature": effect(0.5),
    "top_p": effect(0.5),
    "top_k": effect(5),
    "min_p": effect(0.5),
    "typical_p": effect(0.5),
    "presence_penalty": effect(0.5),
    "frequency_penalty": effect(0.5),
    "repetition_penalty": effect(1.5),
    "logit_bias": effect({"7": 1}),
    "stop": effect(["x"]),
    "stop_regex": effect(["x{1,3}"]),
    "stop_token_ids": effect([7]),
    "ignore_eos": effect(True),
    "no_stop_trim": effect(True),
    "skip_special_tokens": effect(False),
    "custom_logit_processor": effect("louder"),
    "custom_params": effect({"a": 1}, {"custom_logit_processor": "louder"}),
    "spaces_between_special_tokens": hint(False),
    "n": effect(2),
    "max_drafts": effect(0),
    "use_beam_search": effect(True, {"n": 2}),
    "num_beams": effect(3),
    "length_penalty": effect(0.5, BEAMS),
    "early_stopping": effect(True, BEAMS),
    "num_beam_groups": effect(2, BEAMS),
    "diversity_penalty": effect(0.5, BEAMS | {"num_beam_groups": 2}),
}
assert SAMPLING.keys() == SamplingBody.model_fields.keys()

HINTS: Rows = {
    "user": hint("me"),
    "safety_identifier": hint("a"),
    "session_id": hint("b"),
    "prompt_cache_key": hint("c"),
    "prompt_cache_retention": hint("24h"),
    "service_tier": hint("flex"),
    "verbosity": hint("high"),
}
assert HINTS.keys() == HintsBody.model_fields.keys()

CONSTRAINTS: Rows = {
    "response_format": effect({"type": "json_object"}),
    "structured_outputs": effect({"regex": "a"}),
    "guided_json": effect(SCHEMA),
    "guided_regex": effect("a"),
    "guided_choice": effect(["a", "b"]),
    "guided_grammar": effect('root ::= "a"'),
    "guided_json_object": effect(True),
    "guided_decoding_backend": refused("outlines"),
    "json_schema": effect(SCHEMA),
    "regex": effect("a"),
    "ebnf": effect('root ::= "a"'),
    "grammar": effect('root ::= "a"'),
    "structural_tag": effect({"structures": [], "triggers": ["<a>"]}),
}

STREAM_OPTIONS: Rows = {
    "stream_options.include_usage": effect(True, {"stream": True}),
    "stream_options.continuous_usage_stats": effect(
        True, {"stream": True, "stream_options.include_usage": True}
    ),
    "stream_options.include_obfuscation": hint(True, {"stream": True}),
}

_ONE = {"tools": [ADD]}
FUNCTION: Rows = {
    "name": effect("sub"),
    "description": effect("Adds"),
    "parameters": effect({"type": "object"}),
    "strict": effect(True),
}
TOOLS: Rows = {
    "tools[0].type": refused("web_search", _ONE),
    **{f"tools[0].function.{name}": row._replace(needs=_ONE) for name, row in FUNCTION.items()},
    "tools[0].custom.name": effect("other", {"tools": [PATCH]}),
    "tools[0].custom.description": effect("Edits", {"tools": [PATCH]}),
    "tools[0].custom.format": refused({"type": "grammar"}, {"tools": [PATCH]}),
}
FUNCTIONS: Rows = {
    f"functions[0].{name}": row._replace(needs={"functions": [ADD["function"]]})
    for name, row in FUNCTION.items()
}
CHOICES: Rows = {
    "tool_choice": effect("required", _ONE),
    "parallel_tool_calls": effect(False, _ONE, says=CALLS),
    "function_call": effect("none", {"functions": [ADD["function"]]}),
}
TEMPLATE: Rows = {
    **TOOLS,
    **FUNCTIONS,
    **CHOICES,
    "add_generation_prompt": effect(False),
    "continue_final_message": effect(True),
    "chat_template_kwargs": effect({"enable_thinking": False}),
    "documents": effect([{"text": "a"}]),
    "reasoning_effort": effect("none"),
}


def _said(**more: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": "a", **more}]}


_CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
_CUSTOM = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
_TURN = "messages[1]."
MESSAGES: Rows = {
    "messages[0].role": effect("system"),
    "messages[0].content": effect("Ho"),
    "messages[0].name": effect("Ann"),
    "messages[0].refusal": effect("No.", {"messages": [{"role": "assistant", "content": None,
                                                         "reasoning": "a"}]}),
    "messages[0].reasoning": effect("Hm.", {"messages[0].role": "assistant"}),
    "messages[0].reasoning_content": effect("Hm.", {"messages[0].role": "assistant"}),
    "messages[0].tool_call_id": effect("1", {"messages[0].role": "tool"}),
    "messages[0].annotations": hint([], {"messages[0].role": "assistant"}),
    "messages[0].audio": refused({"id": "a"}),
}  # fmt: skip
_CALLING = {"messages": [{"role": "assistant", "tool_calls": [_CALLED]}]}
_PATCHING = {"messages": [{"role": "assistant", "tool_calls": [_CUSTOM]}]}
_AT = "messages[0].tool_calls[0]."
CALLED: Rows = {
    f"{_AT}id": effect("2", _CALLING),
    f"{_AT}index": hint(0, _CALLING),
    f"{_AT}type": refused("web_search", _CALLING),
    f"{_AT}function.name": effect("sub", _CALLING),
    f"{_AT}function.arguments": effect('{"a": 1}', _CALLING),
    f"{_AT}custom.name": effect("other", _PATCHING),
    f"{_AT}custom.input": effect("y", _PATCHING),
    "messages[0].function_call.name": effect(
        "sub", {"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}
    ),
    "messages[0].function_call.arguments": effect(
        '{"a": 1}', {"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}
    ),
}
CONVERSATION: Rows = {**MESSAGES, **CALLED}


def renamed(rows: Rows, old: str, new: str) -> dict[str, Row]:
    """Return rows whose fields have another beginning."""
    return {
        name.replace(old, new, 1): row._replace(
            needs={key.replace(old, new, 1): value for key, value in row.needs.items()}
        )
        for name, row in rows.items()
    }
