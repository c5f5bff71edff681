"""The end of a replica: nothing new is begun, and what takes too long is told so.

A replica that Serve stops gets no new requests, and lives until the running ones have ended or
`api.drain_timeout_s` has passed. Serve tells user code nothing of it before the end, and kills it
then; so we look at Serve's own mark, to end in time what would be cut off without a word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.ray_private import shutdown_check

POLL_S = 0.2

log = logging.getLogger(__name__)


def watch_for_the_end(
    server: ServerState, batches: asyncio.Task[None] | None
) -> asyncio.Task[None] | None:
    """Begin to wait for the end of this replica; None where Serve does not run it."""
    is_stopping = shutdown_check()
    if is_stopping is None:
        return None
    return asyncio.create_task(drain(server, batches, is_stopping))


async def drain(
    server: ServerState, batches: asyncio.Task[None] | None, is_stopping: Callable[[], bool]
) -> None:
    """Wait until the end has begun, and see to it that no stream is cut off in silence.

    batches:  runs batches; another replica takes them over
    """
    while not is_stopping():  # noqa: ASYNC110 (Serve sets no event)
        await asyncio.sleep(POLL_S)
    drain_s = server.config.api.drain_s
    server.calls.is_draining = True
    if batches is not None:
        batches.cancel()
    log.info("stopping; running requests have %g s to end", drain_s)
    # Whoever still comes is served: a refusal would reach the client, not the router.
    await asyncio.sleep(max(0.0, drain_s - POLL_S))
    if not await server.client.drain(0.0):
        log.warning("requests that took longer than api.drain_timeout_s were ended")
