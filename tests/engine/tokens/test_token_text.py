"""Tokens by their bytes, against a look at every one of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora.engine.tokens.token_text import Spellings

SPELLINGS = st.lists(st.binary(max_size=4) | st.sampled_from([b"a", b"ab", b"\xff"]), max_size=30)


@given(spellings=SPELLINGS, prefix=st.binary(min_size=1, max_size=4), special=st.integers(0, 30))
def test_tokens_that_start_a_text_are_those_that_agree_with_its_beginning(
    spellings: list[bytes], prefix: bytes, special: int
) -> None:
    vocabulary = Spellings(len(spellings), spellings.__getitem__, frozenset({special}))

    found = vocabulary.starting(prefix)

    assert sorted(found) == [
        token_id
        for token_id, spelling in enumerate(spellings)
        if spelling
        and token_id != special
        and (spelling.startswith(prefix) or prefix.startswith(spelling))
    ]


@given(data=st.binary(min_size=1, max_size=12))
def test_any_bytes_are_spelled_where_there_is_a_token_for_each(data: bytes) -> None:
    spellings = [bytes([byte]) for byte in range(256)] + [data[:3], data[1:4], b"\x00\x00"]
    vocabulary = Spellings(len(spellings), spellings.__getitem__)

    token_ids = vocabulary.spell(data)

    assert token_ids is not None
    assert b"".join(spellings[token_id] for token_id in token_ids) == data


def test_what_has_no_spelling_is_not_spelled() -> None:
    vocabulary = Spellings(2, [b"a", b"b"].__getitem__)

    assert vocabulary.spell(b"abc") is None
    assert vocabulary.spell(b"aba") == [0, 1, 0]


def test_tokens_are_sorted_once() -> None:
    asked: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        asked.append(token_id)
        return b"a"

    vocabulary = Spellings(3, token_bytes)
    vocabulary.prepare()
    vocabulary.starting(b"a")

    assert asked == [0, 1, 2]
