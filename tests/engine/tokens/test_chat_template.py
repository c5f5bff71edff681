"""Templates write what they write under transformers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from remora.engine.tokens.chat_template import ChatTemplate
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_tokenizer

USER = {"role": "user", "content": "What is 1 < 2 & 'so'?"}
TOOL_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": [None, "é<"]}}}],
}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two  "}],
}
THOUGHT = {"role": "assistant", "reasoning": "hm", "content": "yes "}

# In the manner of models' own: trimming blocks, loops with controls, namespaces, macros, JSON.
BUSY = """
{{- bos_token }}
{%- set ns = namespace(last=0, self='x') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {%- if message.content is string %}
        {%- set text = message.content | trim %}
    {%- else %}
        {%- set text = message.content | map(attribute='text') | join('+') %}
    {%- endif %}
    <|im_start|>{{ message.role }}
    {% generation %}{% set inner = text %}{{ inner }}{{ loop is defined }}{% endgeneration %}
    {{ inner is defined }} {{ message.reasoning_content }} {{ message.thinking is defined }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{ call.function | tojson }} {{ call.function.arguments | tojson(indent=2) }}
        {%- endfor %}
    {%- endif %}
{{ eos_token }}
{% endfor %}
{{ dict(a=1, **{'b': 2}) }} {{ dict.fromkeys(['x'], 1) }} {{ ns.last }} {{ ns.self }}
{{ tools is none }} {{ documents is none }} {{ tools }} {{ mood | default('no mood') }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""


def both(
    source: str,
    messages: list[dict[str, Any]],
    *,
    prompt: bool = True,
    continued: bool = False,
    **variables: Any,
) -> tuple[str, str]:
    """Return what we render, and what transformers does."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = source
    ours = ChatTemplate(source, tokenizer.special_tokens_map).render(
        messages,
        add_generation_prompt=prompt,
        continue_final_message=continued,
        variables=variables,
    )
    theirs = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=prompt,
        continue_final_message=continued,
        **variables,
    )
    return ours, theirs


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, BUSY])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": " Be brief. "}, USER, {"role": "assistant", "content": "y"}],
        [USER] * 9,
        [{"role": "user", "content": "line\n  line\n", "name": None}],
    ],
)
def test_chats_come_out_as_under_transformers(
    source: str, prompt: bool, messages: list[dict[str, Any]]
) -> None:
    ours, theirs = both(source, messages, prompt=prompt)

    assert ours == theirs


@pytest.mark.parametrize("messages", [[PARTS], [USER, THOUGHT, USER]])
def test_parts_and_thoughts_come_out_as_under_transformers(messages: list[dict[str, Any]]) -> None:
    ours, theirs = both(BUSY, messages, mood="calm", eos_token="<END>")

    assert ours == theirs


def test_calls_of_tools_come_out_as_under_transformers() -> None:
    source = "{% for m in messages %}{{ m.content is defined }}{{ m | tojson }}{% endfor %}"

    ours, theirs = both(source, [USER, TOOL_CALL])

    assert ours == theirs
    assert '"é<"' in ours


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, "{{ messages[-1].content | trim }}<END>"])
@pytest.mark.parametrize("content", ["Hello th", "ends in space ", "  \n", "twice twice"])
def test_an_open_message_ends_as_under_transformers(source: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]

    ours, theirs = both(source, messages, prompt=False, continued=True)

    assert ours == theirs


def test_the_last_text_of_several_parts_can_be_continued() -> None:
    source = "{{ messages[0].content | map(attribute='text') | join('+') }}<END>"

    ours, theirs = both(source, [PARTS], prompt=False, continued=True)

    assert ours == theirs == "one+two  "


@pytest.mark.parametrize(
    ("source", "message", "words"),
    [
        ("{{ messages[0].role }}", USER, "does not show"),
        (CHAT_TEMPLATE, {"role": "user"}, "no text"),
        (CHAT_TEMPLATE, {"role": "user", "content": [{"type": "image"}]}, "no text"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    source: str, message: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ChatTemplate(source, {}).render(
            [message], add_generation_prompt=False, continue_final_message=True, variables={}
        )


def test_a_template_knows_the_time() -> None:
    ours, _ = both("{{ strftime_now('%Y') }}", [USER])

    assert abs(int(ours) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace().__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__class__.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(SecurityError):
        both(source, [USER])


def test_objects_that_are_no_data_are_refused() -> None:
    with pytest.raises(ValueError, match="holds a object"):
        both("{{ x }}", [USER], x=object())
