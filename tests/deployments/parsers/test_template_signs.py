"""Formats recognised by chat templates."""

from __future__ import annotations

import pytest

from remora.deployments.parsers.reasoning import reasoning_format
from remora.deployments.parsers.template_signs import REASONING_SIGNS, TOOL_SIGNS, matching_format
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n", "hermes"),
        ("'<tool_call>\\n<function=' + tool_call.name + '>'", "qwen3_coder"),
        ("'<tool_call>' + tc.name <arg_key>{{ k }}</arg_key> tc.arguments", "glm45"),
        ("'<seed:tool_call>\\n<function=' + tool_call.name", "seed_oss"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama3"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument '
            "name and its value}.",
            "llama3",
        ),
        ("{{- '<|python_start|>' }} <|python_tag|>", "llama4"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '```json'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("'<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + content", "granite"),
        ("{{ message['content'] }}<|im_end|>", None),
        (None, None),
    ],
)
def test_a_template_shows_how_calls_are_written(source: str | None, expected: str | None) -> None:
    assert matching_format(source, TOOL_SIGNS) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '<think>\\n\\n</think>\\n\\n' }}", "qwen3"),
        ("{% set content = content.split('</think>')[-1] %}", "deepseek-r1"),
        ("[THINK]", "mistral"),
        ("◁think▷", "kimi"),
        ("<seed:think>", "seed_oss"),
        ("{{ message['content'] }}", None),
    ],
)
def test_a_template_shows_how_reasoning_is_written(source: str, expected: str | None) -> None:
    assert matching_format(source, REASONING_SIGNS) == expected


def test_every_sign_leads_to_a_format() -> None:
    assert all(sign.format_name in TOOL_FORMATS for sign in TOOL_SIGNS)
    assert all(reasoning_format(sign.format_name) for sign in REASONING_SIGNS)
