"""Pages of layers with a window, as a state machine against what each was filled with."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from remora.engine.kv.cache import KVCache, PageTable
from remora.engine.kv.window import NO_PAGE, WindowPages
from remora.engine.types import Namespace
from tests.engine.kv.test_cache import (
    BASE,
    NUM_PAGES,
    PAGE_SIZE,
    SALTS,
    TOKENS,
    Holder,
    PagesMachine,
)

NUM_WINDOW_PAGES, WINDOW = 12, 5


def make_cache(
    num_pages: int = 64,
    num_window_pages: int = 64,
    *,
    window: int = WINDOW,
    prefix_cache: bool = True,
) -> KVCache:
    windows = WindowPages(num_window_pages, window=window, page_size=PAGE_SIZE, row_pages=8)
    return KVCache(num_pages, page_size=PAGE_SIZE, prefix_cache=prefix_cache, windows=windows)


class WindowMachine(PagesMachine):
    """Any order of start, compute, slide, publish, release and flush."""

    def __init__(self) -> None:
        super().__init__(make_cache(NUM_PAGES, NUM_WINDOW_PAGES))
        assert self.kv.windows is not None
        self.windows = self.kv.windows

    @rule(salt=SALTS, tokens=TOKENS)
    def start(self, salt: str, tokens: list[int]) -> None:
        holder = Holder(Namespace(salt=salt), tokens)
        found = self.kv.count_cached(holder.namespace, tokens[:-1])
        holder.computed = self.kv.attach_prefix(holder.table, holder.namespace, tokens[:-1])
        assert holder.computed == found
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        holder = self.some_holder(data)
        upto = data.draw(st.integers(holder.computed, len(holder.tokens)))
        missing = -(-upto // PAGE_SIZE) - len(holder.table.pages)
        room = min(
            self.kv.num_free + self.kv.num_cached, self.windows.num_free + self.windows.num_cached
        )

        pages = self.kv.try_grow(holder.table, upto)

        assert (pages is None) == (missing > room)
        if pages is None:
            return
        for index in range(holder.computed // PAGE_SIZE, -(-upto // PAGE_SIZE)):
            page = holder.table.windows[index]
            prefix = tuple(holder.tokens[: min(upto, (index + 1) * PAGE_SIZE)])
            self.filled[page] = (holder.namespace, prefix)
        holder.computed = upto

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), publish=st.booleans())
    def slide(self, data: st.DataObject, publish: bool) -> None:
        holder = self.some_holder(data)
        if publish:
            self.kv.publish(holder.table, holder.namespace, holder.tokens, holder.computed)
        self.kv.slide(holder.table, holder.computed)
        first = max(0, holder.computed - WINDOW + 1) // PAGE_SIZE
        assert holder.table.windows[:first] == [NO_PAGE] * first

    @rule()
    def flush(self) -> None:
        self.kv.flush()
        assert self.windows.num_cached == 0 or self.kv.num_held > 0

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.kv.check_integrity()
        held = {page for holder in self.holders for page in holder.table.windows} - {NO_PAGE}
        assert self.windows.num_held == len(held)
        for holder in self.holders:
            assert len(holder.table.windows) == len(holder.table.pages)

    @invariant()
    def what_the_window_sees_stays_readable(self) -> None:
        for holder in self.holders:
            first = max(0, holder.computed - WINDOW + 1) // PAGE_SIZE
            for index in range(first, -(-holder.computed // PAGE_SIZE)):
                prefix = tuple(holder.tokens[: min(holder.computed, (index + 1) * PAGE_SIZE)])
                page = holder.table.windows[index]
                assert page != NO_PAGE
                assert self.filled[page] == (holder.namespace, prefix)

    def teardown(self) -> None:
        super().teardown()
        assert self.windows.num_free == NUM_WINDOW_PAGES


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def compute(kv: KVCache, tokens: list[int], chunk: int = 4) -> PageTable:
    """Compute a prompt in chunks, as the scheduler does; the table stays in use."""
    table = PageTable()
    computed = kv.attach_prefix(table, BASE, tokens[:-1])
    while computed < len(tokens):
        computed = min(computed + chunk, len(tokens))
        assert kv.try_grow(table, computed) is not None
        kv.publish(table, BASE, tokens, computed)
        kv.slide(table, computed)
    return table


def finish(kv: KVCache, tokens: list[int]) -> None:
    kv.retire(compute(kv, tokens), BASE, tokens, len(tokens))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_sequence_holds_no_more_than_its_window_however_long_it_is(prefix_cache: bool) -> None:
    kv = make_cache(num_window_pages=6, prefix_cache=prefix_cache)
    assert kv.windows is not None

    compute(kv, list(range(100)))

    assert kv.num_held == 50
    assert kv.windows.num_held == 2  # of the last 4 tokens, which the next one sees


def test_a_prefix_whose_pages_are_all_there_is_found_at_every_page() -> None:
    kv = make_cache()
    finish(kv, list(range(40)))

    for count in range(0, 41, PAGE_SIZE):
        assert kv.count_cached(BASE, list(range(count))) == count


def test_a_prefix_is_used_as_far_as_the_tokens_before_it_are_there() -> None:
    kv = make_cache(num_window_pages=20)
    finish(kv, list(range(40)))
    finish(kv, [*range(100, 132)])  # takes 16 of 20 pages, 16 of which were the other's

    # Only the last 4 of 20 pages are left; the next token after page n sees pages n - 2 and n - 1.
    assert kv.count_cached(BASE, list(range(40))) == 40
    assert kv.count_cached(BASE, list(range(36))) == 36
    assert kv.count_cached(BASE, list(range(34))) == 0

    assert kv.count_cached(BASE, list(range(20))) == 0

    finish(kv, list(range(20)))  # computed again, it is cached again

    assert kv.count_cached(BASE, list(range(20))) == 20
    assert kv.num_held == 0


def test_a_short_page_pool_evicts_the_pages_of_windows_beside() -> None:
    kv = make_cache(num_pages=20)
    assert kv.windows is not None
    finish(kv, list(range(40)))

    kv.try_grow(PageTable(), 20)

    assert (kv.num_cached, kv.windows.num_cached) == (10, 10)


def test_a_hit_counts_as_use() -> None:
    kv = make_cache(num_window_pages=12)
    finish(kv, [1] * 8)
    finish(kv, [2] * 8)
    finish(kv, [1] * 8 + [3])

    finish(kv, [4] * 20)  # takes six cached pages, the early ones of the first prompt among them

    assert kv.count_cached(BASE, [1] * 8) == 8
    assert kv.count_cached(BASE, [2] * 8) == 0


def test_two_copies_of_a_prefix_leave_one_in_the_cache() -> None:
    kv, tokens = make_cache(), list(range(8))
    assert kv.windows is not None
    tables = PageTable(), PageTable()
    for table in tables:
        kv.try_grow(table, 8)
    for table in tables:
        kv.publish(table, BASE, tokens, 8)
        kv.check_integrity()

    for table in tables:
        kv.retire(table, BASE, tokens, 8)

    assert (kv.num_cached, kv.windows.num_cached) == (4, 4)
    kv.check_integrity()
