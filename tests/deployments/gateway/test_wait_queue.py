"""Requests wait for the first replica, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from remora.configs.errors import Unavailable
from remora.deployments.gateway.wait_queue import Phase, WaitQueue


def make_queue(
    phases: Iterable[Phase | None],
    *,
    max_held: int = 8,
    report_s: float = 30.0,
) -> WaitQueue:
    """Return a queue that sees these phases, one per look; the last one repeats."""
    left = list(phases)

    async def look() -> Phase | None:
        return left.pop(0) if len(left) > 1 else left[0]

    return WaitQueue(
        look,
        max_held=max_held,
        max_wait_s=30.0,
        patience_s=0.001,
        look_s=0.001,
        report_s=report_s,
    )


class Listener:
    """Records the phases that one request receives; the test sets `taken`."""

    def __init__(self, *, after: int | None = None) -> None:
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.told: list[Phase] = []
        self._after = after

    async def tell(self, phase: Phase) -> None:
        self.told.append(phase)
        if len(self.told) == self._after:
            self.taken.set_result(None)


async def test_a_request_is_told_how_far_its_replica_has_come() -> None:
    room = make_queue([Phase.PLACING, Phase.PLACING, Phase.LOADING, Phase.READY])
    listener = Listener(after=3)

    await room.wait_for(listener.taken, listener.tell)

    assert listener.told == [Phase.PLACING, Phase.LOADING, Phase.READY]
    assert room.num_held == 0


async def test_a_phase_that_lasts_is_told_again_and_again() -> None:
    room = make_queue([Phase.LOADING], report_s=0.0)
    listener = Listener(after=5)

    await room.wait_for(listener.taken, listener.tell)

    assert listener.told == [Phase.LOADING] * 5


async def never() -> Phase:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: make_queue([Phase.READY], max_held=0), id="busy replicas"),
        pytest.param(lambda: make_queue([Phase.READY, None], max_held=0), id="unknown phase"),
        pytest.param(
            lambda: WaitQueue(never, max_held=0, max_wait_s=30.0, patience_s=0.001, look_s=30.0),
            id="the look does not end",
        ),
    ],
)
async def test_a_request_is_not_held_for_replicas_that_may_be_ready(
    make: Callable[[], WaitQueue],
) -> None:
    listener = Listener()
    asyncio.get_running_loop().call_later(0.05, listener.taken.set_result, None)

    async with asyncio.timeout(5):
        await make().wait_for(listener.taken, listener.tell)

    assert listener.told == []


async def test_a_request_that_is_taken_at_once_asks_nobody() -> None:
    room = make_queue([])  # a look would fail
    listener = Listener()
    listener.taken.set_result(None)

    await room.wait_for(listener.taken, listener.tell)

    assert room.num_held == 0


async def test_no_more_than_the_limit_are_held() -> None:
    room = make_queue([Phase.PLACING], max_held=2)
    listeners = [Listener() for _ in range(3)]
    tasks = [asyncio.create_task(room.wait_for(x.taken, x.tell)) for x in listeners]

    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for listener in listeners:
        listener.taken.set_result(None)
    rest = await asyncio.gather(*tasks, return_exceptions=True)

    (refused,) = [task.exception() for task in done]
    assert isinstance(refused, Unavailable)
    assert refused.limit == "max_held_requests"
    assert sum(error is None for error in rest) == 2
    assert room.num_held == 0


@pytest.mark.parametrize("ends", [True, False], ids=["phases", "the second look does not end"])
async def test_a_request_is_held_for_so_long_and_no_longer(ends: bool) -> None:
    phases = iter([Phase.LOADING] * (10**6 if ends else 1))

    async def look() -> Phase:
        return next(phases, None) or await never()

    room = WaitQueue(look, max_held=1, max_wait_s=0.02, patience_s=0.001, look_s=0.001)
    listener = Listener()

    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match=r"within 0.02 s") as caught:
            await room.wait_for(listener.taken, listener.tell)

    assert caught.value.limit == "hold_timeout_s"
    assert room.num_held == 0


async def test_a_request_that_leaves_makes_room() -> None:
    room = make_queue([Phase.LOADING], max_held=1)
    listener = Listener()
    task = asyncio.create_task(room.wait_for(listener.taken, listener.tell))
    while not listener.told:
        await asyncio.sleep(0.001)

    task.cancel()
    await asyncio.wait({task})

    assert room.num_held == 0
