"""Draining of a replica that is stopped: requests past the drain timeout end with an error event.

Serve stops routing requests to the replica and kills it after `api.drain_timeout_s`, without
notifying user code. So this module polls the host's flag (`replica_host.py`), to end open streams
in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from remora.deployments.http.generation.server_state import ServerState

POLL_S = 0.2

log = logging.getLogger(__name__)


async def drain(
    server: ServerState, batches: asyncio.Task[None] | None, is_stopping: Callable[[], bool]
) -> None:
    """Wait until the replica is stopped, then end the requests that exceed the drain timeout.

    batches:      the task that runs batches; it is cancelled, and another replica continues them
    is_stopping:  whether the replica is being stopped
    """
    while not is_stopping():  # noqa: ASYNC110 (Serve sets no event)
        await asyncio.sleep(POLL_S)
    drain_s = server.config.api.drain_s
    server.calls.is_draining = True
    if batches is not None:
        batches.cancel()
    log.info("draining: timeout_s=%g", drain_s)
    # Serve requests that still arrive: a refusal would reach the client instead of being rerouted.
    await asyncio.sleep(max(0.0, drain_s - POLL_S))
    if not await server.client.drain(0.0):
        log.warning("draining: ended the requests that exceeded api.drain_timeout_s")
