"""Reads replies by the checkpoint's `response_template`.

The template lists the parts of a reply (content, reasoning, tool calls) with the marks that open
and close each. transformers defines it, loads it, and turns the text of a call into a name and
arguments; it is imported only when a checkpoint has a template. The parts are found here, because
transformers' incremental parser keeps all text, searches it again for each piece, and drops the
text of a malformed call.

Text is streamed, a call is emitted when it is complete, and parts of other names become text with
their marks. The patterns come from an untrusted checkpoint, so each search has a time limit; past
it the rest of the reply is text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from enum import Enum
from typing import Any, NamedTuple

from remora.configs.errors import ConfigError
from remora.deployments.parsers.tool_calls import structural_tags as tags
from remora.deployments.parsers.tools import ToolUse

logger = logging.getLogger(__name__)

SEARCH_TIMEOUT_S = 0.2
MAX_CALL_CHARS = 2**18  # longer calls are given as text
REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
_NAME_OF_GROUP = re.compile(r"\(\?P<\w+>")
_WINDOW = 1024  # marks are looked for in so many characters at a time
CALLS_FIELD, TEXT_FIELD = "tool_calls", "content"


class PartKind(Enum):
    """How the text of a part is treated."""

    TEXT = "text"
    REASONING = "reasoning"
    CALLS = "calls"
    OTHER = "other"
    NOTHING = "nothing"


class Part(NamedTuple):
    """A piece of a reply. `is_mark`: a mark, not content; `ends`: the last piece of its part."""

    kind: PartKind
    text: str
    is_mark: bool = False
    ends: bool = False


class CheckpointFormat:
    """A checkpoint's loaded response template."""

    name = "response_template"

    def __init__(self, source: Mapping[str, Any]) -> None:
        """Load a template. Raises ConfigError if transformers rejects it."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._source = deepcopy(dict(source))
        try:
            for field in self._source["fields"].values():
                field["optional"] = True  # a reply may lack any part
            self.template: Any = load_response_template(self._source)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"the checkpoint's response_template cannot be used: {error}; set api.tool_parser "
                "and api.reasoning_parser to the name of a format, or to none"
            ) from error
        self.kinds = {name: _kind(name, field) for name, field in self.template.fields.items()}

    @property
    def has_calls(self) -> bool:
        """Whether replies may contain tool calls."""
        return PartKind.CALLS in self.kinds.values()

    @property
    def has_reasoning(self) -> bool:
        """Whether replies may contain reasoning."""
        return PartKind.REASONING in self.kinds.values()

    def names_mark(self, text: str) -> bool:
        """Return whether a text is or may be part of a mark."""
        fields = self._source["fields"].values()
        keys = ("open", "close", "open_pattern", "close_pattern")
        marks = (field.get(key) or () for field in fields for key in keys)
        texts = [each for mark in marks for each in ([mark] if isinstance(mark, str) else mark)]
        return any(text in each or text in each.replace("\\", "") for each in texts)

    def reasoning_end(self, prompt: str) -> str | None:
        """Return the mark that ends reasoning, if the prompt ends within reasoning."""
        field = PartFinder(self, prompt).field
        if field is None or not self._is_reasoning(field.name):
            return None
        return field.close_literals[0] if field.close_literals else None

    def reasoning_opening(self, prompt: str) -> str | None:
        """Return the text that opens reasoning, if the reply to a prompt may begin with it."""
        fields = [f for name, f in self.template.fields.items() if self._is_reasoning(name)]
        finder = PartFinder(self, prompt)
        if not finder.is_at_start or not fields or not fields[0].open_literals:
            return None
        return f"{fields[0].open_literals[0]}\n"

    def calls_alone(self, use: ToolUse) -> tags.Tag | None:
        """Return the format of a reply of calls only, with unconstrained contents.

        None: the template closes calls with a pattern, not a text.
        """
        field = self.template.fields.get(CALLS_FIELD)
        if field is None or field.open_re is None or not field.close_literals:
            return None
        if field.open_literals:
            opening = tags.one_of_texts(field.open_literals)
        else:
            pattern = _NAME_OF_GROUP.sub("(?:", field.open_re.pattern.removeprefix(r"\s*"))
            opening = {"type": "regex", "pattern": pattern}
        call = tags.between(opening, field.close_literals[0])
        return tags.calls_alone([call], ((), ()), r" \n", parallel=use.parallel)

    def _is_reasoning(self, name: str) -> bool:
        return self.kinds[name] is PartKind.REASONING

    def read_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, str]] | None:
        """Return the names and arguments (JSON) of the calls in a part, or None."""
        from transformers.utils.chat_parsing import parse_response

        if len(text) > MAX_CALL_CHARS:
            return None
        try:
            message = parse_response(text, self.template, prefix="", tools=[dict(t) for t in tools])
            calls = [_name_and_arguments(call) for call in message[CALLS_FIELD]]
        except Exception as error:  # untrusted patterns on a model's text may raise anything
            logger.debug("parsers: malformed call: %s", type(error).__name__)
            return None
        return calls or None


class PartFinder:
    """Cuts one reply into parts at the marks of a template. Never raises.

    The texts of all parts, marks included, add up to the text that was pushed.

    field:        the template's current field; None = none
    is_at_start:  whether the prompt contains nothing of the reply
    """

    def __init__(self, form: CheckpointFormat, prompt: str) -> None:
        self._form = form
        self._template = form.template
        self.field: Any = self._implicit
        self._buffer = ""
        self._waiting: list[str] = []
        self._num_waiting = 0
        self._is_lost = False
        self._num_of_prompt = 0
        start = self._start_of_reply(prompt)
        self.push(start)
        self.is_at_start = not start.strip()
        self._num_of_prompt = len(self._buffer) + self._num_waiting

    def push(self, text: str) -> list[Part]:
        """Take the next piece of text; return the parts that are certain now."""
        parts: list[Part] = []
        for start in range(0, len(text), _WINDOW):
            self._waiting.append(text[start : start + _WINDOW])
            self._num_waiting += len(self._waiting[-1])
            # A mark that may still grow is searched again at growing distances only: linear work.
            if self._num_waiting * 4 >= len(self._buffer) - _WINDOW:
                parts += self._cut(at_end=False)
        return self._of_reply(parts)

    def finish(self) -> list[Part]:
        """Return what was held back, and the end of the last part."""
        return [*self._of_reply(self._cut(at_end=True)), Part(self._kind, "", ends=True)]

    @property
    def _implicit(self) -> Any:
        name = self._template.implicit
        return None if name is None else self._template.fields[name]

    @property
    def _kind(self) -> PartKind:
        return PartKind.NOTHING if self.field is None else self._form.kinds[self.field.name]

    def _start_of_reply(self, prompt: str) -> str:
        """Return the part of the reply that the prompt already contains."""
        end = 0
        try:
            for anchor in self._template.start_anchor_re.finditer(prompt, timeout=SEARCH_TIMEOUT_S):
                end = anchor.end()
        except TimeoutError:
            return ""
        return prompt[end:]

    def _of_reply(self, parts: list[Part]) -> list[Part]:
        """Remove the held-back text that belongs to the prompt."""
        kept: list[Part] = []
        for part in parts:
            num_dropped = min(self._num_of_prompt, len(part.text))
            self._num_of_prompt -= num_dropped
            kept.append(part._replace(text=part.text[num_dropped:]))
        return kept

    def _cut(self, *, at_end: bool) -> list[Part]:
        text = self._buffer + "".join(self._waiting)
        self._waiting.clear()
        self._num_waiting = 0
        parts: list[Part] = []
        position, last_empty = 0, -1
        while not self._is_lost:
            mark, opened, held = self._next_mark(text, position, at_end=at_end)
            if mark is None:
                break
            start, end = mark.span()
            if start == end == last_empty:  # two empty marks: skip a character
                end += 1
                parts.append(Part(self._kind, text[position:end]))
                position = end
                continue
            last_empty = start if start == end else -1
            parts.append(Part(self._kind, text[position:start]))
            position = end
            parts += self._switch(mark.group(), opened)
        stop = len(text) if at_end or self._is_lost else held
        parts.append(Part(self._kind, text[position:stop]))
        self._buffer = text[stop:]
        return parts

    def _switch(self, mark: str, opened: Any) -> list[Part]:
        """Enter the field that a mark opens, or leave the current field."""
        if opened is None:
            parts = [Part(self._kind, mark, is_mark=True, ends=True)]
            self.field = self._implicit
            return parts
        before = Part(self._kind, "", ends=True)
        self.field = opened
        return [before, Part(self._kind, mark, is_mark=True)]

    def _next_mark(self, text: str, start: int, *, at_end: bool) -> tuple[Any, Any, int]:
        """Return the next mark, the field it opens (None: it closes), and the certain length."""
        held = len(text)
        best: tuple[tuple[int, int, bool], Any, Any] | None = None
        for pattern, may_grow, opened in self._watched():
            try:
                found = pattern.search(text, start, partial=not at_end, timeout=SEARCH_TIMEOUT_S)
            except TimeoutError:
                self._is_lost = True
                return None, None, held
            if found is None or found.start() == len(text):
                continue
            if not at_end and (found.partial or (may_grow and found.end() == len(text))):
                held = min(held, found.start())
                continue
            key = (found.start(), -found.end(), opened is None)
            if best is None or key < best[0]:
                best = (key, found, opened)
        if best is None or best[1].start() >= held:
            return None, None, held
        return best[1], best[2], held

    def _watched(self) -> list[tuple[Any, bool, Any]]:
        """Return the marks to search: pattern, whether more text may lengthen it, field."""
        f, watched = self.field, list[tuple[Any, bool, Any]]()
        if f is not None and f.close_re is not None:
            may_grow = f.close_literals is None or f.close_literal_can_extend
            watched.append((f.close_re, may_grow, None))
        if f is self._implicit:
            watched += [
                (f.open_re, f.open_literals is None or f.open_literal_can_extend, f)
                for f in self._template.fields.values()
                if f.open_re is not None
            ]
        return watched


def _kind(name: str, field: Any) -> PartKind:
    if name == CALLS_FIELD:
        return PartKind.CALLS
    if field.content == "text" and (name == TEXT_FIELD or name in REASONING_FIELDS):
        return PartKind.TEXT if name == TEXT_FIELD else PartKind.REASONING
    return PartKind.OTHER


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return a call's name and arguments. Raises an arbitrary error for a malformed call."""
    function = call.get("function", call)
    name, arguments = function["name"], function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("a call needs a name and an object of arguments")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
