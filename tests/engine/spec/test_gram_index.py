"""The index of n-grams equals a scan of the text, and its costs are bounded.

Costs are counted, in entries and look-ups, and measured in bytes; no test measures time.
"""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.spec.gram_index import GRAMS_PER_WORK, GramIndex, IndexedText, gram_bytes

MIB = 2**20


def scanned(text: list[int], tail: list[int], shortest: int, longest: int) -> int | None:
    """Return what `find` returns, by comparing every position."""
    for size in range(min(longest, len(tail)), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == tail[-size:]:
                return end
    return None


texts = st.lists(st.integers(0, 3), max_size=60)


@given(texts, st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8), st.data())
def test_find_equals_a_scan_while_the_text_grows(
    text: list[int], parts: list[list[int]], data: st.DataObject
) -> None:
    shortest = data.draw(st.integers(1, 3))
    longest = data.draw(st.integers(shortest, 6))
    index = GramIndex(shortest, longest, MIB)
    index.add(0, text)
    index.work()
    for part in parts:
        index.extend(0, part)
        text = text + part
        found = index.get(0)
        assert found is not None
        assert found.token_ids == text
        assert found.find(text[-longest:]) == scanned(text, text, shortest, longest)
        elsewhere = data.draw(texts)
        assert found.find(elsewhere) == scanned(text, elsewhere, shortest, longest)


@given(texts, st.integers(1, 20))
def test_a_text_indexed_in_parts_and_segments_is_the_same(text: list[int], most: int) -> None:
    found = IndexedText(2, 4, text, segment_grams=7)
    while not found.is_indexed:
        assert found.index(most) <= most + 3
    assert found.find(text[-4:]) == scanned(text, text, 2, 4)


def long_texts() -> dict[str, list[int]]:
    draw = random.Random(0)
    return {
        "one id": [7] * 100_000,
        "random": [draw.randrange(50_000) for _ in range(100_000)],
        "all pairs": [draw.randrange(316) for _ in range(100_000)],
        "period": [i % 97 for i in range(100_000)],
    }


@pytest.mark.parametrize("name", ["one id", "random", "all pairs", "period"])
def test_work_and_look_ups_on_a_long_text_are_bounded(name: str) -> None:
    text = long_texts()[name]
    index = GramIndex(2, 5, 64 * MIB)
    index.add(0, text)
    steps = [index.work()]
    while steps[-1]:
        assert steps[-1] <= GRAMS_PER_WORK + 4
        steps.append(index.work())
    found = index.get(0)
    assert found is not None
    assert found.is_indexed
    assert found.num_segments * 4 <= 4 * 64  # look-ups of one `find`
    assert found.find(text[-5:]) == scanned(text, text, 2, 5)


@pytest.mark.parametrize("longest", [3, 8])
def test_entries_stay_within_the_limit_of_bytes(longest: int) -> None:
    draw = random.Random(1)
    text = [draw.randrange(150_000) for _ in range(10_000)]
    limit = MIB
    tracemalloc.start()
    try:
        index = GramIndex(2, longest, limit)
        index.add(0, text)
        tokens = tracemalloc.get_traced_memory()[0]
        while index.work():
            assert index.num_grams * gram_bytes(longest) <= limit
        assert tracemalloc.get_traced_memory()[0] - tokens <= limit
    finally:
        tracemalloc.stop()
    assert index.num_grams > 0.5 * limit / gram_bytes(longest)


def test_a_long_text_does_not_push_out_a_short_one() -> None:
    index = GramIndex(2, 4, MIB)
    index.add(0, [1, 2, 3, 4])
    index.work()
    index.add(1, list(range(100_000)))
    while index.work():
        pass
    short = index.get(0)
    assert short is not None
    assert short.find([1, 2, 3]) == 3


def test_removing_all_texts_frees_all_entries() -> None:
    index = GramIndex(2, 4, MIB)
    for key in range(3):
        index.add(key, [1, 2, 3, 4, 5])
    index.work()
    index.add(2, [1, 2])
    for key in (0, 1, 2, 2):
        index.remove(key)
    assert index.work() == 18  # freed
    assert index.num_grams == 0
    assert index.work() == 0


def test_a_removed_text_is_freed_a_part_at_a_time() -> None:
    index = GramIndex(2, 4, 64 * MIB)
    index.add(0, list(range(20_000)))
    while index.work():
        pass
    left = [index.num_grams]
    index.remove(0)
    while left[-1]:
        index.work()
        left.append(index.num_grams)
        assert 0 < left[-2] - left[-1] <= GRAMS_PER_WORK
