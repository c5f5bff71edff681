"""Parsing time is linear in the length of a reply, up to 1 M characters.

Covers every format with any unit that a model may repeat: openings, truncated markers, braces,
quotes, backslashes. The time is CPU time of the thread, so other load does not matter, and the
bound is coarse: quadratic work would exceed it twenty times.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from remora.deployments.parsers.events import ReplyEvent, ReplyParser
from remora.deployments.parsers.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningSplitter,
    ReasoningStart,
)
from remora.deployments.parsers.tool_calls.forced import forced_parser
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS
from remora.deployments.parsers.tools import ToolUse
from tests.deployments.parsers import test_harmony, test_replies, test_response_template
from tests.deployments.parsers.replies import make_id
from tests.deployments.parsers.tool_calls.test_chunking import FORCED, FORMATS, make_parser
from tests.thinned import thinned

SIZES = (20_000, 400_000)
LONGEST = (50_000, 1_000_000)
ONE_BY_ONE = (5_000, 100_000)
CHUNK = 250
SLACK = 4.0
FLOOR_S = 0.001  # times below this are noise
TRIES = 3  # quadratic work exceeds the bound each time
OPENINGS = {
    "llama3": '{"name": "add", "parameters": {"s": "',
    "llama4": "[add(a=(",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n",
}
UNITS = {
    "braces": '{"a":',
    "brackets": "[",
    "quotes": '"',
    "backslashes": "\\",
    "escapes": '\\"',
    "ends": "}]",
    "lines": "\n ",
    "less-than": "<",
}

Make = Callable[[], ReplyParser | ReasoningSplitter]


def check_growth(
    make: Make, opening: str, unit: str, sizes: tuple[int, int] = SIZES, chunk: int = CHUNK
) -> None:
    for _ in range(TRIES):
        took_s = [measure_s(make(), opening + unit * (size // len(unit)), chunk) for size in sizes]
        if took_s[1] <= max(took_s[0], FLOOR_S) * sizes[1] / sizes[0] * SLACK:
            return
    raise AssertionError(took_s)


def measure_s(parser: ReplyParser | ReasoningSplitter, text: str, chunk: int) -> float:
    """Return the CPU time of parsing a text, without that of collecting other tests' garbage."""
    gc.disable()
    try:
        started = time.thread_time()
        for start in range(0, len(text), chunk):
            parser.push(text[start : start + chunk])
        parser.finish()
        return time.thread_time() - started
    finally:
        gc.enable()


SINGLE_UNITS = ("word < {[( ", "\n ", "[{", "\"'", "\\", "x")


def hostile(name: str) -> Iterator[tuple[str, str]]:
    """Yield what is repeated after one opening, and openings that are repeated themselves."""
    markers = TOOL_FORMATS[name].markers
    opening = OPENINGS.get(name, markers[0])
    for unit in UNITS.values():
        yield opening, unit
    for marker in dict.fromkeys((opening, *markers)):
        yield "", marker
        yield "", marker[:-1] or marker
        yield opening, marker[:-1] or marker


@pytest.mark.parametrize(
    ("name", "opening", "unit"),
    thinned(((name, *case) for name in FORMATS for case in hostile(name)), 4),
)
def test_a_tool_format_reads_in_linear_time(name: str, opening: str, unit: str) -> None:
    check_growth(lambda: make_parser(name), opening, unit)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_format_reads_a_million_characters_in_linear_time(name: str) -> None:
    opening = OPENINGS.get(name, TOOL_FORMATS[name].markers[0])
    check_growth(lambda: make_parser(name), opening, UNITS["braces"], LONGEST)


@pytest.mark.parametrize(("name", "unit"), thinned(product(FORMATS, SINGLE_UNITS), 5))
def test_a_tool_format_reads_single_characters_in_linear_time(name: str, unit: str) -> None:
    """What is held back is then looked at most often."""
    opening = OPENINGS.get(name, TOOL_FORMATS[name].markers[0])
    check_growth(lambda: make_parser(name), opening, unit, ONE_BY_ONE, chunk=1)


FORCED_OPENINGS = ("", "{", '{"a": "', '[{"name": "add", "parameters": {"s": "')
FORCED_UNITS = (*UNITS.values(), '[{"name": "add", "parameters": {')


@pytest.mark.parametrize(
    ("use", "opening", "unit"), thinned(product(FORCED, FORCED_OPENINGS, FORCED_UNITS), 5)
)
def test_forced_calls_are_read_in_linear_time(use: ToolUse, opening: str, unit: str) -> None:
    check_growth(lambda: forced_parser(use, make_id), opening, unit)


THINKING = (
    *UNITS.values(),
    "<think>",
    "<think",
    "</think",
    "\n<tool_call",
    "\n<tool_call>",
    "a ",
)


@pytest.mark.parametrize("form", REASONING_FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("start", [ReasoningStart.WITHIN, ReasoningStart.OPEN])
@pytest.mark.parametrize("unit", THINKING)
def test_reasoning_is_read_in_linear_time(
    form: ReasoningFormat, start: ReasoningStart, unit: str
) -> None:
    check_growth(lambda: ReasoningSplitter(form, start, interrupts=("<tool_call>",)), "", unit)


REPLIES = (
    *THINKING,
    test_replies.CALL,
    "<tool_call>\n{",
    "</tool_call>",
    "<think>a</think>",
)


@pytest.mark.parametrize("use", [test_replies.AUTO, *FORCED], ids=["auto", "named", "required"])
@pytest.mark.parametrize("unit", REPLIES)
def test_a_whole_reply_is_read_in_linear_time(use: ToolUse, unit: str) -> None:
    make = test_replies.FORMATS.make_parser(prompt=test_replies.PROMPT, use=use)

    def parser() -> ReplyParser:
        made = make()
        assert made is not None
        return made

    check_growth(parser, "", unit)


MESSAGES = ("<|", "<|start|>", "<|channel|>", test_harmony.REASONING, test_harmony.CALL, "{", '"')


@pytest.mark.parametrize("unit", MESSAGES)
def test_messages_of_gpt_oss_are_read_in_linear_time(unit: str) -> None:
    check_growth(test_harmony.make_reader, "", unit)


SOURCES = ("TAGGED", "NAMED")
MARKS = ("", "<think>", "<tool_call>", "[T]", "<f=add>")
OWN_UNITS = (*REPLIES, "[T]", "<f=add>", "<p=a>", "<p=a>1</p>", "</f>")


@pytest.mark.parametrize(
    ("source", "opening", "unit"), thinned(product(SOURCES, MARKS, OWN_UNITS), 8)
)
def test_a_checkpoints_own_format_reads_in_linear_time(
    source: str, opening: str, unit: str
) -> None:
    template = getattr(test_response_template, source)
    check_growth(lambda: test_response_template.make_reader(template), opening, unit)


class Rescanning:
    """Looks at the whole text again with each piece."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[ReplyEvent]:
        self._text += text
        self._text.count("<tool")
        self._text.upper()
        return []

    def finish(self) -> list[ReplyEvent]:
        return []


def test_work_that_grows_by_the_square_is_found() -> None:
    with pytest.raises(AssertionError):
        check_growth(Rescanning, "", "<tool")
