"""Grammars that are slow to follow are refused, or end their own sequence only."""

from __future__ import annotations

import time

import pytest

from remora.engine.grammar import matching, trial
from remora.engine.grammar.constraint import ConstraintError, ConstraintKind
from remora.engine.grammar.matching import BaseMatcher
from remora.engine.grammar.trial import try_out
from remora.engine.grammar.vocabulary import EndMask
from remora.engine.types import MaskWords, MatcherTooSlow
from tests.engine.grammar.walks import BACKENDS, BYTES, make_grammar


def work(seconds: float) -> None:
    """Keep the processor busy."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class SlowMatcher(BaseMatcher):
    """A grammar and its matcher, which takes its time for each mask from the third on."""

    num_bytes = 1

    def __init__(self, mask_s: float, step_s: float = 0.0) -> None:
        super().__init__(EndMask(BYTES))
        self.num_steps = 0
        self._mask_s, self._step_s = mask_s, step_s

    def matcher(self) -> SlowMatcher:
        return self

    def _may_end(self) -> bool:
        return False

    def _advance(self, token_id: int) -> bool:
        self.num_steps += 1
        work(self._step_s)
        return True

    def _undo(self, num_tokens: int) -> None:
        self.num_steps -= num_tokens

    def _write(self, words: MaskWords) -> None:
        words.fill(-1)
        if self.num_steps >= 2:
            work(self._mask_s)


@pytest.mark.parametrize(("mask_s", "step_s"), [(0.05, 0.0), (0.0, 0.05)])
def test_a_grammar_that_is_slow_somewhere_is_refused(mask_s: float, step_s: float) -> None:
    with pytest.raises(ConstraintError, match="takes too long"):
        try_out(SlowMatcher(mask_s, step_s), BYTES.size)


def test_larger_vocabularies_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trial, matching):
        monkeypatch.setattr(module, "TOKENS_OF_BUDGET", BYTES.size / 10)

    try_out(SlowMatcher(0.05), BYTES.size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quick_grammar_is_not_refused(backend: str) -> None:
    grammar = make_grammar(backend, ConstraintKind.REGEX, "[a-z]{1,99}( [0-9]+)*")

    try_out(grammar, BYTES.size)


def test_a_grammar_of_no_text_is_refused() -> None:
    grammar = make_grammar("xgrammar", ConstraintKind.EBNF, "root ::= root")

    with pytest.raises(ConstraintError, match="no text"):
        try_out(grammar, BYTES.size)


def test_a_sequence_that_takes_too_long_for_each_token_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching, "RESERVE_S", 0.08)
    matcher = SlowMatcher(0.03)
    words = EndMask(BYTES).words.copy()

    def go_on() -> None:
        for _ in range(20):
            matcher.fill(words)
            assert matcher.accept(1)

    with pytest.raises(MatcherTooSlow):
        go_on()

    # Two are quick; of the others each takes 0.02 s more than it is given.
    assert 4 <= matcher.num_steps <= 7


def test_a_sequence_may_be_slow_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "RESERVE_S", 0.08)
    monkeypatch.setattr(matching, "TOKEN_S", 0.05)
    matcher = SlowMatcher(0.03)
    words = EndMask(BYTES).words.copy()

    for _ in range(12):
        matcher.fill(words)
        assert matcher.accept(1)


def test_time_spent_on_what_is_taken_back_is_not_the_sequence_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching, "RESERVE_S", 0.08)
    matcher = SlowMatcher(0.0, step_s=0.03)

    for _ in range(6):
        position = matcher.save()
        for token_id in (1, 2):
            assert matcher.accept(token_id)
        matcher.restore(position)

    assert matcher.num_steps == 0
