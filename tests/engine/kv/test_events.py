"""Events of the prefix cache: whoever hears them all knows what is cached."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.engine import Engine
from remora.engine.kv.events import AllCleared, CacheEvents, KVEvent, PagesRemoved, PagesStored
from remora.engine.kv.hashes import HASH_BYTES, page_hashes
from remora.engine.kv.publisher import Publisher
from remora.engine.observe.inspection import inspect
from remora.engine.types import Namespace, Request, SamplingParams
from tests.engine.fakes import make_engine, make_plan

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")


def run(engine: Engine, prompt: list[int], num: int = 4, salt: str = "") -> None:
    sampling = SamplingParams(max_tokens=num, ignore_eos=True)
    name = f"r{random.random()}"
    engine.add(Request(request_id=name, prompt_ids=prompt, sampling=sampling, cache_salt=salt))
    while engine.has_work:
        engine.step()


def numbers(hashes: bytes) -> list[int]:
    at = range(0, len(hashes), HASH_BYTES)
    return [int.from_bytes(hashes[i : i + HASH_BYTES]) for i in at]


def test_events_tell_at_any_time_what_is_cached() -> None:
    engine = make_engine(make_plan(num_pages=12))
    known: set[int] = set()
    kinds: set[type] = set()

    def hear(event: KVEvent) -> None:
        kinds.add(type(event))
        if isinstance(event, PagesStored):
            assert event.parent is None or event.parent in known
            assert len(event.tokens) == len(event.hashes) * event.page_size
            assert known.isdisjoint(event.hashes)
            known.update(event.hashes)
        elif isinstance(event, PagesRemoved):
            assert known.issuperset(event.hashes)
            known.difference_update(event.hashes)
        else:
            known.clear()

    engine.watch_cache(CacheEvents(hear, engine.plan.page_size))
    chance = random.Random(1)
    for number in range(60):
        shared = [7] * chance.choice((0, 4, 9, 13))
        own = [chance.randrange(1, 4) for _ in range(chance.randrange(1, 12))]
        run(engine, shared + own, salt=chance.choice(("", "s")))
        if number == 40:
            assert engine.flush_cache()
            assert known == set()
        assert known == set(numbers(engine.page_hashes(1000)))
    assert kinds == {PagesStored, PagesRemoved, AllCleared}


def test_stored_pages_have_the_hashes_that_routers_know() -> None:
    heard: list[KVEvent] = []
    engine = make_engine()
    engine.watch_cache(CacheEvents(heard.append, engine.plan.page_size))
    prompt = list(range(1, 10))
    run(engine, prompt)

    first = heard[0]
    assert isinstance(first, PagesStored)
    expected = numbers(page_hashes(Namespace(), array("q", prompt), engine.plan.page_size))
    assert (list(first.hashes), first.parent, first.tokens) == (expected, None, tuple(prompt[:8]))


def test_pages_of_given_embeddings_are_not_told_because_they_have_no_ids() -> None:
    heard: list[KVEvent] = []
    engine = make_engine(make_plan(num_pages=6, embedding_size=4))
    engine.watch_cache(CacheEvents(heard.append, engine.plan.page_size))
    given = PromptEmbeddings(np.ones((9, 4), np.float32))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add(Request(request_id="e", prompt_ids=given.ids, sampling=sampling, embeddings=given))
    while engine.has_work:
        engine.step()

    assert heard == []
    assert engine.stats().num_cached_pages > 0
    run(engine, list(range(1, 20)))
    assert engine.stats().evicted_pages_total > 0
    assert {type(event) for event in heard} == {PagesStored}


@pytest.fixture
def subscriber() -> Iterator[Any]:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    yield socket
    socket.close()


@pytest.mark.observes("engine.kv_events_endpoint", "engine.kv_events_topic")
def test_a_subscriber_receives_what_is_stored_and_cleared(subscriber: Any) -> None:
    keys = {"kv_events_endpoint": "tcp://127.0.0.1:*", "kv_events_topic": "kv"}
    engine = make_engine()
    inspection = inspect(engine, parse_args({"model": {"path": "x"}, "engine": keys}))
    assert inspection.events is not None
    subscriber.subscribe(b"kv")
    subscriber.connect(inspection.events.address)
    poller = zmq.Poller()
    poller.register(subscriber, zmq.POLLIN)
    while not poller.poll(20):  # it takes a moment until it is heard
        inspection.events.emit(AllCleared())
    run(engine, [1, 2, 3, 4, 5], num=2)
    engine.flush_cache()
    inspection.close()

    events: list[Any] = []  # what came before we were heard is the first of them
    seen: list[int] = []
    while ["BlockStored"] not in [event[:1] for event in events[:-1]]:
        topic, number, packed = subscriber.recv_multipart()
        at, some, rank = msgpack.unpackb(packed)
        seen.append(int.from_bytes(number))
        events += some
        assert (topic, rank) == (b"kv", 0)
        assert at > 1e9

    assert seen == list(range(seen[0], seen[0] + len(seen)))
    (stored,) = (event for event in events if event[0] == "BlockStored")
    assert events[-1] == ["AllBlocksCleared"]
    assert stored[2:] == [None, [1, 2, 3, 4], 4, None]
    assert stored[1] == numbers(page_hashes(Namespace(), [1, 2, 3, 4], 4))


def test_an_address_that_cannot_be_had_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="kv_events_endpoint"):
        Publisher("tcp://no.such.host.example:*", "")


def test_events_of_no_cache_are_refused() -> None:
    keys = {"kv_events_endpoint": "tcp://*:5557", "prefix_cache": False}
    with pytest.raises(ConfigError, match="needs prefix_cache"):
        parse_args({"model": {"path": "x"}, "engine": keys})
