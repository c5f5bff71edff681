"""What each format's parser makes of good, broken and unfinished calls."""

from __future__ import annotations

import json

import pytest

from remora.deployments.parsers.events import CallArguments, CallBegun, Text
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS
from remora.deployments.parsers.tools import Tool
from tests.deployments.parsers import replies
from tests.deployments.parsers.replies import BS, ES, KA, KB, KE, B, E, P, make_id

Calls = list[tuple[str, str]]
Case = tuple[str, str, str, Calls]  # format, text, answer, calls

ADD = Tool(
    name="add",
    parameters={
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"$ref": "#/$defs/Maybe"},
            "any": {},
        },
        "$defs": {"Maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    },
)
KBS, KES = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def read(name: str, text: str, *, parallel: bool = True) -> tuple[str, Calls]:
    """Return the answer and the calls."""
    parser = TOOL_FORMATS[name].parser([ADD], parallel=parallel, make_id=make_id)
    return replies.read(parser, text)[1:]


GOOD: list[Case] = [
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b":  2}}\n</tool_call>',
        "",
        [("add", '{"a": 1, "b":  2}')],
    ),
    ("hermes", '<tool_call>{"name":"now"}</tool_call>\nDone.', "\nDone.", [("now", "{}")]),
    ("hermes", '<tool_call>{"arguments":{"a":1},"name":"x"}</tool_call>', "", [("x", '{"a":1}')]),
    (
        "hermes",
        '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("x", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "x", "arguments": null}</tool_call>'
        '<tool_call>{"name": "y", "arguments": {"s": "</tool_call>}{\\""}}}</tool_call>',
        "",
        [("x", "{}"), ("y", '{"s": "</tool_call>}{\\""}')],
    ),
    (
        "granite",
        'Hm.<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": {}}]',
        "Hm.",
        [("add", '{"a": 1}'), ("b", "{}")],
    ),
    ("ernie45", '<tool_call>\n{"name": "now"}\n</tool_call>\n', "", [("now", "{}")]),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ("llama3", '\n{"parameters": {"a": 1}, "name": "add"}', "", [("add", '{"a": 1}')]),
    ("llama3", '<|python_tag|>{"name": "now"}<|eom_id|>', "", [("now", "{}")]),
    (
        "llama3",
        '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {"x": [1]}},\n'
        '{"type": "function", "name": "c", "parameters": {}}',
        "",
        [("a", "{}"), ("b", '{"x": [1]}'), ("c", "{}")],
    ),
    (
        "llama3",
        "{'name': 'add', 'parameters': {'a': True, 'b': \"it's\"}}",
        "",
        [("add", '{"a": true, "b": "it\'s"}')],
    ),
    (
        "llama4",
        '[add(a=1, b=-2.5), search(q="x\\n\\"y\\"")]',
        "",
        [("add", '{"a": 1, "b": -2.5}'), ("search", '{"q": "x\\n\\"y\\""}')],
    ),
    ("llama4", "<|python_start|>[now()]<|python_end|>", "", [("now", "{}")]),
    (
        "llama4",
        "[f(a=[1, (2, None)], b={'k': True, 'l': '}'}, c=celsius, d='\\u00e9\\x41', e='')]",
        "",
        [
            (
                "f",
                '{"a": [1, [2, null]], "b": {"k": true, "l": "}"}, "c": "celsius", "d": "éA",'
                ' "e": ""}',
            )
        ],
    ),
    ("llama4", "[f(s='''a 'b'\n''',)]", "", [("f", '{"s": "a \'b\'\\n"}')]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": {}}]',
        "",
        [("add", '{"a": 1}'), ("b", "{}")],
    ),
    (
        "mistral",
        'Well.[TOOL_CALLS]add[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]b[CALL_ID]abcdefgh1[ARGS]{}',
        "Well.",
        [("add", '{"a": "[TOOL_CALLS]"}'), ("b", "{}")],
    ),
    (
        "deepseek_v3",
        f'{BS}{B}function{P}add\n```json\n{{"a": 1}}\n```{E}\n'
        f"{B}function{P}b\n```json\n{{}}\n```{E}{ES}",
        "",
        [("add", '{"a": 1}'), ("b", "{}")],
    ),
    (
        "deepseek_v31",
        f'Hm.{BS}{B}add{P}{{"a": 1}}{E}{B}b{P}{E}{ES}',
        "Hm.",
        [("add", '{"a": 1}'), ("b", "{}")],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">[1, 2]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="s" string="true">1\n"</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [("add", '{"a": [1, 2], "s": "1\\n\\""}')],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="x">{"a": 1}</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "",
        [("x", '{"a": 1}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n1\n\n2\n"
        "</parameter>\n<parameter=o>\nnull\n</parameter>\n</function>\n</tool_call>",
        "",
        [("add", '{"a": 1, "s": "1\\n\\n2", "o": null}')],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [("add", '{"a": 1}')],
    ),
    (
        "qwen3_coder",
        "<function=add><parameter=any>{'x': True}</parameter>\n<parameter=a>\nlots\n"
        "<parameter=o>12\n</function><tool_call><function=now></function></tool_call>",
        "",
        [("add", '{"any": {"x": true}, "a": "lots", "o": "12"}'), ("now", "{}")],
    ),
    (
        "glm45",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>s</arg_key><arg_value>1</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [("add", '{"a": 1, "s": "1"}'), ("now", "{}")],
    ),
    (
        "kimi_k2",
        f'{KBS}{KB}functions.add:0{KA}{{"a":1}}{KE}{KB}functions.b.c:1{KA}{{}}{KE}{KES}',
        "",
        [("add", '{"a":1}'), ("b.c", "{}")],
    ),
]


@pytest.mark.parametrize(("name", "text", "answer", "calls"), GOOD)
def test_whole_calls_are_read(name: str, text: str, answer: str, calls: Calls) -> None:
    assert read(name, text) == (answer, calls)
    assert read(name, text, parallel=False) == (answer, calls[:1])
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


NO_CALLS = [
    ("hermes", "<tool_call> is how a call begins"),
    ("hermes", '<tool_call>{"nome": "add"}'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}'),
    ("hermes", '<tool_call>\n{"name": "ad'),
    ("hermes", "a < b <tool_c"),
    ("hermes", "</tool_call> alone"),
    ("granite", "<|tool_call|> is a token"),
    ("llama3", '{"name": "John", "age": 5}'),
    ("llama3", '{"name": "John"}'),
    ("llama3", '{"name": "John", "parameters": [1]}'),
    ("llama3", '{"answer": {"name": "x", "parameters": {}}}'),
    ("llama3", "{'a': 1} is a dictionary"),
    ("llama3", '[{"a": 1}]'),
    ("llama3", 'See: {"name": "add", "parameters": {}}'),
    ("llama4", "[1, 2, 3]"),
    ("llama4", "[link](http://x)"),
    ("llama4", "[see(above)]"),
    ("llama4", "[f(a==1)]"),
    ("mistral", "[TOOL_CALLS] nothing here"),
    ("mistral", "[TOOL_CALLS]add[ARG"),
    ("deepseek_v3", f"{BS} no {B}tool{P}x"),
    ("deepseek_v31", f"{B}add is a name"),
    ("qwen3_coder", "<tool_call>\nfunction"),
    ("qwen3_coder", "<function=add <b>"),
    ("glm45", "<tool_call>hello world</tool_call>"),
    ("kimi_k2", f"{KBS}{KB}functions.add:0{{}}"),
]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("text", ["", " \n", "Hello.\n\nWorld é 🎈  ", '{"a": [1, {"b": "}"}]}'])
def test_an_ordinary_answer_is_unchanged(name: str, text: str) -> None:
    assert read(name, text) == (text, [])


UNFINISHED: list[Case] = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", '{"a": "x')]),
    ("hermes", '<tool_call>{"name": "add"', "", [("add", "")]),
    ("llama4", "[add(a=1, s='x", "", [("add", '{"a": 1, "s": "x')]),
    ("qwen3_coder", "<function=add><parameter=s>x</par", "", [("add", '{"s": "x</par')]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a"', "", [("add", '{"a"')]),
]


BROKEN: list[Case] = [
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": [1<tool_call>{"name": "now"}</tool_call>',
        "",
        [("add", '{"a": [1'), ("now", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"a": {[TOOL_CALLS]now[ARGS]{}',
        "",
        [("add", '{"a": {'), ("now", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": [[TOOL_CALLS]now[ARGS]{}',
        "",
        [("add", '{"a": ['), ("now", "{}")],
    ),
    (
        "deepseek_v3",
        f'{BS}{B}function{P}add\n```json\n{{"a": {{\n```{E}'
        f"{B}function{P}b\n```json\n{{}}\n```{E}{ES}",
        "",
        [("add", '{"a": {\n'), ("b", "{}")],
    ),
    (
        "deepseek_v31",
        f'{BS}{B}add{P}{{"a": {{"b": 1}}{E}{B}now{P}{{}}{E}{ES}Done.',
        "Done.",
        [("add", '{"a": {"b": 1}'), ("now", "{}")],
    ),
    (
        "deepseek_v31",
        f'{B}add{P}{{"a": [{B}now{P}{{}}{E}',
        "",
        [("add", '{"a": ['), ("now", "{}")],
    ),
    (
        "kimi_k2",
        f'{KBS}{KB}functions.add:0{KA}{{"a":{{}}{KE}{KB}functions.b:1{KA}{{}}{KE}{KES}',
        "",
        [("add", '{"a":{}'), ("b", "{}")],
    ),
    (
        "qwen3_coder",
        '<tool_call><function=x>{"a": [1</function></tool_call><function=now></function>',
        "",
        [("x", '{"a": [1'), ("now", "{}")],
    ),
]


NOW = '<tool_call>{"name": "now"}</tool_call>'
MIXED: list[Case] = [
    # Text around calls is kept, blanks are not.
    ("hermes", f"\nOne.\n{NOW}\n\n{NOW}\n two {NOW} \n", "\nOne.\n\n two ", [("now", "{}")] * 3),
    # A missing or superfluous brace does not spoil a call.
    ("hermes", '<tool_call>{"name": "x", "arguments": {}</tool_call>', "", [("x", "{}")]),
    ("hermes", '<tool_call>{"name": "x", "arguments": {}}}}</tool_call>', "", [("x", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "x"}{"nome": 1}</tool_call>Bye',
        '{"nome": 1}Bye',
        [("x", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "x\\ud800"}</tool_call>', "", [("x?", "{}")]),
    (
        "qwen3_coder",
        "<function=x>\nso\n<parameter=a>1</parameter></function>",
        "so\n",
        [("x", '{"a": 1}')],
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "answer", "calls"),
    [*UNFINISHED, *BROKEN, *MIXED, *((name, text, text, []) for name, text in NO_CALLS)],
)
def test_faulty_calls_are_read_as_far_as_they_are_calls_and_else_are_text(
    name: str, text: str, answer: str, calls: Calls
) -> None:
    assert read(name, text) == (answer, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = TOOL_FORMATS["hermes"].parser([ADD], make_id=make_id)

    pieces = ['<tool_call>{"name": "add", ', '"arguments": {"a"', ": 1", "}}</tool", "_call>"]
    events = [parser.push(piece) for piece in pieces]

    assert events == [
        [CallBegun(0, "id0", "add")],
        [CallArguments(0, '{"a"')],
        [CallArguments(0, ": 1")],
        [CallArguments(0, "}")],
        [],
    ]


def test_text_arguments_come_as_they_are_written() -> None:
    parser = TOOL_FORMATS["qwen3_coder"].parser([ADD], make_id=make_id)

    pieces = ["<function=add>", "<parameter=s>", "\none", '"two', "\n"]
    events = [parser.push(piece) for piece in pieces]

    assert [event for found in events[1:] for event in found] == [
        CallArguments(0, '{"s": '),
        CallArguments(0, '"one'),
        CallArguments(0, '\\"two'),
    ]


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    parser = TOOL_FORMATS["hermes"].parser([ADD])

    assert parser.push("a <tool_") == [Text("a ")]
    assert parser.push("box>") == [Text("<tool_box>")]


def test_ids_are_made_as_each_family_wants_them() -> None:
    def make_ids(name: str, text: str) -> list[str]:
        events = replies.events_of(TOOL_FORMATS[name].parser([ADD]), [text])
        return [event.id for event in events if isinstance(event, CallBegun)]

    (default,) = make_ids("hermes", '<tool_call>{"name": "x"}</tool_call>')
    mistral = make_ids("mistral", "[TOOL_CALLS]x[ARGS]{}[TOOL_CALLS]x[CALL_ID]abcdefgh1[ARGS]{}")
    kimi = make_ids("kimi_k2", f"{KB}functions.x:7{KA}{{}}{KE}{KB}functions.x:7{KA}{{}}{KE}")

    assert default.startswith("call_")
    assert len(default) == len("call_") + 24
    assert len(mistral[0]) == 9
    assert mistral[0].isalnum()
    assert mistral[1] == "abcdefgh1"
    assert kimi == ["functions.x:7", "functions.x:1"]


def test_markers_are_all_that_a_tokenizer_may_hide() -> None:
    assert set(TOOL_FORMATS["mistral"].markers) == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert {B, P, E, BS, ES} == set(TOOL_FORMATS["deepseek_v3"].markers)
