"""Pages of sequences and the prefix cache, as a state machine against a plain model.

The model remembers which tokens each page was filled with; borrowing a page with other tokens, or
in another namespace, is caught.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remora.configs.errors import InvariantViolated
from remora.engine.kv.cache import KVCache, PageTable
from remora.engine.types import Namespace

PAGE_SIZE, NUM_PAGES = 2, 24
BASE = Namespace()
SALTS = st.sampled_from(["", "a", "b"])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=18)


@dataclass
class Holder:
    """A sequence of the model: its tokens, and how many of them are computed."""

    namespace: Namespace
    tokens: list[int]
    table: PageTable = field(default_factory=PageTable)
    computed: int = 0


class PagesMachine(RuleBasedStateMachine):
    """Holders of pages, which are released in any order; `filled` tells what a page holds."""

    def __init__(self, kv: KVCache) -> None:
        super().__init__()
        self.kv = kv
        self.holders: list[Holder] = []
        self.filled: dict[int, tuple[Namespace, tuple[int, ...]]] = {}

    def some_holder(self, data: st.DataObject) -> Holder:
        return data.draw(st.sampled_from(self.holders))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        holder = self.some_holder(data)
        if keep:
            self.kv.retire(holder.table, holder.namespace, holder.tokens, holder.computed)
        else:
            self.kv.release(holder.table)
        self.holders.remove(holder)

    def teardown(self) -> None:
        for holder in self.holders:
            self.kv.release(holder.table)
        self.kv.flush()
        assert self.kv.num_free == NUM_PAGES


class CacheMachine(PagesMachine):
    """Any order of start, grow, publish, release and flush."""

    def __init__(self) -> None:
        super().__init__(KVCache(NUM_PAGES, page_size=PAGE_SIZE, prefix_cache=True))

    @rule(salt=SALTS, tokens=TOKENS, borrow=st.booleans())
    def start(self, salt: str, tokens: list[int], borrow: bool) -> None:
        holder = Holder(Namespace(salt=salt), tokens)
        if borrow:
            holder.computed = self.kv.attach_prefix(holder.table, holder.namespace, tokens[:-1])
        for index, page in enumerate(holder.table.pages):
            prefix = tuple(tokens[: (index + 1) * PAGE_SIZE])
            assert self.filled[page] == (holder.namespace, prefix)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = self.some_holder(data)
        upto = data.draw(st.integers(holder.computed, len(holder.tokens)))
        free_or_cached = self.kv.num_free + self.kv.num_cached
        missing = -(-upto // PAGE_SIZE) - len(holder.table.pages)

        pages = self.kv.try_grow(holder.table, upto)

        assert (pages is None) == (missing > free_or_cached)
        if pages is None:
            return
        for index in range(holder.computed // PAGE_SIZE, -(-upto // PAGE_SIZE)):
            page = holder.table.pages[index]
            assert page in holder.table.owned, "a borrowed page was written to"
            prefix = tuple(holder.tokens[: min(upto, (index + 1) * PAGE_SIZE)])
            self.filled[page] = (holder.namespace, prefix)
        holder.computed = upto

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = self.some_holder(data)
        before = list(holder.table.pages)
        self.kv.publish(holder.table, holder.namespace, holder.tokens, holder.computed)
        assert holder.table.pages == before

    @rule()
    def flush(self) -> None:
        self.kv.flush()
        assert self.kv.num_cached == 0

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.kv.check_integrity()
        owned = [page for holder in self.holders for page in holder.table.owned]
        assert len(set(owned)) == len(owned) == self.kv.num_owned
        for holder in self.holders:
            borrowed = set(holder.table.pages) - holder.table.owned
            assert not borrowed & set(owned), "a page is borrowed and owned at once"
        in_tables = {page for holder in self.holders for page in holder.table.pages}
        assert self.kv.num_held == len(in_tables), "pages are held that nobody uses"

    @invariant()
    def what_is_computed_stays_readable(self) -> None:
        for holder in self.holders:
            for index in range(holder.computed // PAGE_SIZE):
                prefix = tuple(holder.tokens[: (index + 1) * PAGE_SIZE])
                assert self.filled[holder.table.pages[index]] == (holder.namespace, prefix)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def make_published(kv: KVCache, tokens: list[int], namespace: Namespace = BASE) -> None:
    """Leave `tokens` in the cache, held by no sequence."""
    table = PageTable()
    kv.attach_prefix(table, namespace, tokens)
    assert kv.try_grow(table, len(tokens)) is not None
    kv.retire(table, namespace, tokens, len(tokens))


def test_namespaces_never_share_pages() -> None:
    kv = KVCache(8, page_size=2, prefix_cache=True)
    make_published(kv, [1, 2, 3, 4])

    other, adapter, same = PageTable(), PageTable(), PageTable()

    assert kv.attach_prefix(other, Namespace(salt="x"), [1, 2, 3, 4]) == 0
    assert kv.attach_prefix(adapter, Namespace(lora_id=7), [1, 2, 3, 4]) == 0
    assert kv.attach_prefix(same, Namespace(), [1, 2, 3, 4]) == 4


def test_least_recently_used_prefix_is_evicted_first() -> None:
    kv = KVCache(4, page_size=2, prefix_cache=True)
    make_published(kv, [1, 1, 1, 1])
    make_published(kv, [2, 2, 2, 2])
    make_published(kv, [1, 1, 1, 1])

    newcomer = PageTable()
    assert kv.try_grow(newcomer, 4) is not None

    assert kv.attach_prefix(PageTable(), Namespace(), [1, 1, 1, 1]) == 4
    assert kv.attach_prefix(PageTable(), Namespace(), [2, 2, 2, 2]) == 0


def test_a_long_cached_run_loses_only_the_pages_that_are_needed() -> None:
    kv = KVCache(8, page_size=2, prefix_cache=True)
    make_published(kv, list(range(16)))

    kv.try_grow(PageTable(), 2)

    assert kv.attach_prefix(PageTable(), Namespace(), list(range(16))) == 14


def test_switched_off_it_caches_nothing() -> None:
    kv = KVCache(8, page_size=2, prefix_cache=False)
    make_published(kv, [1, 2, 3, 4])

    assert kv.num_free == 8
    assert kv.attach_prefix(PageTable(), Namespace(), [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_of_one_request_are_shared_within_it_and_dropped_with_it(prefix_cache: bool) -> None:
    kv = KVCache(8, page_size=2, prefix_cache=prefix_cache)
    own, tokens = Namespace(request_id="r"), [1, 2, 3, 4, 5]
    first, second, other = PageTable(), PageTable(), PageTable()
    kv.attach_prefix(first, own, tokens)
    kv.try_grow(first, 5)
    kv.publish(first, own, tokens, 5)

    assert kv.attach_prefix(second, own, tokens) == 4
    assert second.pages == first.pages[:2]
    assert kv.attach_prefix(other, Namespace(), tokens) == 0
    assert kv.newest_hashes(8) == b""
    with pytest.raises(InvariantViolated, match="locked"):
        kv.drop(own)
    kv.release(first)
    kv.release(second)
    assert kv.num_cached == 2  # until the request ends
    kv.drop(own)
    assert (kv.num_free, kv.num_evicted) == (8, 0)
    kv.drop(own)
    kv.check_integrity()
    # What is dropped is not evicted as well.
    everything = PageTable()
    assert len(kv.try_grow(everything, 16) or ()) == 8
    assert kv.try_grow(PageTable(), 2) is None
    kv.release(everything)
    kv.check_integrity()


def test_callers_salts_do_not_pile_up() -> None:
    kv = KVCache(8, page_size=2, prefix_cache=True)

    for number in range(100):
        table = PageTable()
        kv.attach_prefix(table, Namespace(salt=str(number)), [1, 2, 3])
        kv.try_grow(table, 3)
        kv.publish(table, Namespace(salt=str(number)), [1, 2, 3], 3)
        kv.release(table)

    assert len(kv._radix._roots) <= 8


def test_a_table_in_use_cannot_take_another_prefix() -> None:
    kv = KVCache(8, page_size=2, prefix_cache=True)
    table = PageTable()
    kv.try_grow(table, 2)

    with pytest.raises(InvariantViolated):
        kv.attach_prefix(table, Namespace(), [1, 2])


def test_a_copy_of_a_cached_prefix_is_not_held_twice() -> None:
    kv = KVCache(8, page_size=2, prefix_cache=True)
    make_published(kv, [1, 2, 3, 4])
    copy = PageTable()  # computed anew: nothing was borrowed
    kv.try_grow(copy, 8)

    kv.publish(copy, Namespace(), [1, 2, 3, 4, 5, 6, 7, 8], 8)

    assert (kv.num_held, kv.num_cached) == (4, 2)
    kv.retire(copy, Namespace(), [1, 2, 3, 4, 5, 6, 7, 8], 8)
    assert kv.attach_prefix(PageTable(), Namespace(), [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    kv.check_integrity()


def test_a_long_prompt_published_in_chunks_stays_one_node() -> None:
    kv = KVCache(64, page_size=2, prefix_cache=True)
    table, tokens = PageTable(), list(range(100))
    kv.attach_prefix(table, Namespace(), tokens)

    for computed in range(10, 101, 10):
        kv.try_grow(table, computed)
        kv.publish(table, Namespace(), tokens, computed)

    assert len(list(kv._radix.nodes())) == 1
    kv.check_integrity()
