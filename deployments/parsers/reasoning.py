"""Where a reply's thought ends and its answer begins.

Models that think write their thought between two tags before they answer. A format says which
tags; one engine takes replies apart by any of them, as they come. Whether a reply begins within a
thought is told by the prompt's last tag, which the chat template has written, and not by the
model's name: one model thinks or does not, as the request says.

Knows nothing of tool calls but the texts that they open with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ReasoningStart(Enum):
    """How a reply begins. OPEN: it may open a thought by itself, or answer at once."""

    WITHIN = "within"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes its thought.

    opening, closing:  the tags
    assumed:           whether a reply begins within a thought when the prompt does not say
    """

    name: str
    aliases: tuple[str, ...] = ()
    opening: str = "<think>"
    closing: str = "</think>"
    assumed: bool = False

    def start(
        self, prompt: str, turn_marks: re.Pattern[str] | None, *, continues: bool = False
    ) -> ReasoningStart:
        """Tell how the reply to a prompt begins.

        turn_marks:  what stands between turns: a tag before the last of them is of an earlier turn
        continues:   whether the reply goes on with the prompt's last message
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
)


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format of this name or alias, None if there is none."""
    return next((form for form in REASONING_FORMATS if name in (form.name, *form.aliases)), None)


class Piece(NamedTuple):
    """A part of a reply. `text` is what is shown of `raw`: tags, and newlines by them, are not."""

    is_reasoning: bool
    text: str
    raw: str


class _Stage(Enum):
    LEAD = "before the opening tag"
    REASONING = "in reasoning"
    GAP = "between the closing tag and the answer"
    ANSWER = "after the thought"


class ReasoningSplitter:
    """Takes one reply apart into thought and answer. Never raises; any text is some reply.

    The raw texts of all pieces are the text that was pushed. Held back are newlines, which may turn
    out to stand before the closing tag, and what may be the beginning of a tag. An opening tag
    counts only where the reply begins. A thought that nothing ends goes on to the end.
    """

    def __init__(
        self, form: ReasoningFormat, start: ReasoningStart, *, interrupts: Sequence[str] = ()
    ) -> None:
        """`interrupts`: texts that end a thought when a line begins with them (tool calls)."""
        self._opening, self._closing = form.opening, form.closing
        self._is_within = start is ReasoningStart.WITHIN
        self._stage = _Stage.ANSWER if start is ReasoningStart.OVER else _Stage.LEAD
        self._ends = re.compile(_marks(form.closing, interrupts, re.escape), re.MULTILINE)
        partial = _marks(form.closing, interrupts, _beginning)
        self._partial = re.compile(rf"(?:{partial})\Z", re.MULTILINE)
        self._longest = max(map(len, (form.closing, *interrupts)))
        self._held = ""
        self._lead: list[str] = []
        self._num_newlines = 0  # at the end of what has been said of the thought
        self._has_begun = False  # whether the thought has a first character, shown or not
        self._is_line_start = True

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of text; return what is certain now."""
        pieces: list[Piece] = []
        rest, self._held = self._held + text, ""
        while rest:
            match self._stage:
                case _Stage.LEAD:
                    rest = self._lead_in(rest, pieces)
                case _Stage.REASONING:
                    rest = self._think(rest, pieces)
                case _Stage.GAP:
                    rest = self._cross_gap(rest, pieces)
                case _Stage.ANSWER:
                    pieces.append(Piece(False, rest, rest))
                    rest = ""
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        pieces: list[Piece] = []
        rest, self._held = self._held, ""
        if self._stage is _Stage.LEAD:
            self._stage = _Stage.REASONING if self._is_within else _Stage.ANSWER
            pieces = self.push("".join(self._lead) + rest)
            rest, self._held = self._held, ""
        if self._stage is _Stage.REASONING:
            self._say(rest, pieces)
            newlines = "\n" * self._num_newlines
            pieces += [Piece(True, newlines, newlines)] if newlines else []
        return pieces

    def _lead_in(self, rest: str, pieces: list[Piece]) -> str:
        body = rest.lstrip()
        self._lead.append(rest[: len(rest) - len(body)])
        if body.startswith(self._opening):
            pieces.append(Piece(True, "", "".join(self._lead) + self._opening))
            self._stage = _Stage.REASONING
            return body[len(self._opening) :]
        if self._opening.startswith(body):
            self._held = body
            return ""
        self._stage = _Stage.REASONING if self._is_within else _Stage.ANSWER
        return "".join(self._lead) + body

    def _think(self, rest: str, pieces: list[Piece]) -> str:
        if not self._has_begun:
            self._has_begun = True
            if rest[0] == "\n":
                pieces.append(Piece(True, "", "\n"))
                return rest[1:]
        end = self._search(self._ends, rest, 0)
        if end is None:
            partial = self._search(self._partial, rest, max(0, len(rest) - self._longest))
            cut = len(rest) if partial is None else partial.start()
            self._say(rest[:cut], pieces)
            self._held = rest[cut:]
            return ""
        self._say(rest[: end.start()], pieces)
        newlines = "\n" * self._num_newlines
        if end.lastgroup is not None:  # a tool call
            pieces += [Piece(True, "", newlines)] if newlines else []
            self._stage = _Stage.ANSWER
            return rest[end.start() :]
        pieces.append(Piece(True, "", newlines + self._closing))
        self._stage = _Stage.GAP
        return rest[end.end() :]

    def _cross_gap(self, rest: str, pieces: list[Piece]) -> str:
        body = rest.lstrip("\n")
        if len(body) < len(rest):
            pieces.append(Piece(False, "", rest[: len(rest) - len(body)]))
        if body:
            self._stage = _Stage.ANSWER
        return body

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Give out text of the thought; hold back the newlines that it ends with."""
        if not text:
            return
        body = text.rstrip("\n")
        if body:
            shown = "\n" * self._num_newlines + body
            pieces.append(Piece(True, shown, shown))
            self._num_newlines = 0
        self._num_newlines += len(text) - len(body)
        self._is_line_start = self._num_newlines > 0

    def _search(self, pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
        """Search a mark; `^` also matches where a piece, but no line, begins."""
        found = pattern.search(text, start)
        if found and found.lastgroup and found.start() == 0 and not self._is_line_start:
            return pattern.search(text, 1)
        return found


def _marks(closing: str, interrupts: Sequence[str], pattern_of: Callable[[str], str]) -> str:
    """Return a pattern of the closing tag anywhere or, as its group `call`, of calls in a line."""
    calls = "|".join(map(pattern_of, interrupts))
    return pattern_of(closing) + (f"|(?P<call>^(?:{calls}))" if calls else "")


def _beginning(mark: str) -> str:
    """Return a pattern of any beginning of a mark."""
    return "(?:".join(map(re.escape, mark)) + ")?" * (len(mark) - 1)
