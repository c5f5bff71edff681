"""Regular expressions as a tree: measured, and written for compilers.

They are written in a subset that all compilers read alike: groups, repeats, alternatives, and
character classes of literal ranges. `regex_reader.py` parses callers' patterns into trees. Knows no
compiler and no JSON schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remora.engine.grammar.characters import JSON_PLAIN, Ranges, intersection, single, union


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Series:
    """A sequence of parts; none: the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` copies of the body; high None = any number."""

    body: Node
    low: int
    high: int | None


Node = Chars | Series | Choice | Repeat


def num_copies(node: Node) -> int:
    """Return the largest product of nested repeat counts (an open end counts as its low end)."""
    if isinstance(node, Repeat):
        return max(node.low, node.high or 1, 1) * num_copies(node.body)
    if isinstance(node, Chars):
        return 1
    return max(map(num_copies, _parts(node)), default=1)


def num_nodes(node: Node) -> int:
    """Return the number of nodes of a tree, counting a shared one as often as it is written."""
    counted: dict[int, int] = {}

    def count(part: Node) -> int:
        if id(part) not in counted:
            inner = () if isinstance(part, Chars) else _parts(part)
            counted[id(part)] = 1 + sum(map(count, inner))
        return counted[id(part)]

    return count(node)


def lengths(node: Node) -> tuple[int, int | None]:
    """Return the minimum and maximum length of a match in characters; None = unbounded."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Repeat):
        low, high = lengths(node.body)
        most = 0 if 0 in (high, node.high) else None
        if high and node.high:
            most = high * node.high
        return low * node.low, most
    pairs = [lengths(part) for part in _parts(node)]
    lows, highs = [low for low, _ in pairs], [high for _, high in pairs]
    known = [high for high in highs if high is not None]
    gather = (sum, sum) if isinstance(node, Series) else (min, max)
    return gather[0](lows), gather[1](known) if len(known) == len(highs) else None


def render(node: Node) -> str:
    """Write a tree in the subset that every compiler reads alike."""
    if isinstance(node, Chars):
        char = single(node.ranges)
        return render_ranges(node.ranges) if char is None else render_char(char)
    if isinstance(node, Series):
        return "".join(
            f"(?:{render(part)})" if isinstance(part, Choice) else render(part)
            for part in node.parts
        )
    if isinstance(node, Choice):
        return "|".join(render(option) for option in node.options)
    body = render(node.body) if isinstance(node.body, Chars) else f"(?:{render(node.body)})"
    # Not "?", which xgrammar handles incorrectly around repeats.
    short = {(0, None): "*", (1, None): "+", (1, 1): ""}.get((node.low, node.high))
    if short is not None:
        return body + short
    if node.low == node.high:
        return f"{body}{{{node.low}}}"
    return f"{body}{{{node.low},{'' if node.high is None else node.high}}}"


def within_json(node: Node) -> Node | None:
    """Return the tree without characters that JSON strings escape; None if nothing remains."""
    if isinstance(node, Chars):
        ranges = intersection(node.ranges, JSON_PLAIN)
        return Chars(ranges) if ranges else None
    if isinstance(node, Repeat):
        body = within_json(node.body)
        if body is None:
            return Series(()) if node.low == 0 else None
        return Repeat(body, node.low, node.high)
    parts = [within_json(part) for part in _parts(node)]
    kept = tuple(part for part in parts if part is not None)
    if isinstance(node, Series):
        return Series(kept) if len(kept) == len(parts) else None
    return Choice(kept) if kept else None


def without_empty(node: Node) -> Node | None:
    """Return the tree for the same texts except the empty one; None if there is no other."""
    if isinstance(node, Chars) or lengths(node)[0] > 0:
        return node
    if isinstance(node, Repeat):
        body = without_empty(node.body)
        return None if body is None or node.high == 0 else Repeat(body, 1, node.high)
    if isinstance(node, Series):
        # Every part may be empty: one of them is the first that is not.
        alternatives: tuple[Node, ...] = tuple(
            Series((first, *node.parts[at + 1 :]))
            for at, part in enumerate(node.parts)
            if (first := without_empty(part)) is not None
        )
    else:
        kept = (without_empty(option) for option in node.options)
        alternatives = tuple(option for option in kept if option is not None)
    return Choice(alternatives) if alternatives else None


def one_of(options: Sequence[Node]) -> Node:
    """Return the tree that matches any of the options; single characters become one class.

    Separate options would make compilers follow two paths for the same text.
    """
    ranges = [option.ranges for option in options if isinstance(option, Chars)]
    if len(ranges) < 2:
        return options[0] if len(options) == 1 else Choice(tuple(options))
    chars = Chars(union(*ranges))
    others = [option for option in options if not isinstance(option, Chars)]
    return Choice((chars, *others)) if others else chars


def literal(text: str) -> Node:
    """Return the tree that matches exactly this text."""
    return Series(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def _parts(node: Series | Choice | Repeat) -> tuple[Node, ...]:
    if isinstance(node, Repeat):
        return (node.body,)
    return node.parts if isinstance(node, Series) else node.options


def render_ranges(ranges: Ranges) -> str:
    """Write a character class."""
    pieces = (
        render_char(low) if low == high else f"{render_char(low)}-{render_char(high)}"
        for low, high in ranges
    )
    return f"[{''.join(pieces)}]"


def render_char(code: int) -> str:
    """Write ASCII other than letters and digits in hex: no compiler reads that as syntax."""
    char = chr(code)
    return char if code > 0x7F or char.isalnum() else f"\\u{code:04x}"
