"""Patterns: what is read, what is refused, and that both compilers read our spelling alike."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remora.engine.grammar.constraint import ConstraintError, ConstraintKind
from remora.engine.grammar.prepare import Source, SourceKind
from remora.engine.grammar.regex import (
    Chars,
    Choice,
    Node,
    Repeat,
    Series,
    lengths,
    num_copies,
    render,
    within_json,
    without_empty,
)
from remora.engine.grammar.regex_reader import MAX_COPIES, MAX_PATTERN_BYTES, read_pattern
from tests.engine.grammar.walks import BACKENDS, accepts, compile_source, make_grammar, walks


def chars(text: str) -> Node:
    return Chars(tuple((ord(char), ord(char)) for char in sorted(text)))


def repeats(body: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    bounds = st.sampled_from([(0, 1), (0, None), (1, None), (1, 2), (2, 2), (0, 2), (2, None)])
    return st.builds(lambda node, ends: Repeat(node, *ends), body, bounds)


NODES: st.SearchStrategy[Node] = st.recursive(
    st.sampled_from([chars("a"), chars("b"), chars("ab"), chars("c")]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: Series(tuple(parts))),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: Choice(tuple(parts))),
        repeats(inner),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150)
@given(node=NODES, texts=st.lists(st.text("abc", max_size=6), min_size=5, max_size=20))
def test_compilers_match_what_the_tree_says(backend: str, node: Node, texts: list[str]) -> None:
    assume(without_empty(node) is not None)
    pattern = render(node)
    grammar = compile_source(backend, Source(SourceKind.REGEX, pattern))

    got = {text for text in texts if accepts(grammar, text)}

    assert got == {text for text in texts if re.fullmatch(pattern, text)}


@settings(max_examples=100)
@given(node=NODES, texts=st.lists(st.text("abc", max_size=6), min_size=5, max_size=20))
def test_patterns_hold_within_schemas_of_xgrammar(node: Node, texts: list[str]) -> None:
    schema = f'{{"type": "string", "pattern": "{render(node)}"}}'
    grammar = make_grammar("xgrammar", ConstraintKind.JSON_SCHEMA, schema)

    got = {text for text in texts if accepts(grammar, f'"{text}"')}

    assert got == {text for text in texts if re.fullmatch(render(node), text)}


@given(node=NODES, text=st.text("abc", max_size=8))
def test_lengths_bound_every_match(node: Node, text: str) -> None:
    low, high = lengths(node)
    if re.fullmatch(render(node), text):
        assert low <= len(text)
        assert high is None or len(text) <= high


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"^\d{3}-\d{4}$", ["555-1234"], ["5551234", "x555-1234", "٣٣٣-٣٣٣٣"]),
        (r"[^\W\d_]+", ["abC"], ["a1", "é", ""]),
        (r"\u00e9\/\-[\]\-a]", ["é/-]", "é/--"], ["é/-b"]),
        (r"^a$|^b$", ["a", "b"], ["ab"]),
        (r"(?:x|y)+?z", ["xz", "xyxz"], ["z"]),
        (r"(?P<year>[0-9]{2})(?<m>[a-c])", ["12a"], ["12d"]),
        (r"a{2,3}b{2}c{0}d{,3}", ["aabbd{,3}"], ["abb"]),
        (r".", ["x", "é", "\t"], ["\n", ""]),
        (r"\S\s\S", ["a b", "a\tb"], ["a\u00a0b", "ab"]),
        (r"(|a)b*", ["", "a", "abb"], ["aa"]),
        (r"\x41\t\n", ["A\t\n"], ["A"]),
        (r'["\\]+', ['"\\'], ["a"]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pattern_matches_whole_texts(
    backend: str, pattern: str, matches: list[str], others: list[str]
) -> None:
    grammar = make_grammar(backend, ConstraintKind.REGEX, pattern)

    assert [text for text in matches if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "pattern",
    [r"[A-Z][a-z]{1,8}(?: [A-Z]\.)?", r"\d+(?:,\d{3})*", r"[äöü日]{2,5}", r"(ab|cd|ef){3}"],
)
def test_walks_write_what_the_pattern_says(backend: str, pattern: str) -> None:
    grammar = make_grammar(backend, ConstraintKind.REGEX, pattern)

    for text in walks(grammar, 10):
        assert re.fullmatch(pattern, text, re.ASCII)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?!a)b", "(?<=a)b", "(?<!a)b", "(?i)a", "(a)\\1", r"\bx", r"\B", r"\p{L}"),
        *("(a", "a)", "*a", "a**", "a++", "a{2}{3}", "a{3,2}", "a^b", "a$b", "(^a|b)"),
        *("[]", "[b-a]", "[a", "[[:alpha:]]", r"[\d-z]", "\\", r"\ud800", r"\u12"),
        "(" * 60 + "a" + ")" * 60,
    ],
)
def test_what_is_not_regular_or_not_clear_is_refused(pattern: str) -> None:
    with pytest.raises(ConstraintError, match=r"^here: "):
        read_pattern(pattern, "here")


@given(node=NODES, text=st.text("abc", max_size=6))
def test_without_empty_takes_the_empty_text_alone_away(node: Node, text: str) -> None:
    filled = without_empty(node)

    got = filled is not None and re.fullmatch(render(filled), text) is not None

    assert got == (text != "" and re.fullmatch(render(node), text) is not None)


def test_patterns_are_taken_up_to_their_limits() -> None:
    assert read_pattern("a" * MAX_PATTERN_BYTES, "p")
    assert num_copies(read_pattern("(?:a{100}){100}", "p")) == MAX_COPIES

    for beyond in ("a" * (MAX_PATTERN_BYTES + 1), "(?:a{100}){100}b{10001}", "é" * 1025):
        with pytest.raises(ConstraintError, match="at most"):
            read_pattern(beyond, "p")


def test_within_json_leaves_out_what_an_escape_would_spell() -> None:
    inside = within_json(read_pattern('[^a]|"|x"*y', "p"))

    assert inside is not None
    assert not re.search(
        r'["\\\x00-\x1f]',
        "".join(filter(re.compile(render(inside)).fullmatch, map(chr, range(128)))),
    )
    assert re.fullmatch(render(inside), "xy")
    assert within_json(read_pattern('a"b', "p")) is None


@pytest.mark.parametrize("pattern", ["(.|.)*x", "(.|a)*x", "(a|.|a)*x", "(.)*x"])
def test_single_characters_of_a_choice_become_one_class(pattern: str) -> None:
    assert render(read_pattern(pattern, "p")) == render(read_pattern(".*x", "p"))


def test_other_options_of_a_choice_stay() -> None:
    assert render(read_pattern("a|bc|[b-d]|", "p")) == "[a-d]|bc|"
