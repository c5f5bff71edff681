"""Policies: who is tried first, for any replicas and requests."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.policies import (
    LOAD_TOKENS,
    UNKNOWN_TOKENS,
    Policy,
    ReplicaView,
    make_policy,
)

POLICIES = ("power_of_two", "round_robin", "shortest_queue", "prefix", "session", "lora")
PAGE_SIZE = 16
PAGES = st.sets(st.integers(1, 6))
ADAPTERS = st.sets(st.sampled_from("xyz"))
VIEWS = st.lists(
    st.builds(
        ReplicaView,
        id=st.sampled_from("abcdef"),
        num_requests=st.integers(0, 50),
        num_queued_tokens=st.integers(0, 5000),
        kv_usage=st.floats(0, 1),
        pages=PAGES,
        expected_pages=PAGES,
        adapters=ADAPTERS,
        expected_adapters=ADAPTERS,
    ),
    max_size=6,
    unique_by=lambda view: view.id,
)


def pack(*pages: int) -> bytes:
    return struct.pack(f"<{len(pages)}Q", *pages)


KEYS = st.builds(
    RouteKey,
    session=st.none() | st.text(max_size=3),
    page_hashes=st.lists(st.integers(1, 6), max_size=6, unique=True).map(lambda p: pack(*p)),
    num_tokens=st.integers(0, 2000),
    adapter=st.none() | st.sampled_from("xyz"),
    avoid=st.frozensets(st.sampled_from("abcdef")),
)


def make(name: str, *, max_imbalance: float = 1.5, seed: int = 0) -> Policy:
    return make_policy(
        name, max_imbalance=max_imbalance, page_size=PAGE_SIZE, chance=random.Random(seed)
    )


def make_views(*loads: int) -> list[ReplicaView]:
    return [ReplicaView(id=f"r{i}", num_queued_tokens=load) for i, load in enumerate(loads)]


@pytest.mark.parametrize("name", POLICIES)
@given(views=VIEWS, key=KEYS)
@settings(max_examples=60)
def test_every_replica_is_tried_once_but_those_that_failed_the_request(
    name: str, views: list[ReplicaView], key: RouteKey
) -> None:
    ids = {view.id for view in views}

    ranked = make(name).rank(views, key)

    assert len(set(ranked)) == len(ranked)
    assert set(ranked) == (ids - key.avoid or ids)


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_round_robin_is_fair_although_replicas_come_and_go(counts: list[int], seed: int) -> None:
    policy = make("round_robin", seed=seed)

    for count in counts:
        views = make_views(*[0] * count)
        policy.rank(views, RouteKey())
        chosen = Counter(policy.rank(views, RouteKey())[0] for _ in range(count * 3))
        assert set(chosen.values()) == {3}


def test_two_routers_do_not_begin_with_the_same_replica() -> None:
    firsts = {
        make("round_robin", seed=n).rank(make_views(0, 0, 0), RouteKey())[0] for n in range(9)
    }

    assert len(firsts) == 3


def test_the_less_busy_of_two_goes_first_and_the_most_busy_of_all_never() -> None:
    views = [ReplicaView(id=str(n), num_requests=n) for n in range(4)]

    ranks = [make("power_of_two", seed=n).rank(views, RouteKey()) for n in range(40)]

    assert {rank[0] for rank in ranks} == {"0", "1", "2"}
    assert all(int(rank[0]) < int(rank[1]) for rank in ranks)


def prompt(*pages: int) -> RouteKey:
    return RouteKey(page_hashes=pack(*pages), num_tokens=len(pages) * PAGE_SIZE)


@pytest.mark.parametrize(
    ("policy", "views", "key", "ranked"),
    [
        pytest.param(
            "shortest_queue",
            [
                ReplicaView(id="one long", num_requests=1, num_queued_tokens=3000),
                ReplicaView(id="nine short", num_requests=9, num_queued_tokens=450),
            ],
            RouteKey(),
            ["nine short", "one long"],
            id="tokens count, not requests",
        ),
        pytest.param(
            "prefix",
            [
                ReplicaView(id="run", pages={1, 2}),
                ReplicaView(id="many", pages={1, 3, 4, 5}),
            ],
            prompt(1, 2, 3, 4, 5),
            ["run", "many"],
            id="the longest run of pages wins over the most pages",
        ),
        pytest.param(
            "prefix",
            [ReplicaView(id="none"), ReplicaView(id="soon", pages={1}, expected_pages={2})],
            prompt(1, 2),
            ["soon", "none"],
            id="expected pages count like reported ones",
        ),
        pytest.param(
            "prefix",
            [ReplicaView(id="has it", pages={1, 2}), ReplicaView(id="idle")],
            RouteKey(page_hashes=pack(1, 2), num_tokens=40),
            ["has it", "idle"],
            id="a free replica keeps its prefix",
        ),
        pytest.param(
            "prefix",
            [ReplicaView(id="has it", pages={1, 2}, num_queued_tokens=60), ReplicaView(id="idle")],
            RouteKey(page_hashes=pack(1, 2), num_tokens=40),
            ["idle", "has it"],
            id="a busy replica loses its prefix",
        ),
        pytest.param(
            "session", make_views(500, 20, 90), RouteKey(), ["r1", "r2", "r0"], id="no session"
        ),
        pytest.param(
            "lora",
            [
                ReplicaView(id="r0", num_queued_tokens=500, adapters={"x"}),
                *make_views(0, 20, 90)[1:],
            ],
            RouteKey(num_tokens=9),
            ["r1", "r2", "r0"],
            id="no adapter",
        ),
    ],
)
def test_the_order_of_replicas(
    policy: str, views: list[ReplicaView], key: RouteKey, ranked: list[str]
) -> None:
    assert make(policy).rank(views, key) == ranked


def test_equals_in_the_queue_share_the_load() -> None:
    policy = make("shortest_queue")

    chosen = Counter(policy.rank(make_views(5, 5, 9), RouteKey())[0] for _ in range(200))

    assert set(chosen) == {"r0", "r1"}
    assert min(chosen.values()) > 60


@given(views=VIEWS.filter(bool), key=KEYS, imbalance=st.floats(1, 5))
def test_a_prefix_is_followed_unless_that_costs_more_than_computing_it_anew(
    views: list[ReplicaView], key: RouteKey, imbalance: float
) -> None:
    usable = [view for view in views if view.id not in key.avoid] or views
    pages = struct.unpack(f"<{len(key.page_hashes) // 8}Q", key.page_hashes)

    def work(view: ReplicaView) -> int:
        return view.load + max(0, key.num_tokens - view.num_cached(pages) * PAGE_SIZE)

    allowed = imbalance * min(map(work, usable))
    best = max(view.num_cached(pages) for view in usable if work(view) <= allowed)

    first = make("prefix", max_imbalance=imbalance).rank(views, key)[0]

    chosen = next(view for view in views if view.id == first)
    assert work(chosen) <= allowed
    assert chosen.num_cached(pages) == best


def homes(views: list[ReplicaView], num_sessions: int = 300) -> dict[str, str]:
    policy = make("session")
    return {
        name: policy.rank(views, RouteKey(session=name))[0]
        for name in map(str, range(num_sessions))
    }


def test_a_new_replica_takes_its_share_of_sessions_and_moves_no_other() -> None:
    before = homes(make_views(0, 0, 0))
    after = homes(make_views(0, 0, 0, 0))

    moved = {name for name in before if before[name] != after[name]}
    assert all(after[name] == "r3" for name in moved)
    assert 45 < len(moved) < 105  # a quarter of 300 is 75


def test_a_lost_replica_moves_its_own_sessions_only() -> None:
    views = make_views(0, 0, 0, 0)
    before = homes(views)
    after = homes(views[:1] + views[2:])

    assert {before[name] for name in before if before[name] != after[name]} == {"r1"}
    assert set(Counter(after.values())) == {"r0", "r2", "r3"}


@given(views=VIEWS.filter(bool), key=KEYS, imbalance=st.floats(1, 5))
def test_a_session_does_not_wait_for_an_overloaded_replica(
    views: list[ReplicaView], key: RouteKey, imbalance: float
) -> None:
    usable = [view for view in views if view.id not in key.avoid] or views
    allowed = imbalance * (min(v.load for v in usable) + (key.num_tokens or UNKNOWN_TOKENS))

    first = make("session", max_imbalance=imbalance).rank(views, key)[0]

    assert next(view for view in views if view.id == first).load <= allowed


@given(
    views=VIEWS.filter(bool), key=KEYS.filter(lambda key: key.adapter), imbalance=st.floats(1, 5)
)
def test_an_adapter_is_used_where_it_is_unless_that_costs_more_than_loading_it(
    views: list[ReplicaView], key: RouteKey, imbalance: float
) -> None:
    assert key.adapter is not None
    usable = [view for view in views if view.id not in key.avoid] or views
    holders = {view.id for view in usable if key.adapter in view.adapters | view.expected_adapters}

    def work(view: ReplicaView) -> int:
        lacks = view.id not in holders
        return view.load + (key.num_tokens or UNKNOWN_TOKENS) + lacks * LOAD_TOKENS

    least = min(map(work, usable))
    free = {view.id for view in usable if work(view) <= imbalance * least}

    first = make("lora", max_imbalance=imbalance).rank(views, key)[0]

    chosen = next(view for view in views if view.id == first)
    assert first in free
    assert first in holders or not holders & free
    if holders and first not in holders:
        assert work(chosen) == least


@given(views=VIEWS.filter(bool), key=KEYS.filter(lambda key: key.adapter))
def test_routers_that_know_the_same_send_an_adapter_to_the_same_place(
    views: list[ReplicaView], key: RouteKey
) -> None:
    strangers = [dataclasses.replace(v, adapters=set(), expected_adapters=set()) for v in views]

    firsts = {make("lora", max_imbalance=100, seed=n).rank(strangers, key)[0] for n in range(5)}

    assert len(firsts) == 1


def test_adapters_that_nobody_holds_are_spread() -> None:
    policy = make("lora")

    chosen = Counter(
        policy.rank(make_views(0, 0, 0), RouteKey(adapter=str(n)))[0] for n in range(300)
    )

    assert all(60 < chosen[id_] < 140 for id_ in ("r0", "r1", "r2"))


def test_the_next_to_load_a_busy_adapter_is_the_least_loaded_then_who_holds_fewest() -> None:
    key = RouteKey(adapter="x", num_tokens=100)
    views = [
        ReplicaView(id="busy", adapters={"x"}, num_queued_tokens=5000),
        ReplicaView(id="some work", num_queued_tokens=50),
        ReplicaView(id="holds two", adapters={"y"}, expected_adapters={"z"}),
        ReplicaView(id="holds one", adapters={"y"}, expected_adapters={"y"}),
    ]

    for seed in range(9):
        ranked = make("lora", seed=seed).rank(views, key)
        assert ranked == ["holds one", "holds two", "some work", "busy"]


def test_a_rush_on_one_adapter_is_spread_over_all_and_ends_up_where_it_was() -> None:
    def rush(loads: dict[str, int], count: int) -> None:
        for _ in range(count):
            views = [
                ReplicaView(id=id_, num_queued_tokens=load, adapters={"x"} if load else set())
                for id_, load in loads.items()
            ]
            loads[policy.rank(views, RouteKey(adapter="x", num_tokens=100))[0]] += 100

    policy = make("lora")
    loads = {"a": 0, "b": 0, "c": 0}
    rush(loads, 2)
    assert sorted(loads.values()) == [0, 0, 200], "two are not worth another load"
    home = max(loads, key=lambda id_: loads[id_])

    rush(loads, 88)
    assert max(loads.values()) < 1.6 * min(loads.values())

    calm = [ReplicaView(id=id_, adapters={"x"}) for id_ in loads]
    assert policy.rank(calm, RouteKey(adapter="x", num_tokens=100))[0] == home
