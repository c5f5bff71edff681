"""Texts of earlier requests: bounds, namespaces apart, and fewer steps for the same tokens.

Costs are counted, in grams and bytes; no test measures time.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.spec.gram_index import GRAMS_PER_WORK
from remora.engine.spec.gram_store import GramStore
from remora.engine.spec.ngram import NgramProposer
from remora.engine.spec.speculation import Speculation
from remora.engine.types import Namespace
from tests.engine.fakes import VOCAB, expected_output
from tests.engine.scheduler.scheduled import Harness
from tests.engine.spec.proposers import FixedController

KIB, MIB = 1024, 2**20
NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(lora_id=1, salt="a"))


def indexed(store: GramStore) -> GramStore:
    while store.work(10_000):
        pass
    return store


def is_kept(store: GramStore, namespace: Namespace, text: list[int]) -> bool:
    """Whether any gram of two tokens leads to the text: hashes may share the place of a few."""
    pairs = zip(text, text[1:], text[2:], strict=False)
    return any(list(store.find(namespace, [a, b], 1)) == [c] for a, b, c in pairs)


def test_what_followed_the_longest_known_suffix_is_found() -> None:
    store = GramStore(2, 4, 64 * MIB)  # so many places that no two of these grams share one
    store.add(NAMESPACES[0], [1, 2, 3, 4, 5])
    store.add(NAMESPACES[0], [9, 3, 4, 6, 3])
    indexed(store)
    assert list(store.find(NAMESPACES[0], [2, 3, 4], 3)) == [5]
    assert list(store.find(NAMESPACES[0], [8, 3, 4], 3)) == [6, 3]
    assert list(store.find(NAMESPACES[0], [4, 5], 3)) == []
    assert list(store.find(NAMESPACES[0], [4], 3)) == []


texts = st.lists(st.integers(0, 3), max_size=200)
adding = st.tuples(st.sampled_from(range(3)), texts)


@given(st.lists(adding, max_size=20), st.integers(1, 30), st.integers(1, 300), st.data())
def test_bounds_hold_and_drafts_are_of_texts_of_the_namespace(
    added: list[tuple[int, list[int]]], kib: int, most: int, data: st.DataObject
) -> None:
    shortest = data.draw(st.integers(1, 3))
    longest = data.draw(st.integers(shortest, 6))
    store = GramStore(shortest, longest, kib * KIB)
    for number, text in added:  # tokens say whose they are
        store.add(NAMESPACES[number], [4 * number + token for token in text])
        assert store.work(most) <= most + longest - shortest
        assert store.num_bytes <= kib * KIB
        assert store.num_texts <= kib * KIB // 8 // 400
        asked, tail = data.draw(adding)
        tail = [4 * asked + token for token in tail]
        found = list(store.find(NAMESPACES[asked], tail, 3))
        assert len(found) <= 3
        if found:
            ends = [tail[-size:] + found for size in range(shortest, longest + 1)]
            assert any(
                [4 * asked + token for token in text][start : start + len(end)] == end
                for number, text in added
                if number == asked
                for end in ends
                for start in range(len(text))
            )
        foreign = NAMESPACES[(asked + 1) % 3]
        assert list(store.find(foreign, tail, 3)) == []


def test_the_least_recently_used_text_is_forgotten() -> None:
    # 16 KiB of texts: of 200 tokens 1,400 bytes once indexed, and of 280 that wait 11,600
    store = GramStore(2, 4, 128 * KIB)
    added = [[100 * number + place % 100 for place in range(200)] for number in range(5)]
    for text in added:
        store.add(NAMESPACES[0], list(text))
        indexed(store)
    assert is_kept(store, NAMESPACES[0], added[0])  # and used by this
    store.add(NAMESPACES[1], list(range(280)))
    assert is_kept(store, NAMESPACES[0], added[0])
    assert not is_kept(store, NAMESPACES[0], added[1])


@pytest.mark.parametrize("kib", [256, 1024])
def test_memory_is_what_it_is_said_to_be(kib: int) -> None:
    draw = random.Random(0)
    numbers = [[draw.randrange(300, 150_000) for _ in range(300)] for _ in range(200)]
    tracemalloc.start()
    try:
        store = GramStore(2, 5, kib * KIB)
        for text in numbers:
            store.add(NAMESPACES[0], [int(str(token)) for token in text])
            store.work(500)
            assert tracemalloc.get_traced_memory()[0] <= store.num_bytes + 8 * KIB
            assert store.num_bytes <= kib * KIB
    finally:
        tracemalloc.stop()
    assert 1 < store.num_texts < 200


def drafting(max_shared_bytes: int | None) -> Speculation:
    return Speculation(
        NgramProposer(shortest=2, longest=4, max_bytes=64 * KIB, max_shared_bytes=max_shared_bytes),
        FixedController(4),
        max_drafts=4,
        vocab_size=VOCAB,
        eos_token_ids=[0],
        source="texts",
    )


def num_steps(harness: Harness) -> int:
    return len(harness.runner.plans)


@pytest.mark.parametrize(
    ("fields", "is_faster"), [({}, True), ({"cache_salt": "b"}, False), ({"lora_id": 0}, True)]
)
def test_a_repeated_request_takes_fewer_steps_in_its_namespace(
    fields: dict[str, str | int], is_faster: bool
) -> None:
    harness = Harness(speculation=drafting(64 * KIB), num_pages=64)
    took = []
    for name, more in (("first", {}), ("second", fields)):
        before = num_steps(harness)
        harness.add(name, [1, 2, 3], 40, **more)
        harness.run()
        took.append(num_steps(harness) - before)
        assert harness.tokens[name, 0] == expected_output([1, 2, 3], 40)
    if is_faster:
        assert took[1] < 0.4 * took[0]
    else:
        assert took[1] == took[0]


def test_outputs_are_the_same_with_texts_of_earlier_requests() -> None:
    """250 runs, each of up to 12 requests in 3 namespaces, some ended or preempted on the way."""
    rng = random.Random(3)
    accepted = 0
    for case in range(250):
        speculation = drafting(rng.choice([4, 16, 64]) * KIB)
        harness = Harness(
            speculation=speculation,
            num_pages=rng.choice([8, 12, 32]),
            max_step_tokens=rng.randrange(8, 24),
        )
        wanted: dict[str, list[int]] = {}
        for number in range(rng.randrange(2, 13)):
            prompt, count = [rng.randrange(1, 3)] * rng.randrange(1, 4), rng.randrange(1, 16)
            name = f"{case}-{number}"
            wanted[name] = expected_output(prompt, count)
            harness.add(name, prompt, count, cache_salt=rng.choice(["", "a", "b"]))
            harness.step(rng.randrange(12))
            if rng.random() < 0.2:
                harness.abort(name)
        harness.run()
        for name, tokens in wanted.items():
            got = harness.tokens[name, 0]
            assert got == tokens[: len(got)]
            assert len(got) == len(tokens) or harness.ends[name, 0] == "abort"
        accepted += speculation.counts.num_accepted
    assert accepted > 250


@pytest.mark.parametrize("text", [[7] * 30_000, [5, 9] * 15_000, list(range(30_000))])
def test_a_step_enters_and_frees_a_bounded_number_of_grams(
    text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own index and store share one allowance, while texts come, wait and end."""
    proposer = NgramProposer(shortest=2, longest=5, max_bytes=MIB, max_shared_bytes=64 * MIB)
    store = proposer._store
    assert store is not None
    counts: list[int] = []
    monkeypatch.setattr(proposer._index, "work", counted(proposer._index.work, counts))
    monkeypatch.setattr(store, "work", counted(store.work, counts))
    for key in range(3):
        proposer.begin(key, text, NAMESPACES[key])
        for _ in range(220):
            counts.clear()
            proposer.propose([(key, 4)])
            assert sum(counts) <= GRAMS_PER_WORK + 4
        proposer.end(key)
    assert store.num_texts == 3


def counted(work: Callable[..., int], counts: list[int]) -> Callable[..., int]:
    def count(*args: int) -> int:
        counts.append(work(*args))
        return counts[-1]

    return count
