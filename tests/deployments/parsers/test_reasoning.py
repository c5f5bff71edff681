"""Thought and answer, however the text was cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.parsers.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningSplitter,
    ReasoningStart,
    SplitText,
    reasoning_format,
)
from tests.deployments.parsers.replies import cut

QWEN3 = ReasoningFormat(name="qwen3")
R1 = ReasoningFormat(name="r1", assumed=True)
TURNS = re.compile(r"<\|im_start\|>|<\|im_end\|>")
CALL = "<tool_call>"


def make_splitter(
    start: ReasoningStart, form: ReasoningFormat = QWEN3, *interrupts: str
) -> ReasoningSplitter:
    return ReasoningSplitter(form, start, interrupts=interrupts)


def split(splitter: ReasoningSplitter, *texts: str) -> list[SplitText]:
    pieces = [piece for text in texts for piece in splitter.push(text)]
    return pieces + splitter.finish()


def shown(pieces: list[SplitText], field: str = "text") -> tuple[str, str]:
    """Return reasoning and answer; `field` of the pieces is text or raw."""
    reasoning = "".join(getattr(piece, field) for piece in pieces if piece.is_reasoning)
    return reasoning, "".join(getattr(piece, field) for piece in pieces if not piece.is_reasoning)


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "answer"),
    [
        (ReasoningStart.WITHIN, "hm\n</think>\n\nyes\n", "hm", "yes\n"),
        (ReasoningStart.WITHIN, "<think>\nhm</think>yes", "hm", "yes"),
        (ReasoningStart.WITHIN, "\n\nhm\n\nso</think>yes", "\nhm\n\nso", "yes"),
        (ReasoningStart.WITHIN, "never ends\n", "never ends\n", ""),
        (ReasoningStart.WITHIN, "</think>yes", "", "yes"),
        (ReasoningStart.WITHIN, "a</think>b</think>c", "a", "b</think>c"),
        (ReasoningStart.WITHIN, "ends in </thi", "ends in </thi", ""),
        (ReasoningStart.WITHIN, "  ", "  ", ""),
        (ReasoningStart.WITHIN, "", "", ""),
        (ReasoningStart.OPEN, "\n<think>\n\n</think>\n\nyes", "", "yes"),
        (ReasoningStart.OPEN, " <think>hm</think> yes", "hm", " yes"),
        (ReasoningStart.OPEN, "  yes <think>no</think>", "", "  yes <think>no</think>"),
        (ReasoningStart.OPEN, "<thin ice", "", "<thin ice"),
        (ReasoningStart.OPEN, " <thi", "", " <thi"),
        (ReasoningStart.OPEN, "<think>hm", "hm", ""),
        (ReasoningStart.OVER, "<think>hm</think>", "", "<think>hm</think>"),
        (ReasoningStart.WITHIN, "hm\n<tool_call>{}", "hm", "<tool_call>{}"),
        (ReasoningStart.WITHIN, "<tool_call>{}", "", "<tool_call>{}"),
        (ReasoningStart.WITHIN, "say <tool_call>", "say <tool_call>", ""),
        (ReasoningStart.OPEN, "<think>\n<tool_call>{}</think>", "", "<tool_call>{}</think>"),
    ],
)
def test_reasoning_is_told_from_the_answer(
    start: ReasoningStart, text: str, reasoning: str, answer: str
) -> None:
    pieces = split(make_splitter(start, QWEN3, CALL), text)

    assert shown(pieces) == (reasoning, answer)


def test_reasoning_is_given_out_as_it_comes() -> None:
    splitter = make_splitter(ReasoningStart.WITHIN)

    assert shown(splitter.push("let me see <")) == ("let me see ", "")
    assert shown(splitter.push("b>\n")) == ("<b>", "")
    assert shown(splitter.push("\nso")) == ("\n\nso", "")


def test_a_call_within_a_line_does_not_end_the_reasoning_wherever_the_text_is_cut() -> None:
    pieces = split(make_splitter(ReasoningStart.WITHIN, QWEN3, CALL), "use ", "<tool_call>", "\n")

    assert shown(pieces) == ("use <tool_call>\n", "")


WORDS = st.sampled_from(
    [
        *("<think>", "</think>", "[THINK]", "[/THINK]", "◁think▷", "◁/think▷", CALL, "[TOOL"),
        *("\n", "\n\n", " ", "<", "</", "think", ">", "a", "é🙂", "[", "◁", "<tool_"),
    ]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)


@given(
    form=st.sampled_from(REASONING_FORMATS),
    start=st.sampled_from(ReasoningStart),
    text=TEXTS,
    cuts=st.lists(st.integers(0, 80), max_size=20),
    interrupts=st.sampled_from([(), (CALL,), (CALL, "[TOOL_CALLS]"), ("{", "<think>")]),
)
def test_any_cut_gives_the_same(
    form: ReasoningFormat,
    start: ReasoningStart,
    text: str,
    cuts: list[int],
    interrupts: tuple[str, ...],
) -> None:
    whole = split(make_splitter(start, form, *interrupts), text)
    parts = split(make_splitter(start, form, *interrupts), *cut(text, cuts))
    chars = split(make_splitter(start, form, *interrupts), *text)

    assert shown(parts) == shown(whole) == shown(chars)
    assert shown(parts, "raw") == shown(whole, "raw") == shown(chars, "raw")
    assert "".join(piece.raw for piece in chars) == text


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n", ReasoningStart.OPEN),
        ("<|im_start|>assistant\n<think>\n", ReasoningStart.WITHIN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningStart.OVER),
        ("<|im_start|>assistant\n<think>\nhalf a thou", ReasoningStart.WITHIN),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>", ReasoningStart.OPEN),
        ("<think>old</think><|im_end|><|im_start|>a<think>", ReasoningStart.WITHIN),
        ("<think>old<|im_end|><|im_start|>a</think>", ReasoningStart.OVER),
        ("", ReasoningStart.OPEN),
    ],
)
def test_the_prompt_tells_how_a_reply_begins(prompt: str, expected: ReasoningStart) -> None:
    assert QWEN3.start(prompt, TURNS) is expected


def test_a_silent_prompt_leaves_it_to_the_format() -> None:
    assert R1.start("<|im_start|>assistant\n", TURNS) is ReasoningStart.WITHIN
    assert R1.start("a</think>", None) is ReasoningStart.OVER
    assert R1.start("an answer, half", TURNS, continues=True) is ReasoningStart.OVER
    assert R1.start("<think>hm", TURNS, continues=True) is ReasoningStart.WITHIN


def test_formats_are_found_by_all_their_names() -> None:
    assert reasoning_format("deepseek_r1") is reasoning_format("deepseek-r1") is not None
    assert reasoning_format("qwen3-thinking") is reasoning_format("deepseek-r1")
    assert reasoning_format("glm45") is reasoning_format("qwen3") is not None
    assert reasoning_format("hermes") is None
