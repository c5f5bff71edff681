"""Pieces of text add up to the text of the whole, whatever the ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.tokens.detokenizer import PATIENT_FROM_TOKENS, REPLACEMENT, Detokenizer
from remora.engine.tokens.tokenizer import Tokenizer
from tests.engine.tokens.vocabularies import make_sentencepiece
from tests.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

TINY = Tokenizer(make_tiny_tokenizer())
FRAGMENTS = (
    "Hello",
    " world",
    "  ",
    "\n",
    "é",
    "ß",
    "你好",
    "、",
    "🙂",
    "👩‍👩‍👧",
    "ก็",
    "กำลัง",
    "�",
    "<|im_end|>",
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def ids_of(text: str) -> list[int]:
    return TINY.encode(text, add_special_tokens=False)


HELLO = ids_of("Hello")


def stream(
    tokenizer: Tokenizer,
    prompt: list[int],
    ids: list[int],
    *,
    step: int = 1,
    skip: bool = False,
    heals: bool = False,
) -> tuple[list[str], str]:
    """Return the pieces and what was flushed at the end."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip, heals=heals)
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return pieces, detokenizer.finish()


@settings(deadline=None)
@given(ids=IDS, step=st.integers(1, 5), skip=st.booleans())
def test_pieces_of_any_ids_add_up(ids: list[int], step: int, skip: bool) -> None:
    pieces, rest = stream(TINY, [], ids, step=step, skip=skip)

    assert "".join(pieces) + rest == TINY.decode(ids, skip_special_tokens=skip)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)


@pytest.mark.parametrize("tokenizer", [TINY, make_sentencepiece()], ids=["bytes", "sentencepiece"])
@given(prompt=TEXTS.filter(bool), text=TEXTS, step=st.integers(1, 3))
def test_a_healed_token_is_not_shown_again(
    tokenizer: Tokenizer, prompt: str, text: str, step: int
) -> None:
    prompt_ids = tokenizer.encode("a b" + prompt, add_special_tokens=False)
    ids = [prompt_ids[-1], *tokenizer.encode(text, add_special_tokens=False)]

    pieces, rest = stream(tokenizer, prompt_ids, ids, step=step, heals=True)

    plain, plain_rest = stream(tokenizer, prompt_ids, ids[1:], step=step)
    assert "".join(pieces) + rest == "".join(plain) + plain_rest


def test_a_longer_token_in_place_of_a_healed_one_shows_the_difference() -> None:
    detokenizer = Detokenizer(TINY, [*HELLO, *ids_of(" w")], skip_special_tokens=True, heals=True)

    pieces = [detokenizer.push([token_id]) for token_id in ids_of(" world")]

    assert "".join(pieces) + detokenizer.finish() == "orld"


@pytest.mark.parametrize("shows", [False, True])
def test_control_tokens_that_are_to_be_shown_are_shown(shows: bool) -> None:
    end, start = ids_of("<|im_end|>")[0], ids_of("<|im_start|>")[0]
    detokenizer = Detokenizer(
        TINY,
        [],
        skip_special_tokens=True,
        shown_special_ids=frozenset({end}) if shows else frozenset(),
    )

    text = detokenizer.push([*HELLO, start, end]) + detokenizer.finish()

    assert text == ("Hello<|im_end|>" if shows else "Hello")


@settings(deadline=None)
@given(prompt=TEXTS, text=TEXTS, step=st.integers(1, 3))
def test_pieces_after_a_prompt_add_up_to_the_text(prompt: str, text: str, step: int) -> None:
    prompt_ids = TINY.encode(prompt, add_special_tokens=False)
    ids = TINY.encode(text, add_special_tokens=False)

    pieces, rest = stream(TINY, prompt_ids, ids, step=step)

    assert "".join(pieces) + rest == text


@settings(deadline=None, max_examples=50)
@given(text=TEXTS.filter(lambda text: REPLACEMENT not in text), cut=st.integers(0, 200))
def test_a_character_begun_in_the_prompt_is_completed_in_the_output(text: str, cut: int) -> None:
    ids = TINY.encode("a" + text, add_special_tokens=False)
    cut %= len(ids)
    begun = len(b"".join(map(TINY.token_bytes, ids[:cut])).decode("utf-8", "ignore"))

    pieces, rest = stream(TINY, ids[:cut], ids[cut:])

    assert "".join(pieces) + rest == ("a" + text)[begun:]


@settings(deadline=None, max_examples=30)
@given(
    ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=40),
    text=TEXTS,
    skip=st.booleans(),
)
def test_pieces_add_up_with_a_real_vocabulary(
    real: Tokenizer, ids: list[int], text: str, skip: bool
) -> None:
    encoded = real.encode(text, add_special_tokens=False)

    pieces, rest = stream(real, real.encode("A prompt:", add_special_tokens=False), ids, skip=skip)
    text_pieces, text_rest = stream(real, [], encoded)

    assert "".join(pieces) + rest == real.decode(ids, skip_special_tokens=skip)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)
    assert "".join(text_pieces) + text_rest == text


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(["▁Hello", "▁world", "ing", "▁", "é", "你", "🙂"]), max_size=15)
)
def test_spaces_and_byte_tokens_of_sentencepiece_survive(words: list[str]) -> None:
    tokenizer = make_sentencepiece()
    names = tokenizer._backend.get_vocab()
    ids = [
        token_id
        for word in words
        for token_id in (
            [names[word]] if word in names else [names[f"<0x{b:02X}>"] for b in word.encode()]
        )
    ]

    pieces, rest = stream(tokenizer, [names["▁Hello"]], ids)

    assert "".join(pieces) + rest == "".join(words).replace("▁", " ")


def test_an_incomplete_character_is_held_and_flushed_at_the_end() -> None:
    ids = TINY.encode("🦈", add_special_tokens=False)

    pieces, rest = stream(TINY, [], ids[:-1])

    assert len(ids) > 1
    assert "".join(pieces) == ""
    assert set(rest) == {REPLACEMENT}


@pytest.mark.parametrize("kind", ["garbage", "control"])
def test_work_grows_linearly_however_long_nothing_can_be_shown(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_byte = TINY.encode("é", add_special_tokens=False)[0]
    ids = ([lead_byte] if kind == "garbage" else sorted(TINY.special_ids)[:1]) * 4000
    sizes: list[int] = []
    decode = TINY.decode

    def counting_decode(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        sizes.append(len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(TINY, "decode", counting_decode)

    pieces, _ = stream(TINY, [], ids, skip=True)

    assert not any(pieces)
    assert sum(sizes) < PATIENT_FROM_TOKENS**2 + 4 * len(ids)
