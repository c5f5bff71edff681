"""Looking for stop texts takes time that grows with the text and no faster: 1 k to 1 M characters.

The time is the thread's own, and the measure is coarse: work that grows by the square would be
twenty times over it.
"""

from __future__ import annotations

import time

import pytest

from remora.engine.tokens.detokenizer import Detokenizer
from remora.engine.tokens.stops import StopTexts
from remora.engine.tokens.tokenizer import Tokenizer
from tests.thinned import thinned
from tests.tiny_models import make_tiny_tokenizer

SIZES = (1_000, 50_000, 1_000_000)
GROWTH, SLACK, FLOOR_S = SIZES[-1] / SIZES[-2], 4.0, 0.02


def check(took_s: list[float]) -> None:
    assert took_s[2] <= max(took_s[1], FLOOR_S) * GROWTH * SLACK, took_s


HOSTILE = [
    (("a" * 255 + "b",), (), "a"),
    (tuple("a" * n + "b" for n in range(1, 17)), (), "aa"),
    (("ab" * 127 + "c",), (), "ab"),
    ((), ("(a|a|aa){1,100}b",), "a"),
    ((), ("a{0,20}a{0,20}a{0,20}b",), "a"),
    ((), ("[a-z]{1,200}!",), "a"),
    ((), ("(x|aa?|a[ab]c?){100}",), "aab!"),
]


@pytest.mark.parametrize(
    ("stops", "patterns", "unit", "chunk"),
    thinned([(*case, chunk) for case in HOSTILE for chunk in (4, 1000)], 3),
)
def test_stop_texts_are_looked_for_in_linear_time(
    stops: tuple[str, ...], patterns: tuple[str, ...], unit: str, chunk: int
) -> None:
    took_s = []
    for size in SIZES:
        finder = StopTexts(stops, patterns, include=False)
        text = unit * (size // len(unit))
        started = time.thread_time()
        shown = [finder.push(text[i : i + chunk])[0] for i in range(0, len(text), chunk)]
        took_s.append(time.thread_time() - started)
        assert "".join(shown) + finder.finish() == text
    check(took_s)


@pytest.mark.parametrize("text", ["a", "\ud7ff", "🙂", " ", "\n", "�"])
def test_tokens_become_text_in_linear_time(text: str) -> None:
    tokenizer = Tokenizer(make_tiny_tokenizer())
    ids = tokenizer.encode(text, add_special_tokens=False)
    took_s = []
    for size in SIZES:
        detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=True)
        many = ids * (size // 10 // len(ids))
        started = time.thread_time()
        for token_id in many:
            detokenizer.push((token_id,))
        detokenizer.finish()
        took_s.append(time.thread_time() - started)
    check(took_s)
