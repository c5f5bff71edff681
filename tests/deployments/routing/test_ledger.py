"""A router's view of replicas between two reports, and after them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from remora.deployments.routing import ledger as ledger_module
from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.ledger import EXPECTED_S, UNCONFIRMED_S, Ledger
from remora.deployments.routing.policies import ReplicaView
from remora.deployments.routing.report import MAX_ADAPTERS, Report


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class Router:
    """A ledger of the replicas a and b, whose clocks show 1000 seconds more than the router's."""

    def __init__(self, *, max_pages: int = 8, sees_completions: bool = True) -> None:
        self.clock = Clock()
        self.ledger = Ledger(
            max_pages=max_pages, sees_completions=sees_completions, clock=self.clock
        )
        self.ledger.keep("ab")
        for id_ in "ab":
            self.report(id_)

    def report(
        self,
        id_: str,
        *,
        made_ago_s: float = 0.0,
        pages: bytes = b"",
        adapters: tuple[str, ...] = (),
        **what: int,
    ) -> None:
        made_at_s = self.clock.now_s + 1000 - made_ago_s
        report = Report(made_at_s=made_at_s, page_hashes=pages, adapters=adapters, **what)
        self.ledger.take_report(id_, report.as_stats())

    def send(
        self,
        name: str,
        id_: str = "a",
        *,
        tokens: int = 1,
        pages: bytes = b"",
        session: str | None = None,
        adapter: str | None = None,
    ) -> None:
        self.clock.now_s += 0.01
        key = RouteKey(num_tokens=tokens, page_hashes=pages, session=session, adapter=adapter)
        self.ledger.sent(name, id_, key)
        self.clock.now_s += 0.01

    def view(self, id_: str = "a") -> ReplicaView:
        (view,) = self.ledger.views(id_)
        return view


def pack(*pages: int) -> bytes:
    return struct.pack(f"<{len(pages)}Q", *pages)


def test_a_request_counts_at_once_and_a_report_covers_what_was_sent_before_it() -> None:
    router = Router()
    router.send("r1", tokens=70)
    router.clock.now_s += 1
    router.send("r2", tokens=30)

    assert (router.view().num_requests, router.view().num_queued_tokens) == (2, 100)
    assert router.view("b") == ReplicaView(id="b")
    router.report("a", made_ago_s=0.5, num_queued_tokens=11, num_running=1)
    assert (router.view().num_requests, router.view().num_queued_tokens) == (2, 41)


def test_a_report_repeated_changes_nothing() -> None:
    router = Router()
    stats = Report(made_at_s=1200.0, num_queued_tokens=5).as_stats()
    router.ledger.take_report("a", stats)
    router.send("r1", tokens=70)

    router.ledger.take_report("a", dict(stats))

    assert router.view().num_queued_tokens == 75


def test_a_request_that_ends_after_the_report_counts_no_more() -> None:
    router = Router()
    router.send("r1")
    router.clock.now_s += 1
    router.report("a", num_running=3)
    assert router.view().num_requests == 3

    router.ledger.ended("r1", "a")

    assert router.view().num_requests == 2


def test_without_completions_a_report_ends_what_it_covers() -> None:
    router = Router(sees_completions=False)
    router.send("r1", tokens=70)
    router.send("r2", "b", tokens=50)
    router.clock.now_s += 1
    router.send("r3", tokens=30)

    router.report("a", made_ago_s=0.5)  # r1 is done

    assert (router.view().num_requests, router.view().num_queued_tokens) == (1, 30)
    assert router.view("b").num_queued_tokens == 50


def test_without_completions_a_request_that_no_report_covers_is_forgotten() -> None:
    router = Router(sees_completions=False)
    router.send("r1", tokens=70)
    router.send("r2", "b", tokens=50)
    router.clock.now_s += UNCONFIRMED_S / 2
    router.send("r3", tokens=30)
    router.clock.now_s += UNCONFIRMED_S / 2

    assert (router.view().num_requests, router.view().num_queued_tokens) == (1, 30)
    assert router.view("b").load == 0
    router.ledger.keep("b")
    router.clock.now_s += UNCONFIRMED_S
    assert router.view("b").load == 0
    assert not any(map(router.ledger.has, ("r1", "r2", "r3")))


def test_a_request_that_went_elsewhere_counts_there_only() -> None:
    router = Router()
    router.send("r1", "a", tokens=70)

    router.send("r1", "b", tokens=70)
    router.ledger.ended("r1", "a")  # the refusal of a, told late

    assert router.view("a").load == 0
    assert router.view("b").num_queued_tokens == 70


def test_pages_sent_there_are_expected_until_they_are_reported() -> None:
    router = Router()
    router.send("r1", tokens=32, pages=pack(1, 2))
    assert router.view().num_cached([1, 2, 3]) == 2

    router.clock.now_s += 1
    router.report("a", pages=pack(1))  # still computing
    assert router.view().num_cached([1, 2, 3]) == 2

    router.clock.now_s += 1
    router.report("a", pages=pack(1, 2))
    router.clock.now_s += 1
    router.report("a", pages=pack(1))  # 2 was evicted
    assert router.view().num_cached([1, 2, 3]) == 1


