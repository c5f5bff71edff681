"""What the n-gram proposer proposes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.spec.gram_index import GRAMS_PER_WORK
from remora.engine.spec.ngram import NgramProposer, continuation
from remora.engine.types import Namespace

MIB = 2**20


def ngram(shortest: int = 2, longest: int = 4) -> NgramProposer:
    return NgramProposer(shortest=shortest, longest=longest, max_bytes=MIB)


def lists(drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(found) for found in drafts]


def test_the_longest_suffix_decides_and_then_the_newest_occurrence() -> None:
    proposer = ngram()
    proposer.begin(0, [1, 2, 3, 9, 2, 3, 8, 5, 2, 3, 7, 1, 2, 3], Namespace())
    proposer.begin(1, [2, 3, 9, 6, 2, 3, 8, 4, 2, 3], Namespace())
    assert lists(proposer.propose([(0, 2), (1, 2)])) == [[9, 2], [8, 4]]


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    proposer = ngram()
    proposer.begin(0, [5, 1, 2, 1, 2, 1, 2], Namespace())
    assert lists(proposer.propose([(0, 5)])) == [[1, 2, 1, 2, 1]]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.data())
def test_a_continuation_agrees_with_the_text_repeated(text: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    repeated = text[start:] * 30
    assert continuation(text, start, 25) == repeated[:25]


def test_output_is_searched_as_it_grows() -> None:
    proposer = ngram()
    proposer.begin(0, [1, 2, 3], Namespace())
    assert lists(proposer.propose([(0, 3)])) == [[]]
    proposer.extend(0, [4, 1, 2])
    assert lists(proposer.propose([(0, 2)])) == [[3, 4]]


def test_sequences_do_not_see_each_other() -> None:
    proposer = ngram()
    proposer.begin(0, [1, 2, 3, 4], Namespace())
    proposer.begin(1, [9, 1, 2], Namespace())
    assert lists(proposer.propose([(1, 4)])) == [[]]


@pytest.mark.parametrize("most", [0, -1])
def test_no_drafts_are_proposed_where_none_are_allowed(most: int) -> None:
    proposer = ngram()
    proposer.begin(0, [1, 2, 1, 2], Namespace())
    assert lists(proposer.propose([(0, most)])) == [[]]


def test_a_sequence_that_ended_has_no_drafts_and_can_begin_again() -> None:
    proposer = ngram()
    proposer.begin(0, [1, 2, 3, 1, 2], Namespace())
    proposer.end(0)
    proposer.end(0)
    proposer.extend(0, [1, 2])
    assert lists(proposer.propose([(0, 2)])) == [[]]
    proposer.begin(0, [7, 8, 9, 7, 8], Namespace())
    assert lists(proposer.propose([(0, 1)])) == [[9]]


def test_a_long_prompt_is_searched_once_it_is_indexed() -> None:
    proposer = ngram()
    proposer.begin(0, [*range(10_000), 9_000, 9_001], Namespace())
    assert lists(proposer.propose([(0, 2)])) == [[]]
    # Three n-grams end at each token.
    for _ in range(10_000 * 3 // GRAMS_PER_WORK + 2):
        proposer.propose([])
    assert lists(proposer.propose([(0, 2)])) == [[9_002, 9_003]]
