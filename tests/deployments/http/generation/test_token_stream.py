"""Texts of single tokens."""

from __future__ import annotations

from typing import Any

import pytest

from remora.deployments.http.generation.token_stream import TextToken, tokens_of

PIECES: dict[int, bytes] = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" bc", 9: b""}


class PieceTokenizer:
    special_ids = frozenset({9})

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def token_text(self, token_id: int) -> str:
        return "</s>" if token_id == 9 else PIECES[token_id].decode("utf-8", "replace")


def texts(ids: list[int], text: str) -> list[str]:
    tokenizer: Any = PieceTokenizer()
    return [token.text for token in tokens_of(tokenizer, ids, text)]


def test_each_token_has_its_own_part() -> None:
    assert texts([1, 4], "a bc") == ["a", " bc"]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    assert texts([1, 2, 3, 4], "aé bc") == ["a", "", "é", " bc"]


def test_a_special_token_is_told_by_name() -> None:
    assert texts([1, 9], "a") == ["a", "</s>"]


@pytest.mark.parametrize("text", ["", "a", "held back: a", "x"])
def test_the_texts_always_make_up_the_whole(text: str) -> None:
    assert "".join(texts([2, 1], text)) == text


def test_text_that_comes_with_a_special_token_alone_is_not_lost() -> None:
    tokenizer: Any = PieceTokenizer()
    assert tokens_of(tokenizer, [9], "late") == [TextToken(9, "late", is_special=False)]
