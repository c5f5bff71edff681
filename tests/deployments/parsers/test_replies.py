"""Formats of a served model: how they are chosen, and what reads its replies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError, InvalidRequest
from remora.deployments.parsers.events import CallBegun, Reasoning, ReplyParser
from remora.deployments.parsers.replies import ReplyFormats
from remora.deployments.parsers.reply_reader import ReplyReader
from remora.deployments.parsers.tool_calls.forced import forced_schema
from remora.deployments.parsers.tools import NO_TOOLS, Tool, ToolChoice, ToolUse
from remora.engine.grammar.constraint import ConstraintKind
from remora.engine.tokens.tokenizer import Tokenizer
from tests.deployments.parsers.replies import Read, cut, events_of, merged, read
from tests.deployments.parsers.test_response_template import TAGGED
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_tokenizer

QWEN = CHAT_TEMPLATE + "{# <tool_call> arguments <think> #}"
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
ADD = Tool(
    name="add",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
)
AUTO = ToolUse(tools=(ADD,), choice=ToolChoice.AUTO)
REQUIRED = ToolUse(tools=(ADD,), choice=ToolChoice.REQUIRED)
NAMED = ToolUse(tools=(ADD,), choice=ToolChoice.NAMED, name="add")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def make_tokenizer(
    template: str = QWEN, specials: tuple[str, ...] = (), response: dict[str, Any] | None = None
) -> Tokenizer:
    stored = make_tiny_tokenizer()
    stored.chat_template = template
    stored.response_template = response
    stored.add_tokens(list(specials), special_tokens=True)
    return Tokenizer(stored)


def make_formats(
    tokenizer: Tokenizer | None = None, tools: str = "auto", reasoning: str = "auto"
) -> ReplyFormats:
    return ReplyFormats.of(
        tokenizer or make_tokenizer(), tool_parser=tools, reasoning_parser=reasoning
    )


def make_parser(formats: ReplyFormats, use: ToolUse = NO_TOOLS, **options: Any) -> ReplyParser:
    parser = formats.make_parser(prompt=PROMPT, use=use, **options)()
    assert parser is not None
    return parser


def read_reply(
    formats: ReplyFormats, text: str, use: ToolUse = NO_TOOLS, prompt: str = PROMPT, **options: Any
) -> Read:
    parser = formats.make_parser(prompt=prompt, use=use, **options)()
    return ("", text, []) if parser is None else read(parser, text)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "expected"),
    [
        (QWEN, "auto", "auto", ("hermes", "qwen3")),
        (QWEN, "none", "none", (None, None)),
        (QWEN, "mistral", "deepseek_r1", ("mistral", "deepseek-r1")),
        (CHAT_TEMPLATE, "auto", "auto", (None, None)),
        (CHAT_TEMPLATE, "qwen25", "glm45", ("hermes", "qwen3")),
    ],
)
def test_formats_are_told_or_named(
    template: str, tools: str, reasoning: str, expected: tuple[str | None, str | None]
) -> None:
    formats = make_formats(make_tokenizer(template), tools, reasoning)

    assert (formats.tool_format_name, formats.reasoning_format_name) == expected


@pytest.mark.parametrize(
    ("tools", "reasoning", "words"),
    [
        ("hermas", "auto", "api.tool_parser = 'hermas'.*hermes"),
        ("auto", "qwen4", "api.reasoning_parser = 'qwen4'.*qwen3"),
        ("response_template", "auto", "has none"),
    ],
)
def test_unknown_formats_are_refused(tools: str, reasoning: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_formats(None, tools, reasoning)


def test_the_checkpoints_own_template_is_the_first_choice() -> None:
    tokenizer, malformed = make_tokenizer(response=TAGGED), make_tokenizer(response={"version": 9})

    formats = make_formats(tokenizer)

    assert formats.tool_format_name == formats.reasoning_format_name == "response_template"
    assert make_formats(tokenizer, "hermes").checkpoint_format is None
    assert make_formats(tokenizer, "hermes").reasoning_format_name == "qwen3"
    assert make_formats(malformed).tool_format_name == "hermes"
    with pytest.raises(ConfigError):
        make_formats(tokenizer, "response_template", "qwen3")
    with pytest.raises(ConfigError):
        make_formats(malformed, "response_template")


def test_a_free_choice_needs_a_format() -> None:
    formats = make_formats(make_tokenizer(CHAT_TEMPLATE))

    with pytest.raises(InvalidRequest, match=r"api\.tool_parser.*hermes") as caught:  # the advice
        formats.check_tools(AUTO)
    assert caught.value.param == "tool_choice"
    for use in (REQUIRED, NAMED, NO_TOOLS, ToolUse(tools=(ADD,), choice=ToolChoice.NONE)):
        formats.check_tools(use)
    make_formats().check_tools(AUTO)
    make_formats(make_tokenizer(response=TAGGED)).check_tools(AUTO)


def test_plain_text_has_no_parser() -> None:
    formats = make_formats(make_tokenizer(CHAT_TEMPLATE))
    closed = f"{PROMPT}<think>\n\n</think>\n\n"

    assert formats.make_parser(prompt=PROMPT, use=NO_TOOLS)() is None
    assert make_formats().make_parser(prompt=closed, use=NO_TOOLS)() is None


REPLY = f"<think>\nhm {CALL}</think>\n\nLet me see.\n{CALL}"


@pytest.mark.parametrize("separate", [True, False])
def test_calls_in_reasoning_are_no_calls_even_where_reasoning_is_text(separate: bool) -> None:
    reasoning, answer, calls = read_reply(make_formats(), REPLY, AUTO, separate_reasoning=separate)

    raw = "" if separate else f"<think>\nhm {CALL}</think>\n\n"
    assert reasoning == (f"hm {CALL}" if separate else "")
    assert answer.startswith(f"{raw}Let me see.")
    assert calls == [("add", '{"a": 1}')]


def test_a_call_at_the_start_of_a_line_ends_the_reasoning_if_calls_are_looked_for() -> None:
    text = f"<think>\nhm\n{CALL}"

    assert read_reply(make_formats(), text, AUTO) == ("hm", "", [("add", '{"a": 1}')])
    assert read_reply(make_formats(), text) == (f"hm\n{CALL}", "", [])


def test_reasoning_in_one_piece_comes_when_it_ends() -> None:
    formats = make_formats()

    ended = events_of(make_parser(formats, stream_reasoning=False), "<think>a b</think>c")
    open_end = events_of(make_parser(formats, stream_reasoning=False), "<think>a b")

    assert [event for event in ended if isinstance(event, Reasoning)] == [Reasoning("a b")]
    assert open_end == [Reasoning("a b")]


@pytest.mark.parametrize("choice", [ToolChoice.NONE, ToolChoice.AUTO])
def test_tools_that_may_not_be_called_are_not_looked_for(choice: ToolChoice) -> None:
    use = ToolUse(tools=(ADD,) if choice is ToolChoice.NONE else (), choice=choice)

    assert read_reply(make_formats(), CALL, use) == ("", CALL, [])


@pytest.mark.parametrize("tokenizer", [make_tokenizer(), make_tokenizer(response=TAGGED)])
@pytest.mark.parametrize(
    ("use", "text"),
    [(REQUIRED, '[{"name": "add", "parameters": {"a": 1}}]'), (NAMED, '{"a": 1}')],
)
def test_forced_calls_are_read_after_the_reasoning(
    tokenizer: Tokenizer, use: ToolUse, text: str
) -> None:
    formats = make_formats(tokenizer)

    calls = [("add", '{"a": 1}')]
    assert read_reply(formats, text, use) == ("", "", calls)
    assert read_reply(formats, f"<think>\n[]</think>\n\n{text}", use) == ("[]", "", calls)


def test_tools_constrain_replies_where_the_format_can_be_constrained() -> None:
    strict = Tool(name="add", parameters=ADD.parameters, strict=True)
    use = ToolUse(tools=(strict,), choice=ToolChoice.AUTO)

    tagged = make_formats().tool_constraint(use)
    forced = make_formats(make_tokenizer(CHAT_TEMPLATE)).tool_constraint(REQUIRED)

    assert tagged is not None
    assert (tagged.kind, "<tool_call>" in tagged.source) == (ConstraintKind.STRUCTURAL_TAG, True)
    assert forced is not None
    assert forced.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(forced.source) == forced_schema(REQUIRED)
    assert make_formats().tool_constraint(AUTO) is None
    assert make_formats(tools="llama4").tool_constraint(use) is None
    assert make_formats().tool_constraint(NO_TOOLS) is None


def test_marks_that_are_control_tokens_are_shown_while_they_count() -> None:
    tokenizer = make_tokenizer(specials=("<think>", "</think>", "<tool_call>", "<other>"))
    ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    reasoning = {ids["<think>"], ids["</think>"]}

    assert make_formats(tokenizer).shown_special_ids(AUTO) == reasoning | {ids["<tool_call>"]}
    assert make_formats(tokenizer).shown_special_ids(REQUIRED) == reasoning
    assert make_formats(tokenizer, "none", "none").shown_special_ids(AUTO) == frozenset()
    own = make_formats(make_tokenizer(specials=("<think>", "<other>"), response=TAGGED))
    assert {own.tokenizer.added_tokens[i] for i in own.shown_special_ids(NO_TOOLS)} == {
        "<think>",
        "<|im_end|>",
    }


@pytest.mark.parametrize(
    ("reasoning", "tail", "begins"),
    [
        ("qwen3", "<think>\n", True),
        ("qwen3", "", False),
        ("qwen3", "<think>\n\n</think>\n\n", False),
        ("deepseek-r1", "", True),
        ("none", "<think>\n", False),
    ],
)
def test_a_reply_begins_within_reasoning_where_the_prompt_says_so(
    reasoning: str, tail: str, begins: bool
) -> None:
    formats = make_formats(reasoning=reasoning)

    thinking = formats.reasoning_budget(PROMPT + tail, budget=7)

    assert (thinking is not None) is begins
    if thinking is not None:
        assert (thinking.end, thinking.budget) == ("</think>", 7)
        assert formats.tokenizer.decode(thinking.end_ids, skip_special_tokens=False) == "</think>"


@pytest.mark.parametrize("response", [None, TAGGED])
def test_reasoning_can_be_opened_for_the_model(response: dict[str, Any] | None) -> None:
    formats = make_formats(make_tokenizer(response=response))
    closed, begun = f"{PROMPT}<think>\n\n</think>\n\n", f"{PROMPT}Hel"

    opened = formats.open_reasoning(PROMPT)

    assert opened == f"{PROMPT}<think>\n"
    assert formats.reasoning_budget(opened) is not None
    assert formats.reasoning_budget(PROMPT) is None
    for prompt in (opened, closed):
        assert formats.open_reasoning(prompt) == prompt
    assert formats.open_reasoning(begun, continues=True) == begun
    assert make_formats(reasoning="none").open_reasoning(PROMPT) == PROMPT


@pytest.mark.parametrize("response", [None, TAGGED])
@pytest.mark.parametrize("separate", [True, False])
@given(
    reasoning=st.text(max_size=12),
    answer=st.text(max_size=12),
    places=st.lists(st.integers(0, 60), max_size=5),
)
def test_reasoning_tokens_are_counted_however_the_text_is_cut(
    response: dict[str, Any] | None, separate: bool, reasoning: str, answer: str, places: list[int]
) -> None:
    formats = make_formats(make_tokenizer(response=response))
    before = f"<think>{reasoning}</think>"
    encode = formats.tokenizer.encode
    reasoning_ids = encode(before, add_special_tokens=False)
    ids = reasoning_ids + encode(answer, add_special_tokens=False) + [2]

    parser = formats.make_parser(prompt=PROMPT, use=AUTO, separate_reasoning=separate)()
    assert isinstance(parser, ReplyReader)
    read(parser, *cut(before + answer, places))

    assert parser.num_reasoning_tokens(ids) == len(reasoning_ids)


@given(
    text=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "\n", CALL, "<tool_call>", "</tool_call>", "a", " ", "[", "{"]
        ),
        max_size=12,
    ).map("".join),
    places=st.lists(st.integers(0, 200), max_size=12),
    use=st.sampled_from([NO_TOOLS, AUTO, REQUIRED, NAMED]),
    separate=st.booleans(),
    stream=st.booleans(),
    tail=st.sampled_from(["", "<think>\n", "<think></think>"]),
)
def test_any_cut_gives_the_same_reply(
    text: str, places: list[int], use: ToolUse, separate: bool, stream: bool, tail: str
) -> None:
    make = FORMATS.make_parser(
        prompt=PROMPT + tail, use=use, separate_reasoning=separate, stream_reasoning=stream
    )
    if (parser := make()) is None:
        return

    events = events_of(parser, [text])

    ids = [event.id for event in events if isinstance(event, CallBegun)]
    assert len(set(ids)) == len(ids)
    assert read(make() or parser, *cut(text, places)) == merged(events)
    assert read(make() or parser, *text) == merged(events)


FORMATS = make_formats()
