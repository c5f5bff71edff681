"""Regular expressions that end an output.

RE2 matches them in linear time. Text is held back while it may be part of a match, so the maximum
length of a match must be known in advance; RE2 does not report it, hence the small parser here for
expressions that RE2 has accepted. Anchors and word boundaries are refused: whether they match would
depend on how the output is divided into pieces.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import inf

from remora.configs.errors import InvalidSampling

FIELD = "stop_regex"
CACHED_PATTERNS = 1024
BRACKET_CLASS_END = ":]"
OCTAL = frozenset("01234567")


class StopRegex:
    """One expression; finds the match in a text that ends first.

    width:  maximum length of a match in characters
    Raises InvalidSampling for expressions that RE2 refuses or that look beyond the match.
    """

    def __init__(self, pattern: str) -> None:
        self._anywhere = _compile(pattern)
        self._at_end = _compile(f"(?:{pattern})\\z")
        self.width = _max_width(pattern)

    def find(self, text: str) -> tuple[int, int] | None:
        """Return [start, end) of the match that ends first, the longest if several end there."""
        found = self._anywhere.search(text)
        if found is None:
            return None
        # A text with a match still has it when the text grows, so the end can be bisected.
        short, long = 0, found.span()[1]
        while long - short > 1:
            middle = (short + long) // 2
            if self._anywhere.search(text[:middle]) is None:
                short = middle
            else:
                long = middle
        last = self._at_end.search(text[:long])
        return found.span() if last is None else last.span()


@lru_cache(maxsize=CACHED_PATTERNS)
def stop_regex(pattern: str) -> StopRegex:
    """Compile an expression, with a cache. Raises InvalidSampling."""
    return StopRegex(pattern)


def check_stop_regex(pattern: str, *, max_width: int) -> None:
    """Raise InvalidSampling unless the pattern is RE2's and bounded by `max_width` characters."""
    regex = stop_regex(pattern)
    if regex.width > max_width:
        raise _refusal(
            pattern,
            f"may match more than {max_width} characters; use bounded repetition such as {{1,20}}",
        )
    if regex.find("") is not None:
        raise _refusal(pattern, "matches the empty text")


def _refusal(pattern: str, reason: str) -> InvalidSampling:
    return InvalidSampling(f"{FIELD} {pattern!r} {reason}.", FIELD)


def _compile(pattern: str) -> re.Pattern[str]:
    """Compile by RE2, whose patterns have the methods of Python's."""
    import re2  # imported only when used

    options = re2.Options()
    options.log_errors = False
    try:
        expression: re.Pattern[str] = re2.compile(pattern, options=options)
    except UnicodeError as error:
        raise InvalidSampling(f"{FIELD} holds half of a character.", FIELD) from error
    except re2.error as error:
        reason = error.args[0] if error.args else "unknown"
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise InvalidSampling(f"{FIELD} is not an RE2 expression: {text}.", FIELD) from error
    return expression


def _max_width(pattern: str) -> float:
    """Return the maximum length in characters of a match of a valid RE2 expression; inf =
    unbounded.

    Raises InvalidSampling for expressions that look at the text around the match.
    """
    return _WidthReader(pattern).alternatives()


class _WidthReader:
    """Parses an expression from left to right; each method returns the width of what it parsed."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def alternatives(self) -> float:
        widest = total = 0.0
        while self._at < len(self._pattern) and not self._ahead(")"):
            if self._take("|"):
                widest, total = max(widest, total), 0.0
            else:
                total += self._repeated(self._item())
        return max(widest, total)

    def _ahead(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if not self._ahead(text):
            return False
        self._at += len(text)
        return True

    def _skip_past(self, text: str) -> None:
        self._at = self._pattern.index(text, self._at) + len(text)

    def _item(self) -> float:
        if self._take("("):
            return self._group()
        if self._take("["):
            return self._character_class()
        if self._take("\\"):
            return self._escape()
        if self._ahead("^") or self._ahead("$"):
            raise self._look_around(self._pattern[self._at])
        self._at += 1
        return 1.0

    def _group(self) -> float:
        if self._take("?"):
            if self._ahead("P<") or self._ahead("<"):
                self._skip_past(">")
            else:  # flags, for the rest of the group around it or for a group of their own
                while not self._ahead(":") and not self._ahead(")"):
                    self._at += 1
                if self._take(")"):
                    return 0.0
                self._at += 1
        width = self.alternatives()
        self._at += 1
        return width

    def _character_class(self) -> float:
        self._take("^")
        self._take("]")  # the first is a member
        while not self._take("]"):
            if self._ahead("[:") and BRACKET_CLASS_END in self._pattern[self._at :]:
                self._skip_past(BRACKET_CLASS_END)
            elif self._take("\\"):
                self._escape()
            else:
                self._at += 1
        return 1.0

    def _escape(self) -> float:
        letter = self._pattern[self._at]
        self._at += 1
        if letter == "C":
            raise _refusal(self._pattern, "holds \\C, which matches a part of a character")
        if letter in "AzbB":
            raise self._look_around(f"\\{letter}")
        if letter == "Q":
            quoted, _, _ = self._pattern[self._at :].partition("\\E")
            self._at = min(len(self._pattern), self._at + len(quoted) + len("\\E"))
            return float(len(quoted))
        if letter in "pPx" and self._take("{"):
            self._skip_past("}")
        elif letter == "x":
            self._at += 2
        elif letter in "pP":
            self._at += 1
        elif letter in OCTAL:
            for _ in range(2):
                if self._pattern[self._at : self._at + 1] in OCTAL:
                    self._at += 1
        return 1.0

    def _repeated(self, width: float) -> float:
        """Parse the repeat of the previous item, if there is one."""
        if self._take("*") or self._take("+"):
            width = inf if width else 0.0
        elif not self._take("?"):
            low, high = self._bounds()
            if high is None:
                return width
            width = 0.0 if not width else width * max(low, high)
        self._take("?")
        return width

    def _bounds(self) -> tuple[float, float | None]:
        """Parse {n}, {n,} or {n,m}; anything else in braces is literal text."""
        inside, brace, _ = self._pattern[self._at + 1 :].partition("}")
        low, comma, high = inside.partition(",")
        is_count = self._ahead("{") and bool(brace) and _is_number(low)
        if not is_count or not (not high or _is_number(high)):
            return 0.0, None
        self._at += len(inside) + 2
        if not comma:
            return float(low), float(low)
        return float(low), float(high) if high else inf

    def _look_around(self, mark: str) -> InvalidSampling:
        return _refusal(
            self._pattern,
            f"holds {mark}, which looks at more of the output than the match; leave it out",
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
