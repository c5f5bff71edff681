"""The free list: every page is handed out once, and comes back once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import InvariantViolated
from remora.engine.kv.pages import DUMP_PAGE, PagePool, pages_needed


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_pages_needed_is_the_smallest_sufficient_count(num_tokens: int, page_size: int) -> None:
    count = pages_needed(num_tokens, page_size)

    assert count * page_size >= num_tokens > (count - 1) * page_size


def test_all_pages_but_the_dump_page_are_handed_out() -> None:
    pool = PagePool(5)

    pages = pool.try_allocate(5)

    assert pages is not None
    assert set(pages) == {1, 2, 3, 4, 5}
    assert DUMP_PAGE not in pages


@pytest.mark.parametrize("page", [0, 4, 2])
def test_releasing_a_page_that_is_not_out_is_an_error(page: int) -> None:
    pool = PagePool(3)
    pool.try_allocate(1)

    with pytest.raises(InvariantViolated, match=str(page)):
        pool.release([page])


@given(st.lists(st.integers(0, 6), max_size=40))
def test_any_order_of_taking_and_releasing_conserves_pages(sizes: list[int]) -> None:
    pool = PagePool(12)
    taken: list[list[int]] = []

    for size in sizes:
        pages = pool.try_allocate(size)
        if pages is None:
            pool.release(taken.pop(0))
        else:
            taken.append(pages)
        pool.check_integrity()
        out = [page for pages in taken for page in pages]
        assert len(set(out)) == len(out)
        assert pool.num_free + len(out) == 12
