"""Separates a reply's reasoning from its answer.

Reasoning models write their reasoning between two tags before they answer. A format names the tags;
one streaming splitter serves all formats. Whether a reply starts within reasoning follows from the
last tag of the prompt, which the chat template wrote, and not from the model's name: the same model
reasons or not as the request asks.

Of tool calls it knows only the texts that open them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ReasoningStart(Enum):
    """How a reply begins. OPEN: it may open its reasoning itself, or answer at once."""

    WITHIN = "within"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes its reasoning.

    opening, closing:  the tags
    assumed:           whether a reply begins within reasoning when the prompt has no tag
    """

    name: str
    aliases: tuple[str, ...] = ()
    opening: str = "<think>"
    closing: str = "</think>"
    assumed: bool = False

    def start(
        self, prompt: str, turn_marks: re.Pattern[str] | None, *, continues: bool = False
    ) -> ReasoningStart:
        """Return how the reply to a prompt begins.

        turn_marks:  text between turns; a tag before the last match belongs to an earlier turn
        continues:   whether the reply continues the prompt's last message
        """
        opened, closed = prompt.rfind(self.opening), prompt.rfind(self.closing)
        last = max(opened, closed)
        after = last + (len(self.opening) if opened > closed else len(self.closing))
        if last < 0 or (turn_marks is not None and turn_marks.search(prompt, after)):
            if continues:
                return ReasoningStart.OVER
            return ReasoningStart.WITHIN if self.assumed else ReasoningStart.OPEN
        return ReasoningStart.WITHIN if opened > closed else ReasoningStart.OVER


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        name="deepseek-r1",
        aliases=("deepseek_r1", "qwen3-thinking", "qwen3_thinking", "step3", "minimax"),
        assumed=True,
    ),
    ReasoningFormat(
        name="qwen3",
        aliases=(
            "glm45",
            "deepseek-v3.1",
            "deepseek_v31",
            "deepseek-v3",
            "deepseek_v3",
            "kimi_k2",
            "nemotron",
        ),
    ),
    ReasoningFormat(name="mistral", aliases=("magistral",), opening="[THINK]", closing="[/THINK]"),
    ReasoningFormat(name="kimi", opening="◁think▷", closing="◁/think▷"),
    ReasoningFormat(name="seed_oss", opening="<seed:think>", closing="</seed:think>"),
)


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format with this name or alias, or None."""
    return next((form for form in REASONING_FORMATS if name in (form.name, *form.aliases)), None)


class SplitText(NamedTuple):
    """A part of a reply. `text` is `raw` without tags and the newlines next to them."""

    is_reasoning: bool
    text: str
    raw: str


class _Stage(Enum):
    LEAD = "before the opening tag"
    REASONING = "in reasoning"
    GAP = "between the closing tag and the answer"
    ANSWER = "after the reasoning"


class ReasoningSplitter:
    """Splits one reply into reasoning and answer. Never raises: any text is a valid reply.

    The raw texts of all pieces add up to the text that was pushed. Newlines are held back, because
    a closing tag may follow, and so is a possible beginning of a tag. An opening tag counts only at
    the beginning of the reply. Reasoning without a closing tag extends to the end.
    """

    def __init__(
        self, form: ReasoningFormat, start: ReasoningStart, *, interrupts: Sequence[str] = ()
    ) -> None:
        """`interrupts`: texts (openings of calls) that end reasoning at the start of a line."""
        self._opening, self._closing = form.opening, form.closing
        self._is_within = start is ReasoningStart.WITHIN
        self._stage = _Stage.ANSWER if start is ReasoningStart.OVER else _Stage.LEAD
        self._ends = re.compile(_marks(form.closing, interrupts, re.escape), re.MULTILINE)
        partial = _marks(form.closing, interrupts, _beginning)
        self._partial = re.compile(rf"(?:{partial})\Z", re.MULTILINE)
        self._longest = max(map(len, (form.closing, *interrupts)))
        self._held = ""
        self._lead: list[str] = []
        self._num_newlines = 0  # newlines held back at the end of the reasoning
        self._has_begun = False  # whether the reasoning has a first character, shown or not
        self._is_line_start = True
        firsts = "".join({mark[0] for mark in (form.closing, *interrupts)})
        self._search_special = re.compile(rf"[\n{re.escape(firsts)}]").search

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun, so that nothing is held back any more."""
        return self._stage is _Stage.ANSWER

    def _is_plain(self, text: str) -> bool:
        """Return whether a text within reasoning holds no newline and no beginning of a mark."""
        if self._stage is not _Stage.REASONING or self._held or self._is_line_start:
            return False
        return self._has_begun and self._search_special(text) is None

    def push(self, text: str) -> list[SplitText]:
        """Take the next piece of text; return the pieces that are certain now."""
        if self.is_over or self._is_plain(text):
            return [SplitText(not self.is_over, text, text)] if text else []
        pieces: list[SplitText] = []
        rest, self._held = self._held + text, ""
        while rest:
            match self._stage:
                case _Stage.LEAD:
                    rest = self._read_lead(rest, pieces)
                case _Stage.REASONING:
                    rest = self._read_reasoning(rest, pieces)
                case _Stage.GAP:
                    rest = self._skip_gap(rest, pieces)
                case _Stage.ANSWER:
                    pieces.append(SplitText(False, rest, rest))
                    rest = ""
        return pieces

    def finish(self) -> list[SplitText]:
        """Return what was held back."""
        pieces: list[SplitText] = []
        rest, self._held = self._held, ""
        if self._stage is _Stage.LEAD:
            self._stage = _Stage.REASONING if self._is_within else _Stage.ANSWER
            pieces = self.push("".join(self._lead) + rest)
            rest, self._held = self._held, ""
        if self._stage is _Stage.REASONING:
            self._emit(rest, pieces)
            newlines = "\n" * self._num_newlines
            pieces += [SplitText(True, newlines, newlines)] if newlines else []
        return pieces

    def _read_lead(self, rest: str, pieces: list[SplitText]) -> str:
        body = rest.lstrip()
        self._lead.append(rest[: len(rest) - len(body)])
        if body.startswith(self._opening):
            pieces.append(SplitText(True, "", "".join(self._lead) + self._opening))
            self._stage = _Stage.REASONING
            return body[len(self._opening) :]
        if self._opening.startswith(body):
            self._held = body
            return ""
        self._stage = _Stage.REASONING if self._is_within else _Stage.ANSWER
        return "".join(self._lead) + body

    def _read_reasoning(self, rest: str, pieces: list[SplitText]) -> str:
        if not self._has_begun:
            self._has_begun = True
            if rest[0] == "\n":
                pieces.append(SplitText(True, "", "\n"))
                return rest[1:]
        end = self._search(self._ends, rest, 0)
        if end is None:
            partial = self._search(self._partial, rest, max(0, len(rest) - self._longest))
            cut = len(rest) if partial is None else partial.start()
            self._emit(rest[:cut], pieces)
            self._held = rest[cut:]
            return ""
        self._emit(rest[: end.start()], pieces)
        newlines = "\n" * self._num_newlines
        if end.lastgroup is not None:  # a tool call
            pieces += [SplitText(True, "", newlines)] if newlines else []
            self._stage = _Stage.ANSWER
            return rest[end.start() :]
        pieces.append(SplitText(True, "", newlines + self._closing))
        self._stage = _Stage.GAP
        return rest[end.end() :]

    def _skip_gap(self, rest: str, pieces: list[SplitText]) -> str:
        body = rest.lstrip("\n")
        if len(body) < len(rest):
            pieces.append(SplitText(False, "", rest[: len(rest) - len(body)]))
        if body:
            self._stage = _Stage.ANSWER
        return body

    def _emit(self, text: str, pieces: list[SplitText]) -> None:
        """Emit text of the reasoning; hold back the newlines at its end."""
        if not text:
            return
        body = text.rstrip("\n")
        if body:
            shown = "\n" * self._num_newlines + body
            pieces.append(SplitText(True, shown, shown))
            self._num_newlines = 0
        self._num_newlines += len(text) - len(body)
        self._is_line_start = self._num_newlines > 0

    def _search(self, pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
        """Search a tag or call; ignore a call at the start of a piece but not of a line."""
        found = pattern.search(text, start)
        if found and found.lastgroup and found.start() == 0 and not self._is_line_start:
            return pattern.search(text, 1)
        return found


def _marks(closing: str, interrupts: Sequence[str], pattern_of: Callable[[str], str]) -> str:
    """Return a pattern of the closing tag or, in group `call`, of a call that begins a line."""
    calls = "|".join(map(pattern_of, interrupts))
    return pattern_of(closing) + (f"|(?P<call>^(?:{calls}))" if calls else "")


def _beginning(mark: str) -> str:
    """Return a pattern that matches every beginning of a mark."""
    return "(?:".join(map(re.escape, mark)) + ")?" * (len(mark) - 1)
