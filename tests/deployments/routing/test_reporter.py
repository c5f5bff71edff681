"""A replica's reports to routers, and when they repeat."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

from remora.deployments.routing.report import MAX_ADAPTERS, Report
from remora.deployments.routing.reporter import Reporter
from remora.engine.types import EngineStats
from tests.deployments.fakes import FakeEngine, make_server_config, make_stats
from tests.moments import cancelled, nothing_left


@dataclass
class Engine(FakeEngine):
    """A fake whose counters can be set, and which may be in a long step."""

    now: EngineStats = field(default_factory=lambda: FakeEngine().stats())
    step: asyncio.Event | None = None

    def stats(self) -> EngineStats:
        return self.now

    async def page_hashes(self, limit: int) -> bytes:
        if self.step is not None:
            await self.step.wait()
        return await super().page_hashes(limit)


def make_reporter(engine: Engine, *, max_pages: int = 2, resident: Sequence[str] = ()) -> Reporter:
    ticks = count()
    return Reporter(
        engine, max_pages=max_pages, resident=lambda: resident, clock=lambda: float(next(ticks))
    )


async def test_a_report_tells_load_and_the_newest_pages() -> None:
    pages = struct.pack("<3Q", 7, 8, 9)
    engine = Engine(cached_pages=pages)
    engine.now = make_stats(
        num_pages=10,
        num_queued_tokens=120,
        num_running=3,
        num_waiting=2,
        num_held_pages=4,
        steps_total=1,
    )

    stats = await make_reporter(engine).stats()

    assert Report.of_stats(stats) == Report(
        made_at_s=1.0,
        num_queued_tokens=120,
        num_running=3,
        num_waiting=2,
        kv_usage=0.4,
        page_hashes=pages[:16],
    )


async def test_while_nothing_happens_the_report_stays_the_same() -> None:
    engine = Engine()
    reporter = make_reporter(engine)
    first = await reporter.stats()

    assert await reporter.stats() == first
    engine.now = make_stats(num_pages=10, steps_total=1)
    assert await reporter.stats() != first


async def test_a_long_step_does_not_hold_the_report_up() -> None:
    engine = Engine(cached_pages=b"12345678")
    reporter = make_reporter(engine)
    await reporter.stats()
    engine.step, engine.cached_pages = asyncio.Event(), b"87654321"
    engine.now = make_stats(num_pages=10, num_running=1)

    late = await reporter.stats()
    assert (late["num_running"], late["page_hashes"]) == (1, b"12345678")

    engine.step.set()
    assert (await reporter.stats())["page_hashes"] == b"87654321"


@pytest.mark.parametrize(
    ("policy", "pages", "adapters"),
    [("shortest_queue", b"", ()), ("prefix", b"12345678", ()), ("lora", b"", ("x",))],
)
async def test_only_what_the_policy_uses_is_reported(
    policy: str, pages: bytes, adapters: tuple[str, ...]
) -> None:
    config = make_server_config(routing={"policy": policy})

    reporter = Reporter.configured(Engine(cached_pages=b"12345678"), config, lambda: ["x"])
    stats = await reporter.stats()

    assert (stats["page_hashes"], stats["adapters"]) == (pages, adapters)


@pytest.mark.observes("routing.max_reported_pages")
async def test_no_more_pages_are_told_than_the_limit() -> None:
    async def num_told(**routing: int) -> int:
        config = make_server_config(routing={"policy": "prefix", **routing})
        told = await Reporter.configured(Engine(cached_pages=bytes(8 * 100)), config).stats()
        return len(told["page_hashes"]) // 8

    assert await num_told() == 100
    assert await num_told(max_reported_pages=64) == 64


async def test_an_adapter_that_comes_or_goes_is_news_and_the_order_is_none() -> None:
    resident = ["y", "x"]
    reporter = make_reporter(Engine(), resident=resident)
    first = await reporter.stats()
    assert first["adapters"] == ("x", "y")

    resident.reverse()
    assert await reporter.stats() == first
    resident.append("z")
    assert (await reporter.stats())["adapters"] == ("x", "y", "z")
    resident.clear()
    assert (await reporter.stats())["adapters"] == ()


async def test_of_more_adapters_than_can_be_told_the_first_are() -> None:
    names = [str(number) for number in range(MAX_ADAPTERS + 2)]

    stats = await make_reporter(Engine(), resident=names).stats()

    assert set(stats["adapters"]) == set(names[:MAX_ADAPTERS])


async def test_reports_may_be_asked_for_together_and_given_up_at_any_moment() -> None:
    async with nothing_left():
        for moment in range(8):
            reporter = make_reporter(Engine(cached_pages=b"12345678"))
            await cancelled(reporter.stats(), moment)
            first, second = await asyncio.gather(reporter.stats(), reporter.stats())
            assert first == second
            assert first["page_hashes"] == b"12345678"
