"""Both backends hold a model to the same things."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from remora.engine.grammar.prepare import prepare
from remora.engine.types import Forkable, Reversible
from tests.engine.grammar.schemas import SCHEMAS
from tests.engine.grammar.walks import (
    BACKENDS,
    BYTES,
    END,
    OTHER_END,
    accepts,
    allowed,
    make_grammar,
    vocabulary_of,
    walk,
    walks,
)
from tests.thinned import thinned

K = ConstraintKind
S: dict[str, Any] = {"type": "string"}
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def schema_grammar(backend: str, schema: Any, **more: Any) -> Any:
    return make_grammar(backend, K.JSON_SCHEMA, json.dumps(schema), **more)


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        (S, ['"a"', '"é\\n\\"日"', '""'], ["a", '"\n"', '"a', '"\\x"', '"\x00"']),
        (S | {"minLength": 2, "maxLength": 3}, ['"ab"', '"日本語"'], ['"a"', '"abcd"', '"a\x01"']),
        (S | {"pattern": "^(?:a[0-9]+)?Z$"}, ['"Z"', '"a12Z"'], ['"1Z"', '"12Z"', '"aZ"']),
        (S | {"pattern": "b{1,2}|b|c"}, ['"b"', '"bb"', '"c"'], ['"bbb"', '""']),
        (S | {"format": "date"}, ['"2024-02-28"'], ['"2024-02-30"', '"2024-13-01"', '"x"']),
        (S | {"format": "time"},
         ['"12:30:00Z"', '"12:30:00.5+01:00"'], ['"12:30"', '"12:30:00123Z"']),
        (S | {"format": "ipv6"}, ['"::1"', '"fe80::1:2"'], ['"1"', '":::"']),
        (S | {"format": "duration"}, ['"P3D"', '"PT1H30M"'], ['"P"', '"PT"', '"3D"']),
        ({"type": "integer"}, ["0", "-12", "345"], ["01", "1.5", "--1", ""]),
        ({"type": "integer", "minimum": 5, "maximum": 120}, ["5", "99", "120"], ["4", "121", "05"]),
        ({"type": "number"}, ["0", "-1.5", "2e10", "-0.5"], [".5", "1.", "+1", "NaN"]),
        ({"type": "boolean"}, ["true", "false"], ["null", "True"]),
        ({"enum": ["ß€", 1, None, {"ä": [1, 2]}]}, ['"ß€"', "1", "null", '{"ä":[1,2]}'], ["2"]),
        ({"properties": {"größe": S, "ße": S}, "required": ["größe"]},
         ['{"größe":"a"}', '{"größe":"a","ße":"b"}'], ['{"ße":"b"}', "{}", '{"größe":"a",}']),
        ({"properties": {"a": S, "b": S, "c": S}, "required": ["b"]},
         ['{"b":""}', '{"a":"","b":""}', '{"b":"","c":""}', '{"a":"","b":"","c":""}'],
         ['{"a":""}', "{}", '{"c":""}', '{"b":"","a":""}', '{"b":"" "c":""}']),
        ({"properties": {"a": S, "b": S}},
         ["{}", '{"a":""}', '{"b":""}'], ['{"c":""}', '{,"b":""}']),
        ({"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
         ["{}", '{"x":null}', '{"x":null,"y":null}'], ['{"x":1}', '{"x":null,"y":null,"z":null}']),
        ({"patternProperties": {"^x[ab]$": {"type": "null"}}},
         ["{}", '{"xa":null}'], ['{"y":null}']),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
         ["[null]", "[null,null]"], ["[]", "[null,null,null]", "[1]"]),
        ({"type": "array", "prefixItems": [S, {"type": "null"}]},
         ["[]", '[""]', '["",null]'], ["[null]", '["",null,1]']),
        ({"type": "array", "prefixItems": [S], "items": {"type": "null"}, "minItems": 2},
         ['["",null]', '["",null,null]'], ['[""]', "[]"]),
        ({"type": "array", "items": S, "maxItems": 0}, ["[]"], ['[""]']),
        ({"anyOf": [S, {"type": "null"}]}, ['""', "null"], ["1"]),
        # Whitespace is free but bounded.
        ({"properties": {"a": {"items": S}}, "required": ["a"]},
         ['{ "a" :\n\t[ "x" , "y" ]\r\n}'], ['{"a":' + " " * 100 + "[]}"]),
        # Strings are UTF-8.
        *((S | more, [b'"\xed\x9f\xbf\xf4\x8f\xbf\xbf"'],
           [b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"'])
          for more in ({}, {"maxLength": 5}, {"pattern": "^[^a]*$"})),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}, {"maxLength": 2}], "$defs": {"a/b": S}},
         ['"ab"'], ['"abc"', "1"]),
    ],
)  # fmt: skip
def test_a_schema_tells_values_from_others(
    backend: str, schema: Any, values: list[str | bytes], others: list[str | bytes]
) -> None:
    grammar = schema_grammar(backend, schema)

    assert [value for value in values if not accepts(grammar, value)] == []
    assert [value for value in others if accepts(grammar, value)] == []


@pytest.mark.observes("grammar.json_compact")
def test_compact_json_has_no_whitespace(backend: str) -> None:
    schema = {
        "properties": {"a": {"items": S}, "b": {"enum": [{"c": [1, 2]}]}},
        "required": ["a", "b"],
    }
    grammar = schema_grammar(backend, schema, is_compact=True)

    assert accepts(grammar, '{"a":["x","y"],"b":{"c":[1,2]}}')
    assert not accepts(grammar, '{"a": ["x","y"],"b":{"c":[1,2]}}')
    assert not accepts(grammar, '{"a":["x", "y"],"b":{"c":[1,2]}}')


def test_a_choice_may_begin_like_another(backend: str) -> None:
    grammar = make_grammar(backend, K.CHOICE, '["yes", "yes please", "né\\"n"]')

    assert set(walks(grammar, 40)) == {"yes", "yes please", 'né"n'}
    assert not accepts(grammar, "yes ")


def test_masks_hold_exactly_the_tokens_that_fit(backend: str) -> None:
    matcher = make_grammar(backend, K.REGEX, "(?:hello|日本)+").matcher()
    token_of = {token: token_id for token_id, token in enumerate(BYTES.tokens) if token}

    assert allowed(matcher) == {
        token_of[text] for text in (b"h", b"hello", b"\xe6", "日本".encode(), "日".encode()[:2])
    }

    assert matcher.accept(token_of["日".encode()[:2]])
    assert allowed(matcher) == {token_of["日".encode()[2:]]}
    assert not matcher.is_complete


def test_both_ends_are_allowed_where_a_match_is_whole(backend: str) -> None:
    matcher = make_grammar(backend, K.REGEX, "ab?").matcher()

    assert END not in allowed(matcher)
    assert not matcher.accept(END)
    assert matcher.accept(ord("a"))
    assert allowed(matcher) == {END, OTHER_END, ord("b")}
    before, accepted, after = matcher.is_complete, matcher.accept(ord("b")), matcher.is_complete
    assert (before, accepted, after) == (False, True, True)
    assert matcher.accept(OTHER_END)


def test_after_the_end_only_the_end_is_allowed(backend: str) -> None:
    matcher = make_grammar(backend, K.REGEX, "a+").matcher()
    matcher.accept(ord("a"))

    assert matcher.accept(END)

    assert matcher.is_complete
    assert allowed(matcher) == {END, OTHER_END}
    assert not matcher.accept(ord("a"))
    assert matcher.accept(OTHER_END)


def test_the_empty_text_may_match(backend: str) -> None:
    grammar = make_grammar(backend, K.REGEX, "(?:ab)*")

    assert accepts(grammar, "")
    assert accepts(grammar, "abab")
    assert allowed(grammar.matcher()) >= {END, OTHER_END, ord("a")}
    assert not grammar.matcher().is_complete


@pytest.mark.parametrize("token_id", [-1, ord("b"), len(BYTES.tokens) - 1, 10**6, 2**40])
def test_a_token_that_does_not_fit_changes_nothing(backend: str, token_id: int) -> None:
    matcher = make_grammar(backend, K.REGEX, "ac").matcher()
    before = allowed(matcher)

    assert not matcher.accept(token_id)

    assert allowed(matcher) == before
    assert matcher.accept(ord("a"))


def test_bits_beyond_the_vocabulary_stay_clear(backend: str) -> None:
    matcher = make_grammar(backend, K.REGEX, r"(?:.|\n)*").matcher()
    words = np.full(BYTES.num_words, -1, np.int32)

    matcher.fill(words)

    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert BYTES.size % 32 != 0
    assert not bits[BYTES.size :].any()
    hidden = [i for i, token in enumerate(BYTES.tokens) if not token and i not in BYTES.end_ids]
    assert not bits[hidden].any()


@pytest.mark.parametrize("source", ["(?:ab?c|\u00e9+|12){0,9}x?", "a*", "(?:hello|true)+"])
def test_a_matcher_goes_back_as_if_nothing_had_come(backend: str, source: str) -> None:
    grammar = make_grammar(backend, K.REGEX, source)
    rng, tried, other = random.Random(source), grammar.matcher(), grammar.matcher()
    assert isinstance(tried, Reversible)
    for _ in range(30):
        position = tried.save()
        for _ in range(rng.randrange(7)):
            assert tried.accept(rng.choice(sorted(allowed(tried))))  # ends too
        tried.restore(position)

        assert tried.is_complete == other.is_complete
        assert allowed(tried) == allowed(other)
        if going_on := sorted(allowed(other) - {END, OTHER_END}):
            token_id = rng.choice(going_on)
            assert tried.accept(token_id)
            assert other.accept(token_id)


@pytest.mark.parametrize("source", ["(?:ab?c|\u00e9+|12){0,9}x?", "a*", "(?:hello|true)+"])
def test_a_fork_goes_on_as_what_has_read_the_same_and_leaves_its_origin_alone(
    backend: str, source: str
) -> None:
    grammar = make_grammar(backend, K.REGEX, source)
    rng, matcher = random.Random(source), grammar.matcher()
    if backend == "outlines":
        assert not isinstance(matcher, Forkable)
        return
    read: list[int] = []
    for _ in range(12):
        assert isinstance(matcher, Forkable)
        forked = matcher.fork()
        again = grammar.matcher()
        assert all(map(again.accept, read))
        for _ in range(4):
            assert (forked.is_complete, allowed(forked)) == (again.is_complete, allowed(again))
            token_id = rng.choice(sorted(allowed(again)))
            assert forked.accept(token_id)
            assert again.accept(token_id)
        if not (going_on := sorted(allowed(matcher) - {END, OTHER_END})):
            break
        read.append(rng.choice(going_on))
        assert matcher.accept(read[-1])


def test_matchers_of_one_grammar_go_their_own_ways(backend: str) -> None:
    grammar = make_grammar(backend, K.REGEX, "a(?:b|c)")
    first, second = grammar.matcher(), grammar.matcher()

    assert first.accept(ord("a"))

    assert allowed(second) == {ord("a"), BYTES.tokens.index(b"ab")}
    assert allowed(first) == {ord("b"), ord("c")}
    assert grammar.num_bytes > 0


@pytest.mark.parametrize("number", range(0, len(SCHEMAS), 5))
def test_every_walk_through_a_schema_validates(backend: str, number: int) -> None:
    check_schema(backend, number, BYTES, num_walks=3)


@pytest.mark.parametrize("number", thinned(((n,) for n in range(len(SCHEMAS))), 15))
def test_every_walk_with_real_tokens_validates(
    backend: str, number: int, smollm2_path: Any
) -> None:
    check_schema(backend, number, vocabulary_of(smollm2_path), num_walks=1)


def check_schema(backend: str, number: int, vocabulary: Any, *, num_walks: int) -> None:
    schema = SCHEMAS[number]
    source, is_compact = json.dumps(schema), number % 2 == 1
    if backend == "outlines" and not is_within_outlines(source):
        return
    grammar = make_grammar(backend, K.JSON_SCHEMA, source, vocabulary, is_compact=is_compact)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(num_walks):
        text = walk(grammar, seed, vocabulary)
        if text is not None:
            validator.validate(json.loads(text))


def is_within_outlines(source: str) -> bool:
    """Whether outlines takes a schema; what it refuses, it refuses by saying what can."""
    section = GrammarSection(backend="outlines")
    try:
        prepare(Constraint(kind=K.JSON_SCHEMA, source=source), section)
    except ConstraintError as error:
        if "xgrammar can" not in str(error):
            raise
        return False
    return True
