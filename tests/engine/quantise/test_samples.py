"""Calibration windows, and the check that they are not the text that is measured."""

from __future__ import annotations

import pytest

from remora.configs.errors import ConfigError
from remora.deployments.bench.quality import TEXT
from remora.engine.quantise.samples import overlaps, own_samples, text_windows
from remora.engine.tokens.tokenizer import Tokenizer
from tests.conftest import TinyCheckpoints
from tests.tiny_models import CORPUS


@pytest.mark.parametrize(
    ("shared", "expected"), [("a b c d e f g h", True), ("a b c d e f g", False)]
)
def test_eight_words_in_a_row_overlap(shared: str, expected: bool) -> None:
    assert overlaps(f"one {shared} two", f"three\n{shared}\nfour") is expected


def test_windows_are_spread_over_the_text(tiny_checkpoints: TinyCheckpoints) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoints("llama"))
    text = "\n".join(CORPUS * 3)
    ids = tokenizer.encode(text, add_special_tokens=False)

    windows = text_windows(tokenizer, text, 3, 20)

    opening = tokenizer.encode("", add_special_tokens=True)[:1]
    inside = 20 - len(opening)
    assert [len(window) for window in windows] == [20, 20, 20]
    assert windows[0] == [*opening, *ids[:inside]]
    assert windows[-1] == [*opening, *ids[-inside:]]


def test_windows_do_not_overlap_in_a_short_text(tiny_checkpoints: TinyCheckpoints) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoints("llama"))
    num_tokens = len(tokenizer.encode(CORPUS[0], add_special_tokens=False))

    assert len(text_windows(tokenizer, CORPUS[0], 64, num_tokens // 2)) == 2


def test_a_text_shorter_than_a_window_is_refused(tiny_checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(ConfigError, match="at least"):
        text_windows(Tokenizer.load(tiny_checkpoints("llama")), "Short.", 2, 64)


def test_own_samples_repeat_and_differ_from_each_other(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")

    first, second = (own_samples(path, 3, 24, TEXT.read_text()) for _ in range(2))

    assert first == second
    assert [len(window) for window in first] == [24, 24, 24]
    assert len({tuple(window) for window in first}) == 3


def test_samples_that_overlap_are_left_out(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    tokenizer = Tokenizer.load(path)
    made = own_samples(path, 3, 200, "")
    texts = [tokenizer.decode(window, skip_special_tokens=True) for window in made]
    repeated = next(text for text in texts if len(text.split()) > 20)

    kept = own_samples(path, 3, 200, " ".join(repeated.split()[5:15]))

    assert len(kept) < 3
