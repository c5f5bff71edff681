"""gpt-oss's replies, however their text was cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError
from remora.deployments.parsers.events import CallArguments, CallBegun, Reasoning, Text
from remora.deployments.parsers.harmony import HarmonyFormat, HarmonyReader
from remora.deployments.parsers.replies import ReplyFormats
from remora.deployments.parsers.tool_calls.faults import CallFault
from remora.deployments.parsers.tool_calls.ids import random_id
from remora.deployments.parsers.tools import NO_TOOLS, Tool, ToolChoice, ToolUse
from tests.deployments.parsers.replies import cut, read
from tests.deployments.parsers.test_replies import make_tokenizer
from tests.tiny_models import CHAT_TEMPLATE

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
USE = ToolUse(tools=(Tool(name="add", parameters={}),), choice=ToolChoice.AUTO)
REASONING = "<|channel|>analysis<|message|>Hm.\n<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": "<|end|>"}<|call|>'
)
ARGUMENTS = '{"a": "<|end|>"}'


def make_reader(prompt: str = PROMPT, use: ToolUse | None = USE, **options: Any) -> HarmonyReader:
    options = {"after": None, "make_id": random_id} | options
    form = options.pop("form", HarmonyFormat())
    return HarmonyReader(form, prompt, use=use, **options)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        (f"{REASONING}{FINAL}Paris.<|return|>", "Hm.\n", "Paris.", []),
        (f"{REASONING}{FINAL}Paris.", "Hm.\n", "Paris.", []),
        ("<|channel|>final<|message|> Hi", "", " Hi", []),
        (f"{REASONING}{CALL}", "Hm.\n", "", [("add", ARGUMENTS)]),
        (REASONING + CALL.removesuffix("<|call|>"), "Hm.\n", "", [("add", ARGUMENTS)]),
        (
            "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
            "",
            "",
            [("add", "{}")],
        ),
        (
            f"<|channel|>commentary<|message|>Let me see.<|end|>{CALL}{CALL}",
            "",
            "Let me see.",
            [("add", ARGUMENTS), ("add", ARGUMENTS)],
        ),
        (f"{REASONING}<|start|>assistant{REASONING}{FINAL}x", "Hm.\n\nHm.\n", "x", []),
        ("<|channel|>analysis<|message|>never ends <|en", "never ends <|en", "", []),
        ("no marks at all <|chan", "", "no marks at all <|chan", []),
        ("<|channel|>final without a message", "", "<|channel|>final without a message", []),
        (f"<|channel|>fin{FINAL}x", "", "<|channel|>finx", []),
        ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", "", "", [("python", "1 + 1")]),
        ("", "", "", []),
    ],
)
def test_messages_are_told_apart_by_their_headers(
    text: str, reasoning: str, answer: str, calls: list[tuple[str, str]]
) -> None:
    assert read(make_reader(), text) == (reasoning, answer, calls)
    assert read(make_reader(), *text) == (reasoning, answer, calls)


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    opened = PROMPT + str(HarmonyFormat().reasoning_opening(PROMPT))

    assert HarmonyFormat().reasoning_end(PROMPT) is None
    assert HarmonyFormat().reasoning_end(opened) == f"<|end|>{FINAL}"
    assert HarmonyFormat().reasoning_opening(opened) is None
    assert read(make_reader(opened), f"Hm.<|end|>{FINAL}Hi") == ("Hm.", "Hi", [])


def test_pieces_come_as_they_are_written() -> None:
    reader = make_reader(make_id=lambda number, name: f"id{number}")

    pieces = ["<|channel|>analysis<|message|>H", "m", "<|end|>", CALL[:-24], '{"a"', ": 1", "}"]
    events = [reader.push(piece) for piece in pieces]

    assert events == [
        [Reasoning("H")],
        [Reasoning("m")],
        [],
        [CallBegun(0, "id0", "add")],
        [CallArguments(0, '{"a"')],
        [CallArguments(0, ": 1")],
        [CallArguments(0, "}")],
    ]


def test_options_decide_what_stays_in_the_text() -> None:
    text, call = f"{REASONING}{FINAL}Hi", CALL.replace(ARGUMENTS, '{"a": 1}')
    whole = make_reader(stream=False)

    assert read(make_reader(use=None), f"{REASONING}{call}") == ("Hm.\n", '{"a": 1}', [])
    assert read(make_reader(separate=False), text) == ("", f"{REASONING}Hi", [])
    assert whole.push("<|channel|>analysis<|message|>Hm") == []
    assert whole.push(f".<|end|>{FINAL}Hi") == [Reasoning("Hm."), Text("Hi")]


@pytest.mark.parametrize("separate", [True, False])
def test_what_stands_between_two_reasoning_is_none(separate: bool) -> None:
    said = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    reader = make_reader(separate=separate)

    read(reader, *f"{REASONING}{said}<|start|>assistant{REASONING}{FINAL}Hi")

    assert sum(end - start for start, end in reader.reasoning_spans) == 2 * len(REASONING) + len(
        "<|start|>assistant"
    )


def test_without_a_format_of_reasoning_there_is_none_to_count() -> None:
    reader = make_reader(use=None, form=HarmonyFormat(has_reasoning=False))

    read(reader, f"{REASONING}{FINAL}Hi")

    assert reader.reasoning_spans == []


SPECIALS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
TEMPLATE = CHAT_TEMPLATE + "{# <|channel|>analysis<|message|> commentary #}"


def make_formats(
    tools: str = "auto", reasoning: str = "auto", template: str = TEMPLATE
) -> ReplyFormats:
    tokenizer = make_tokenizer(template, SPECIALS)
    return ReplyFormats.of(tokenizer, tool_parser=tools, reasoning_parser=reasoning)


@pytest.mark.parametrize(
    ("tools", "reasoning", "names"),
    [
        ("auto", "auto", ("gpt-oss", "gpt-oss")),
        ("auto", "none", ("gpt-oss", None)),
        ("none", "auto", (None, "gpt-oss")),
        ("openai", "gpt_oss", ("gpt-oss", "gpt-oss")),
        ("none", "none", (None, None)),
        ("hermes", "auto", ("hermes", None)),
    ],
)
def test_the_format_is_told_from_the_template_or_named(
    tools: str, reasoning: str, names: tuple[str | None, str | None]
) -> None:
    formats = make_formats(tools, reasoning)

    assert (formats.tool_format_name, formats.reasoning_format_name) == names
    assert make_formats("harmony", template=CHAT_TEMPLATE).tool_format_name == "gpt-oss"
    with pytest.raises(ConfigError, match="reads both"):
        make_formats("gpt-oss", "qwen3")


def test_a_grammar_holds_for_the_answer_and_calls_stand_before_it() -> None:
    formats = make_formats()
    opened = formats.open_reasoning(PROMPT)
    thinking = formats.reasoning_budget(opened)

    assert opened == f"{PROMPT}<|channel|>analysis<|message|>"
    assert thinking is not None
    assert thinking.end == f"<|end|>{FINAL}"
    assert formats.reads_calls(USE)
    assert not formats.calls_are_answers(USE)
    assert len(formats.shown_special_ids(NO_TOOLS)) == len(SPECIALS)


def test_a_call_may_end_the_reply_before_the_answer_that_a_grammar_holds() -> None:
    formats = make_formats()
    opened = formats.open_reasoning(PROMPT)
    budgets = (formats.reasoning_budget(opened, use=USE), formats.reasoning_budget(opened))

    exits = [[formats.tokenizer.added_tokens[i] for i in b.exit_ids] for b in budgets if b]
    assert exits == [["<|call|>"], []]


@pytest.mark.parametrize("choice", [ToolChoice.REQUIRED, ToolChoice.NAMED])
def test_forced_calls_are_read_from_the_answer(choice: ToolChoice) -> None:
    use = ToolUse(tools=USE.tools, choice=choice, name="add")
    named, listed = '{"a": 1}', '[{"name": "add", "parameters": {"a": 1}}]'
    text = f"{REASONING}{FINAL}{named if choice is ToolChoice.NAMED else listed}"

    parser = make_formats().make_parser(prompt=PROMPT, use=use)()

    assert parser is not None
    assert read(parser, *text) == ("Hm.\n", "", [("add", named)])


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (CALL, []),
        (CALL.replace(".add", ".sub"), [CallFault.UNKNOWN_TOOL]),
        (CALL.replace(ARGUMENTS, "[1]"), [CallFault.MALFORMED]),
        (CALL.replace(ARGUMENTS, '{"a": ['), [CallFault.MALFORMED]),
        (CALL[:-12], [CallFault.UNFINISHED]),
    ],
)
def test_faults_of_calls_are_noted(text: str, faults: list[CallFault]) -> None:
    noted: list[CallFault] = []

    read(make_reader(note=noted.append), *text)

    assert noted == faults


WORDS = st.sampled_from(
    [
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
        *("<|return|>", "assistant", "analysis", "commentary", "final", " to=functions.add", "to="),
        *('{"a": ', "{", "}", '"', "\\", "[", " ", "\n", "é🙂", "<|", "json", "<|channel|"),
        *(REASONING, FINAL, CALL),
    ]
)


@given(
    text=st.lists(WORDS | st.text(max_size=4), max_size=20).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    opens=st.booleans(),
    use=st.sampled_from([USE, None]),
    separate=st.booleans(),
    stream=st.booleans(),
)
def test_any_cut_gives_the_same(
    text: str, cuts: list[int], opens: bool, use: ToolUse | None, separate: bool, stream: bool
) -> None:
    prompt = PROMPT + ("<|channel|>analysis<|message|>" if opens else "")
    readers = [make_reader(prompt, use, separate=separate, stream=stream) for _ in range(3)]

    whole = read(readers[0], text)

    assert read(readers[1], *cut(text, cuts)) == whole
    assert read(readers[2], *text) == whole
    assert readers[0].reasoning_spans == readers[1].reasoning_spans == readers[2].reasoning_spans
