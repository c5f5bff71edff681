"""Integers within bounds, as a regular expression."""

from __future__ import annotations

from remora.engine.grammar.characters import CLASSES
from remora.engine.grammar.regex import Chars, Choice, Node, Repeat, Series, literal

DIGIT = Chars(CLASSES["d"])
_FIRST = Chars(((0x31, 0x39),))


def integers(low: int | None, high: int | None) -> Node:
    """Match the decimal integers from `low` to `high`, inclusive; None = no bound."""
    options: list[Node] = []
    if low is None or low < 0:
        smallest = 1 if high is None or high >= 0 else -high
        largest = None if low is None else -low
        if largest is None or smallest <= largest:
            options.append(Series((literal("-"), _naturals(smallest, largest))))
    if high is None or high >= 0:
        options.append(_naturals(max(low or 0, 0), high))
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _naturals(low: int, high: int | None) -> Node:
    """Match `low` to `high` without leading zeros, one length at a time."""
    options: list[Node] = []
    if high is None:
        longer = Series((_FIRST, Repeat(DIGIT, len(str(low)), None)))
        return Choice((_naturals(low, 10 ** len(str(low)) - 1), longer))
    for length in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        options.append(_same_length(str(least), str(min(high, 10**length - 1))))
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _same_length(low: str, high: str) -> Node:
    """Match from `low` to `high`, which have the same number of digits."""
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return Series((_digits(low[0], high[0]), Repeat(DIGIT, rest, rest)))
    if low[0] == high[0]:
        return Series((literal(low[0]), _same_length(low[1:], high[1:])))
    options = [Series((literal(low[0]), _same_length(low[1:], "9" * rest)))]
    if int(high[0]) - int(low[0]) > 1:
        between = _digits(str(int(low[0]) + 1), str(int(high[0]) - 1))
        options.append(Series((between, Repeat(DIGIT, rest, rest))))
    options.append(Series((literal(high[0]), _same_length("0" * rest, high[1:]))))
    return Choice(tuple(options))


def _digits(low: str, high: str) -> Chars:
    return Chars(((ord(low), ord(high)),))
