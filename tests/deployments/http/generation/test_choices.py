"""Choices of a call."""

from __future__ import annotations

import asyncio

from remora.deployments.http.generation.choices import Choices


async def test_other_tasks_go_on_between_the_choices() -> None:
    log: list[str] = []

    async def walk(name: str) -> None:
        nonlocal log
        async for choice in Choices(1, 2).each():
            log += [f"{name}{choice.index}"]

    await asyncio.gather(walk("a"), walk("b"))

    assert log == ["a0", "b0", "a1", "b1"]
