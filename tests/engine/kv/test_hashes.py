"""Hashes of pages: what they name, and which of them a cache reports."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from remora.engine.kv.cache import KVCache
from remora.engine.kv.hashes import HASH_BYTES, page_hashes
from remora.engine.types import Namespace
from tests.engine.kv.test_cache import BASE, PAGE_SIZE, CacheMachine, make_published


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def test_a_hash_is_the_same_in_every_process() -> None:
    hashes = page_hashes(Namespace(salt="tenant"), [1, 2, 3, 4, 5], 2)

    assert hashes.hex() == "c2974739cc41a781777f8ed896850f8d"


def test_only_full_pages_have_hashes() -> None:
    assert page_hashes(BASE, [1], 2) == b""
    assert len(page_hashes(BASE, [1, 2, 3], 2)) == HASH_BYTES


def test_equal_beginnings_have_equal_hashes_and_differ_from_the_first_other_page_on() -> None:
    ours = split(page_hashes(BASE, [1, 2, 3, 4, 5, 6], 2))
    others = split(page_hashes(BASE, [1, 2, 9, 4, 5, 6], 2))

    assert ours[0] == others[0]
    assert not set(ours[1:]) & set(others)


def test_namespaces_share_no_hash() -> None:
    others = (Namespace(salt="a"), Namespace(lora_id=1), Namespace(salt="\ud800"))
    namespaces = (BASE, *others)

    hashes = {page_hashes(namespace, [1, 2], 2) for namespace in namespaces}

    assert len(hashes) == len(namespaces)


def test_the_latest_used_are_reported_first() -> None:
    kv = KVCache(16, page_size=2, prefix_cache=True)
    make_published(kv, [1, 2, 3, 4])
    make_published(kv, [5, 6])
    make_published(kv, [1, 2])

    assert kv.newest_hashes(2) == page_hashes(BASE, [1, 2], 2) + page_hashes(BASE, [5, 6], 2)


class ReportingMachine(CacheMachine):
    """Whatever has happened to the tree, its report tells what is in it."""

    @rule(limit=st.integers(0, 30))
    def report(self, limit: int) -> None:
        pages = [page for node in self.kv._radix.nodes() for page in node.pages]
        chains = [
            split(page_hashes(namespace, prefix, PAGE_SIZE))
            for namespace, prefix in map(self.filled.__getitem__, pages)
        ]
        before = {own: earlier[-1] if earlier else None for *earlier, own in chains}

        reported = split(self.kv.newest_hashes(limit))

        assert len(set(reported)) == len(reported) == min(limit, len(pages))
        for place, own in enumerate(reported):
            assert before[own] is None or before[own] in reported[:place]


TestReports = ReportingMachine.TestCase
TestReports.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
