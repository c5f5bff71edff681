"""Replies of a request."""

from __future__ import annotations

import asyncio

from remora.deployments.http.generation.replies import Replies


async def test_other_tasks_go_on_between_the_replies() -> None:
    log: list[str] = []

    async def walk(name: str) -> None:
        nonlocal log
        async for reply in Replies(1, 2).each():
            log += [f"{name}{reply.index}"]

    await asyncio.gather(walk("a"), walk("b"))

    assert log == ["a0", "b0", "a1", "b1"]