def test_an_adapter_sent_for_is_expected_until_it_is_reported() -> None:
    router = Router()
    router.send("r1", adapter="x")
    assert (router.view().holds("x"), router.view("b").holds("x")) == (True, False)

    router.clock.now_s += 1
    router.report("a", adapters=("y",))  # still loading
    assert router.view().num_adapters == 2

    router.clock.now_s += 1
    router.report("a", adapters=("x", "y"))
    assert router.view() == ReplicaView(id="a", num_requests=1, adapters=frozenset({"x", "y"}))

    router.clock.now_s += 1
    router.report("a", adapters=("y",))  # x has left
    assert not router.view().holds("x")


def test_pages_and_adapters_that_never_come_are_not_expected_for_ever() -> None:
    router = Router()
    router.send("r1", tokens=32, pages=pack(1, 2), adapter="x")

    router.clock.now_s += EXPECTED_S
    router.report("a", num_running=1)

    assert router.view() == ReplicaView(id="a", num_requests=1)


def test_no_more_adapters_are_expected_than_a_report_may_name() -> None:
    router = Router()

    for number in range(MAX_ADAPTERS + 3):
        router.send(f"r{number}", adapter=str(number))

    assert router.view().num_adapters == MAX_ADAPTERS
    assert router.view().holds(str(MAX_ADAPTERS + 2))
    assert not router.view().holds("2")


def test_tokens_of_pages_that_are_there_are_not_queued() -> None:
    router = Router()
    router.report("a", made_ago_s=-1, pages=pack(1, 2))

    router.send("r1", tokens=64, pages=pack(1, 2, 3, 4))

    assert router.view().num_queued_tokens == 32


def test_a_session_queues_what_it_has_said_since_its_last_prompt() -> None:
    router = Router()
    router.send("r1", tokens=500, session="s")
    router.ledger.ended("r1")

    router.send("r2", tokens=640, session="s")
    assert router.view("a").num_queued_tokens == 140

    router.ledger.ended("r2")
    router.send("r3", "b", tokens=700, session="s")
    assert router.view("b").num_queued_tokens == 700


def test_no_more_sessions_are_remembered_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_SESSIONS", 2)
    router = Router()

    for session in ("s1", "s2", "s3", "s1"):
        router.send(f"r-{session}", tokens=500, session=session)
        router.ledger.ended(f"r-{session}")
    router.send("again", tokens=500, session="s3")
    router.send("forgotten", "b", tokens=500, session="s2")

    assert router.view("a").num_queued_tokens == 0
    assert router.view("b").num_queued_tokens == 500


def test_a_replica_that_is_gone_leaves_nothing_behind() -> None:
    router = Router()
    router.send("r1", tokens=70)

    router.ledger.keep("b")
    router.ledger.ended("r1", "a")
    router.ledger.keep("ab")

    assert router.view() == ReplicaView(id="a")


def test_stats_of_something_else_are_no_report() -> None:
    router = Router()

    router.ledger.take_report("a", {"cpu": 3})
    router.ledger.take_report("a", None)
    router.ledger.take_report("a", {"made_at_s": 2000.0, "num_running": 4, "from_the_future": 1})

    assert router.view().num_requests == 4


class LedgerMachine(RuleBasedStateMachine):
    """Requests come, move and end in any order, with reports between them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(max_pages=5)
        self.open: dict[str, str] = {}

    names = st.sampled_from([f"r{n}" for n in range(8)])
    ids = st.sampled_from("ab")

    @rule(name=names, id_=ids, tokens=st.integers(1, 99), pages=st.lists(st.integers(1, 9)))
    def send(self, name: str, id_: str, tokens: int, pages: list[int]) -> None:
        self.router.send(name, id_, tokens=tokens, pages=pack(*pages))
        self.open[name] = id_

    @rule(name=names)
    def end(self, name: str) -> None:
        self.router.ledger.ended(name)
        self.open.pop(name, None)

    @rule(id_=ids, ago=st.floats(0, 1))
    def report(self, id_: str, ago: float) -> None:
        at_replica = sum(place == id_ for place in self.open.values())
        self.router.report(id_, made_ago_s=ago, num_running=at_replica)

    @invariant()
    def open_requests_count_and_memory_is_bounded(self) -> None:
        for id_ in "ab":
            view = self.router.view(id_)
            assert view.num_requests >= sum(place == id_ for place in self.open.values())
            assert len(view.expected_pages) <= 5
        if not self.open:
            assert all(self.router.view(id_).num_queued_tokens == 0 for id_ in "ab")


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_no_more_requests_are_followed_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_OPEN_REQUESTS", 3)
    router = Router()

    for number in range(9):
        router.send(f"r{number}")

    assert router.view().num_requests == 3
    assert router.ledger.has("r8")
    assert not router.ledger.has("r5")
