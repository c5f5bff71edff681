"""Templates write what they write under transformers."""

from __future__ import annotations

from datetime import datetime
from itertools import product
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from remora.engine.tokens.chat_template import MAX_RENDER_CHARS, ChatTemplate
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


def render(
    source: str,
    messages: list[dict[str, Any]],
    *,
    prompt: bool = True,
    continued: bool = False,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    return ChatTemplate(source, make_tiny_tokenizer().special_tokens_map).render(
        messages,
        add_generation_prompt=prompt,
        continue_final_message=continued,
        variables=variables,
        tools=tools,
        documents=documents,
    )


def both(
    source: str,
    messages: list[dict[str, Any]],
    *,
    prompt: bool = True,
    continued: bool = False,
    **options: Any,
) -> tuple[str, str]:
    """Return what we render, and what transformers does; `options` as of `render`."""
    ours = render(source, messages, prompt=prompt, continued=continued, **options)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = source
    theirs = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=prompt,
        continue_final_message=continued,
        **options,
    )
    return ours, theirs


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum <of> 'two'",
            "parameters": {"type": "object", "properties": {"é": {"type": "integer"}}},
        },
    }
]
DOCUMENTS = [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}]
WITH_TOOLS = """
{%- if tools %}
    {%- for tool in tools %}{{ tool | tojson }} {{ tool.function.parameters | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for document in documents or [] %}<doc>{{ document.title }}: {{ document['text'] }}</doc>
{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content or '' }}
    {%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
    {%- if m.tool_call_id is defined %} {{ m.tool_call_id }}{% endif %}
{% endfor %}"""
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": " Be brief. "}, USER, {"role": "assistant", "content": "y"}],
    [USER] * 9,
    [{"role": "user", "content": "line\n  line\n", "name": None}],
]
AS_JSON = "{% for m in messages %}{{ m.content is defined }}{{ m | tojson }}{% endfor %}"
TRIMMED = "{{ messages[-1].content | trim }}<END>"
JOINED = "{{ messages[0].content | map(attribute='text') | join('+') }}<END>"
OPEN_ENDS = ("Hello th", "ends in space ", "  \n", "twice twice")
CONTINUED = {"prompt": False, "continued": True}


@pytest.mark.parametrize(
    ("source", "messages", "options"),
    [
        *(
            (source, chat, {"prompt": prompt})
            for source, chat, prompt in product((CHAT_TEMPLATE, BUSY), CHATS, (True, False))
        ),
        *((BUSY, chat, {"mood": "calm", "eos_token": "<END>"})
          for chat in ([PARTS], [USER, THOUGHT, USER])),
        *(
            (WITH_TOOLS, [USER, TOOL_CALL, RESULT], {"tools": tools, "documents": documents})
            for tools, documents in product((None, TOOLS), (None, DOCUMENTS))
        ),
        (AS_JSON, [USER, TOOL_CALL], {}),
        # An open final message is continued.
        *(
            (source, [USER, {"role": "assistant", "content": content}], CONTINUED)
            for source, content in product((CHAT_TEMPLATE, TRIMMED), OPEN_ENDS)
        ),
        (JOINED, [PARTS], CONTINUED),
    ],
)  # fmt: skip
def test_chats_come_out_as_under_transformers(
    source: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    ours, theirs = both(source, messages, **options)

    assert ours == theirs


def test_a_template_says_what_it_looks_for() -> None:
    assert ChatTemplate(WITH_TOOLS, {}).variables == {"tools", "documents", "messages"}


# Of a bad checkpoint: nothing that takes time or room goes on for ever.
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ENDLESS, "more than 0.5 s"),
        ("{% macro m() %}" + ENDLESS + "{% endmacro %}{% set x = m() %}", "more than 0.5 s"),
        ("{% for i in range(99999) %}{{ 'long enough' * 100 }}{% endfor %}", "characters"),
        ("{{ 'a' * 4194305 }}", "more than 4194304 characters"),
        ("{% set x = 99999999 * [1, 2] %}", r"'\*' could create more than"),
        ("{{ 10 ** 1000000 }}", "more than 4096 bits"),
        ("{{ 'a'.center(10 ** 10) }}", "'center' could create more than"),
        ("{{ '{:>9999999999}'.format(1) }}", "'format' could create more than"),
        ("{% set x = ['a'] * 999 %}{{ x | map('center', 999999) | list }}", "in total"),
    ],
)
def test_a_rendering_has_limits(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "0.5 s" not in words:  # memory of a busy machine may take longer than that to get
        monkeypatch.setattr(ChatTemplate, "max_render_s", 20.0)

    with pytest.raises(ValueError, match=words):
        render(source, [USER])


def test_small_products_and_powers_come_out() -> None:
    written = render("{{ '-' * 3 }}{{ 2 * [7] }}{{ 2 ** 10 }}{{ 2.5 * 2 }}", [USER])

    assert written == "---[7, 7]10245.0"


def test_a_rendering_at_the_limit_of_its_length_comes_out() -> None:
    text = "a" * MAX_RENDER_CHARS

    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


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
        render(source, [message], prompt=False, continued=True)


def test_a_template_knows_the_time() -> None:
    assert abs(int(render("{{ strftime_now('%Y') }}", [USER])) - datetime.now().year) <= 1


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
        render(source, [USER])


def test_objects_that_are_no_data_are_refused() -> None:
    with pytest.raises(ValueError, match="holds a object"):
        render("{{ x }}", [USER], x=object())
