"""Stop expressions: what they may be, how wide they are, and which match they find."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import InvalidSampling
from remora.engine.tokens.stop_regex import check_stop_regex, stop_regex

ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", r"\w", "(?:ab)", r"\.", "(?i)b"])
COUNTS = st.sampled_from(["", "?", "{2}", "{1,3}", "{0,2}?", "??"])
PATTERNS = st.recursive(
    st.builds("{}{}".format, ATOMS.filter(lambda atom: not atom.startswith("(?i")), COUNTS),
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("(?i:{}){}".format, inner, COUNTS)
    ),
    max_leaves=6,
)


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """Read letter by letter; at the first end of a match the longest one counts."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.fullmatch(pattern, text[start:end], re.DOTALL | re.ASCII):
                return start, end
    return None


@given(pattern=PATTERNS, text=st.text("abcA.", max_size=14))
def test_the_match_that_ends_first_is_found_and_is_no_wider_than_said(
    pattern: str, text: str
) -> None:
    expression = stop_regex(pattern)

    if re.fullmatch(pattern, ""):
        with pytest.raises(InvalidSampling, match="empty text"):
            check_stop_regex(pattern, max_width=256)
    else:
        span = expression.find(text)
        assert span == first_match(pattern, text)
        assert span is None or span[1] - span[0] <= expression.width


@pytest.mark.parametrize(
    ("pattern", "width"),
    [
        ("abc", 3),
        ("a|bcd|", 3),
        (r"\n\n|[.!?]", 2),
        ("(ab?){2,4}c", 9),
        ("(?P<name>ab)(?<other>c)(?i)d", 4),
        ("(?is:ab)", 2),
        (r"[]a][^]a][\]x][[:alpha:]_][a-z]", 5),
        (r"\x41\x{1F600}\101\07\pL\p{Greek}\PN", 7),
        (r"\1234", 2),
        (r"\Qa.b*\Ec", 5),
        ("x{,5}", 5),
        ("a{2", 3),
        ("a{2,3}?b", 4),
        ("é🙂", 2),
        ("(?:a{16}){16}", 256),
    ],
)
def test_the_width_of_an_expression_is_known(pattern: str, width: int) -> None:
    assert stop_regex(pattern).width == width


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a*b", "more than 256 characters"),
        ("a+", "more than 256"),
        ("a{2,}", "more than 256"),
        ("(?:ab|c+){2}", "more than 256"),
        ("(?:a{200}){2}", "more than 256"),
        ("a?", "empty text"),
        ("^a", r"holds \^"),
        ("a$", r"holds \$"),
        (r"\bword\b", "looks at more"),
        (r"a\z", "looks at more"),
        (r"a\C", "part of a character"),
        ("(a", "missing"),
        ("(?=a)b", "perl operator"),
        (r"(a)\1", "escape"),
        ("a|b)(?:c", "not an RE2"),
        (r"\Qabc", "not an RE2"),
        ("\ud800", "half of a character"),
    ],
)
def test_what_cannot_be_held_to_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidSampling, match=reason) as caught:
        check_stop_regex(pattern, max_width=256)

    assert caught.value.param == "stop_regex"
