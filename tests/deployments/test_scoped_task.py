"""Tasks whose lifetime is limited to a block."""

from __future__ import annotations

import asyncio

import pytest

from remora.deployments.scoped_task import scoped_task
from tests.moments import cancelled, nothing_left, steps


async def test_a_task_is_cancelled_and_has_ended_after_its_block() -> None:
    async with scoped_task(asyncio.Event().wait()) as task:
        await steps(2)
        assert not task.done()
    assert task.cancelled()


async def test_results_and_errors_belong_to_the_block() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async with nothing_left():
        async with scoped_task(asyncio.sleep(0, "done")) as well, scoped_task(fail()):
            assert await well == "done"
        with pytest.raises(ValueError, match="no"):
            async with scoped_task(fail()) as failing:
                await failing


@pytest.mark.parametrize("again", [False, True])
async def test_a_cancelled_block_waits_for_the_end_of_its_task(again: bool) -> None:
    held: list[str] = []

    async def hold() -> None:
        held.append("work")
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await steps(3)
            finally:
                held.clear()

    async def wait() -> None:
        async with scoped_task(hold()):
            await steps(3)

    async with nothing_left():
        for moment in range(12):
            await cancelled(wait(), moment, again=again)
            assert held == []
