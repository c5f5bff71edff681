"""Asyncio work that ends at any moment: going through the moments, and seeing what is left.

A moment is a number of steps of the event loop. Where threads take part, work may take another
number of steps each time: then the moments are a sample.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

PATIENCE_S = 10.0
_SETTLING_STEPS = 20


async def steps(number: int) -> None:
    """Let the event loop take so many steps."""
    for _ in range(number):
        await asyncio.sleep(0)


async def cancelled(work: Coroutine[Any, Any, object], moment: int, *, again: bool = False) -> bool:
    """Run work and cancel it at a moment; return whether it was still running then.

    again:  whether it is cancelled at each step after that, too, until it has ended
    """
    task = asyncio.create_task(work)
    await steps(moment)
    was_running = not task.done()
    task.cancel()
    await end(task, again=again)
    return was_running


async def end(task: asyncio.Future[Any], *, again: bool = False) -> None:
    """Wait for the end of a task that has been told to end; see `cancelled`."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while again and not task.done() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    assert task.done(), f"{task} does not end"
    if not task.cancelled():
        task.exception()


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Fail if the block leaves a task, a timer, an error that nobody has seen, an open generator.

    Garbage is collected at the end only: what is just let go of must not be what closes it.
    """
    loop, before, hooks = asyncio.get_running_loop(), asyncio.all_tasks(), sys.get_asyncgen_hooks()
    timers = _timers()
    faults: list[str] = []

    def dropped(generator: AsyncGenerator[Any, Any]) -> None:
        faults.append(f"was let go of while open: {generator}")

    sys.set_asyncgen_hooks(finalizer=dropped)
    loop.set_exception_handler(lambda _, context: faults.append(f"was not seen: {context}"))
    gc.disable()
    try:
        yield
        await steps(_SETTLING_STEPS)
        faults += [f"still runs: {task}" for task in asyncio.all_tasks() - before]
        faults += [f"is still to come: {timer}" for timer in _timers() - timers]
        gc.collect()
        await steps(1)
    finally:
        gc.enable()
        loop.set_exception_handler(None)
        sys.set_asyncgen_hooks(*hooks)
    assert not faults, "\n".join(faults)


def _timers() -> set[asyncio.TimerHandle]:
    scheduled = getattr(asyncio.get_running_loop(), "_scheduled", ())  # asyncio's own loop has it
    return {timer for timer in scheduled if not timer.cancelled()}
