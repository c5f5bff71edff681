"""A task whose lifetime is limited to a block.

`asyncio.wait` does not own its tasks: if the waiting task is cancelled, they keep running, and
their results may be lost. Here the block owns the task. Does not know requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

ResultT = TypeVar("ResultT")


@asynccontextmanager
async def scoped_task(work: Awaitable[ResultT]) -> AsyncIterator[asyncio.Task[ResultT]]:
    """Run `work` as a task during the block, and cancel it at the end if it is still running.

    Its exception is raised only by `result`. Resources that it returns (a stream, an adapter) must
    be owned outside, because `result` may never be called.
    """
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        # If this task is cancelled here, `gather` raises and still waits for the task's end.
        await asyncio.gather(task, return_exceptions=True)
