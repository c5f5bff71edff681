"""A task that lives no longer than a block: work that goes on beside what waits for it.

Waiting for a task with `asyncio.wait` does not own it: whoever is cancelled there leaves it
running, or leaves unread what it has brought at that very moment. Here the block owns it. Knows no
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

ResultT = TypeVar("ResultT")


@asynccontextmanager
async def scoped_task(work: Awaitable[ResultT]) -> AsyncIterator[asyncio.Task[ResultT]]:
    """Run `work` as a task during the block. After it the task has ended, cancelled if need be.

    What it raises is raised to whoever takes its result, and to nobody else. What it holds when it
    is done (a stream, an adapter) must be owned outside: `result` may never be asked for.
    """
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        # Should we be cancelled here: `gather` passes that on, and still waits for the task's end.
        await asyncio.gather(task, return_exceptions=True)
