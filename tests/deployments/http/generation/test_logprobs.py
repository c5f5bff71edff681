"""Log-probabilities in each dialect."""

from __future__ import annotations

import pytest

from remora.deployments.http.generation.logprobs import TextOffsets
from remora.engine.tokens.tokenizer import Tokenizer
from tests.engine.tokens.vocabularies import make_sentencepiece
from tests.tiny_models import make_tiny_tokenizer

BYTES = Tokenizer(make_tiny_tokenizer())
BOS, EOS = (
    BYTES.encode(text, add_special_tokens=False)[0] for text in ("<|im_start|>", "<|im_end|>")
)


def token_starts(ids: list[int]) -> list[int]:
    """Return the number of complete characters before each token."""
    texts = (b"".join(map(BYTES.token_bytes, ids[:end])) for end in range(len(ids)))
    return [len(text.decode("utf-8", "ignore")) for text in texts]


@pytest.mark.parametrize("text", ["é🙂 x", "plain words", "日本 語"])
def test_offsets_count_characters_of_the_echo_and_of_the_output(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False)
    offsets = TextOffsets(BYTES, shows_special=False)

    assert offsets.of_prompt(ids, text) == token_starts(ids)
    assert offsets.of_output(ids) == [len(text) + start for start in token_starts(ids)]


def test_a_character_may_be_spread_over_prompt_and_outputs() -> None:
    ids = BYTES.encode("🙂", add_special_tokens=False)
    assert len(ids) == 3
    offsets = TextOffsets(BYTES, shows_special=False)

    assert offsets.of_prompt(ids[:1], "\ufffd") == [0]
    assert offsets.of_output(ids[1:2]) + offsets.of_output((ids[2], ids[0])) == [1, 1, 2]


def test_a_bos_counts_only_where_the_echo_shows_it() -> None:
    ids = [BOS, *BYTES.encode("ab", add_special_tokens=False)]
    bos = BYTES.token_text(BOS)

    hidden = TextOffsets(BYTES, shows_special=False).of_prompt(ids, "ab")
    shown = TextOffsets(BYTES, shows_special=False).of_prompt(ids, bos + "ab")

    assert hidden[:2] == [0, 0]
    assert shown[:2] == [0, len(bos)]


@pytest.mark.parametrize("shows_special", [False, True])
def test_special_tokens_of_the_output_count_when_they_are_shown(shows_special: bool) -> None:
    offsets = TextOffsets(BYTES, shows_special=shows_special)
    width = len(BYTES.token_text(EOS)) if shows_special else 0
    assert offsets.of_output([EOS, EOS]) == [0, width]


def test_a_space_that_the_tokenizer_put_in_front_is_not_in_the_echo() -> None:
    tokenizer = make_sentencepiece()
    ids = [id_ for id_ in range(tokenizer.vocab_size) if len(tokenizer.token_text(id_)) == 6]
    assert [tokenizer.token_text(id_) for id_ in ids] == [" Hello", " world"]

    assert TextOffsets(tokenizer, shows_special=False).of_prompt(ids, "Hello world") == [0, 5]
