"""Sets of characters as sorted ranges of code points, by name.

Surrogates are in no set, because UTF-8 text cannot contain them.
"""

from __future__ import annotations

Ranges = tuple[tuple[int, int], ...]

FIRST_SURROGATE, LAST_SURROGATE, LAST = 0xD800, 0xDFFF, 0x10FFFF
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


def union(*sets: Ranges) -> Ranges:
    """Return the union of the sets."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return the complement, without surrogates."""
    gaps, at = [], 0
    for low, high in union(ranges, ((FIRST_SURROGATE, LAST_SURROGATE),)):
        if at < low:
            gaps.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        gaps.append((at, LAST))
    return tuple(gaps)


def intersection(first: Ranges, second: Ranges) -> Ranges:
    """Return the intersection of both sets."""
    return complement(union(complement(first), complement(second)))


def single(ranges: Ranges) -> int | None:
    """Return the only character of a set, None if it has another number of them."""
    return ranges[0][0] if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else None


_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = (*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_ASCII_SPACE: Ranges = ((9, 13), (32, 32))
_SPACE: Ranges = (
    *_ASCII_SPACE,
    (0x1C, 0x1F),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)

# `\s` is the whitespace that all regex dialects agree on, `\S` excludes all whitespace of any.
CLASSES: dict[str, Ranges] = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _ASCII_SPACE,
    "D": complement(_DIGIT),
    "W": complement(_WORD),
    "S": complement(_SPACE),
}
ANY_BUT_NEWLINE = complement(((10, 10), (13, 13), (0x2028, 0x2029)))

# Characters that need no escape within a JSON string.
JSON_PLAIN = complement(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
