"""What is kept, and what is given up first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora.engine.grammar.cache import BoundedCache
from remora.engine.grammar.prepare import Source, SourceKind
from remora.engine.grammar.xgrammar_backend import XgrammarCompiler, XgrammarLoader
from tests.engine.grammar.walks import BYTES


def test_the_least_recently_used_is_given_up_first() -> None:
    cache: BoundedCache[str] = BoundedCache(10)
    cache.put(b"a", "A", 4)
    cache.put(b"b", "B", 4)

    cache.get(b"a")
    cache.put(b"c", "C", 4)

    assert [cache.get(key) for key in (b"a", b"b", b"c")] == ["A", None, "C"]
    assert cache.num_bytes == 8


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache: BoundedCache[str] = BoundedCache(10)
    cache.put(b"a", "A", 4)

    cache.put(b"b", "B", 11)
    cache.put(b"a", "larger", 11)

    assert len(cache) == 0
    assert cache.num_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_bytes_are_counted_and_bounded(puts: list[tuple[int, int]]) -> None:
    cache: BoundedCache[int] = BoundedCache(20)

    for name, size in puts:
        cache.put(bytes([name]), size, size)

        kept = [value for n in range(6) if (value := cache.get(bytes([n]))) is not None]
        assert cache.num_bytes == sum(kept) <= 20


def test_a_grammar_is_counted_with_its_tables() -> None:
    """xgrammar leaves most of them out; measured, they take as much as their text, or less."""
    source = Source(SourceKind.REGEX, "(?:\\u0061{1,100}\\u002d){1,90}")
    data = XgrammarCompiler(BYTES, is_compact=False).compile(source)

    assert XgrammarLoader(BYTES).load(data).num_bytes >= len(data)
