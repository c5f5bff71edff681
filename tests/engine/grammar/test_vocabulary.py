"""Which tokens a grammar may use."""

from __future__ import annotations

import numpy as np
import pytest

from remora.configs.errors import EngineError
from remora.engine.grammar.vocabulary import EndMask, Vocabulary
from remora.engine.tokens.tokenizer import Tokenizer
from tests.engine.tokens.vocabularies import make_sentencepiece


def bytes_of(tokenizer: Tokenizer, text: str) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == text.encode())


def test_ends_and_padding_stand_for_nothing() -> None:
    tokenizer = make_sentencepiece()
    hello = bytes_of(tokenizer, " Hello")

    vocabulary = Vocabulary.of(
        tokenizer, vocab_size=tokenizer.vocab_size + 5, end_ids=(hello, 10**6)
    )

    assert vocabulary.size == tokenizer.vocab_size + 5
    assert vocabulary.end_ids == (hello,)
    assert vocabulary.tokens[hello] == b""
    assert vocabulary.tokens[-5:] == (b"",) * 5
    assert vocabulary.tokens[1:257] == tuple(bytes([byte]) for byte in range(256))


def test_control_tokens_are_hidden_unless_named(smollm2_path: object) -> None:
    tokenizer = Tokenizer.load(smollm2_path)  # type: ignore[arg-type]
    first, second, *_ = sorted(tokenizer.special_ids - set(tokenizer.eos_token_ids))

    vocabulary = Vocabulary.of(
        tokenizer,
        vocab_size=tokenizer.vocab_size,
        end_ids=tokenizer.eos_token_ids,
        marker_ids=(first,),
    )

    assert vocabulary.tokens[first] == tokenizer.token_bytes(first) != b""
    assert vocabulary.tokens[second] == b""


def test_a_vocabulary_survives_the_way_to_another_process() -> None:
    vocabulary = Vocabulary(tokens=(b"\xff", b"", "é".encode()), end_ids=(1,))

    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


def test_masks_of_ends_cover_all_words() -> None:
    ends = EndMask(Vocabulary(tokens=(b"x",) * 70, end_ids=(0, 69)))
    words = np.full(3, -1, np.int32)

    ends.trim(words)

    assert np.flatnonzero(np.unpackbits(ends.words.view(np.uint8), bitorder="little")).tolist() == [
        0,
        69,
    ]
    assert np.unpackbits(words.view(np.uint8)).sum() == 70


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(EngineError, match="end-of-sequence"):
        EndMask(Vocabulary(tokens=(b"x",), end_ids=()))
