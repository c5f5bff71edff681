"""A parser of callers' regular expressions, within limits.

Compilers differ in what they accept and in what they silently ignore (lookahead, anchors, flags).
So patterns are parsed here, by the rules of ECMA-262 with ASCII classes, and everything that is not
regular is refused. A pattern always matches the whole text: `^` and `$` at its ends have no effect,
and are refused elsewhere.
"""

from __future__ import annotations

import re

from remora.engine.grammar.characters import (
    ANY_BUT_NEWLINE,
    CLASSES,
    CONTROLS,
    Ranges,
    complement,
    single,
    union,
)
from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.regex import Chars, Node, Repeat, Series, num_copies, one_of

MAX_PATTERN_BYTES = 2048
MAX_COPIES = 10_000
MAX_GROUP_DEPTH = 48
_HEX = {"x": 2, "u": 4}
_REPEAT = re.compile(r"\{([0-9]{1,9})(,([0-9]{1,9})?)?\}")
_GROUP_NAME = re.compile(r"P?<[A-Za-z_][A-Za-z0-9_]*>")


def read_pattern(pattern: str, place: str, *, is_generated: bool = False) -> Node:
    """Parse a pattern. Raises ConstraintError, whose message starts with `place`.

    is_generated:  it was written by `render`, and measured before that
    """
    size = len(pattern.encode("utf-8", "surrogatepass"))
    if size > MAX_PATTERN_BYTES and not is_generated:
        raise ConstraintError(
            f"{place}: it has {size} bytes; at most {MAX_PATTERN_BYTES} are taken",
            limit="max_pattern_bytes",
        )
    try:
        reader = _Reader(pattern)
        node = reader.choice(depth=0)
        if reader.rest:
            raise ConstraintError(f"the parenthesis at position {reader.at} closes nothing")
    except ConstraintError as error:
        raise ConstraintError(f"{place}: {error}", limit=error.limit) from None
    copies = num_copies(node)
    if copies > MAX_COPIES:
        raise ConstraintError(
            f"{place}: its repeats multiply to {copies}; at most {MAX_COPIES} are taken",
            limit="max_repeats",
        )
    return node


class _Reader:
    """A position in a pattern, moved forward by each method."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self.at = 0

    @property
    def rest(self) -> int:
        """Characters left to read."""
        return len(self._text) - self.at

    def choice(self, depth: int) -> Node:
        """Parse alternatives up to the end of the group (not consumed) or of the pattern."""
        if depth > MAX_GROUP_DEPTH:
            raise ConstraintError(f"groups nest deeper than {MAX_GROUP_DEPTH}", limit="max_depth")
        options = [self._series(depth)]
        while self._take("|"):
            options.append(self._series(depth))
        return one_of(options)

    def _series(self, depth: int) -> Node:
        if depth == 0:
            self._take("^")
        parts: list[Node] = []
        while self.rest and self._text[self.at] not in "|)":
            if self._text[self.at] == "$" and depth == 0 and self._peek(1) in ("", "|"):
                self.at += 1
                break
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _atom(self, depth: int) -> Node:
        at, char = self.at, self._next()
        if char == "(":
            return self._group(at, depth)
        if char == "[":
            return Chars(self._char_class(at))
        if char == ".":
            return Chars(ANY_BUT_NEWLINE)
        if char == "\\":
            return Chars(self._escape(at))
        if char in "^$":
            raise ConstraintError(f"{char!r} at position {at} is not at an end of the pattern")
        if char in "*+?":
            raise ConstraintError(f"{char!r} at position {at} has nothing to repeat")
        return Chars(((ord(char), ord(char)),))

    def _group(self, at: int, depth: int) -> Node:
        if self._take("?"):
            name = _GROUP_NAME.match(self._text, self.at)
            if name is not None:
                self.at = name.end()
            elif not self._take(":"):
                raise ConstraintError(
                    f"the group at position {at} is a lookaround or sets flags; only plain groups"
                    " can be enforced"
                )
        node = self.choice(depth + 1)
        if not self._take(")"):
            raise ConstraintError(f"the group at position {at} is not closed")
        return node

    def _repeated(self, node: Node) -> Node:
        at = self.at
        bounds = self._bounds()
        if bounds is None:
            return node
        low, high = bounds
        if high is not None and high < low:
            raise ConstraintError(
                f"the repeat at position {at} asks for at least {low}, at most {high}"
            )
        self._take("?")  # lazy and greedy repeats match the same texts
        if self._peek() == "+" or self._bounds() is not None:
            raise ConstraintError(f"the repeat at position {at} is itself repeated; use a group")
        return Repeat(node, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Parse a repeat, if there is one."""
        for char, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                return bounds
        match = _REPEAT.match(self._text, self.at)
        if match is None:
            return None
        self.at = match.end()
        low = int(match[1])
        if match[2] is None:
            return low, low
        return low, None if match[3] is None else int(match[3])

    def _char_class(self, start: int) -> Ranges:
        is_negated = self._take("^")
        if self._peek() in ("]", "") or self._text.startswith("[:", self.at):
            raise ConstraintError(f"the class at position {start} is empty, open or a POSIX class")
        ranges: Ranges = ()
        while not self._take("]"):
            low = self._member(start)
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                self.at += 1
                high = self._member(start)
                first, last = single(low), single(high)
                if first is None or last is None or last < first:
                    raise ConstraintError(
                        f"the class at position {start} has a range without order"
                    )
                low = ((first, last),)
            ranges = union(ranges, low)
        return complement(ranges) if is_negated else ranges

    def _member(self, start: int) -> Ranges:
        if not self.rest:
            raise ConstraintError(f"the class at position {start} is not closed")
        at, char = self.at, self._next()
        if char == "\\":
            return ((8, 8),) if self._take("b") else self._escape(at)
        return ((ord(char), ord(char)),)

    def _escape(self, at: int) -> Ranges:
        char = self._next() if self.rest else ""
        if char in CLASSES:
            return CLASSES[char]
        if char in CONTROLS:
            return ((CONTROLS[char], CONTROLS[char]),)
        if char in _HEX:
            match = re.compile(rf"[0-9A-Fa-f]{{{_HEX[char]}}}").match(self._text, self.at)
            if match is not None and not 0xD800 <= (code := int(match[0], 16)) < 0xE000:
                self.at = match.end()
                return ((code, code),)
        if not char or char.isalnum():
            raise ConstraintError(
                f"\\{char} at position {at} cannot be enforced (backreferences, word boundaries and"
                " Unicode classes are not supported)"
            )
        return ((ord(char), ord(char)),)

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self.at + ahead : self.at + ahead + 1]

    def _next(self) -> str:
        self.at += 1
        return self._text[self.at - 1]

    def _take(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self.at += 1
        return True
